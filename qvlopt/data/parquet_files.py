"""Reads parquet files in batches: the light columns of all rows once, and pictures only where they are asked for.

The least that parquet gives back is a page of one column, which is as large as its writer made it: up to a row group, 100
rows in the hub's sets of pictures. Reading in the order of the file reads every group once; row_groups.py says what stays.
"""

from __future__ import annotations

import bisect
import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from qvlopt.data.columns import check_columns, check_table
from qvlopt.data.row_groups import RowGroups
from qvlopt.data.rows import Record
from qvlopt.data.table_rows import TableRows
from qvlopt.errors import ItemError, RunError

LIGHT_ROWS = 1024
"""Rows of a batch without pictures."""


class ParquetFile:
    """One file. A row is found again by its number from 0."""

    def __init__(self, path: Path, columns: Mapping[str, str], groups: RowGroups) -> None:
        import pyarrow.parquet

        check_columns(columns)
        self.path = path
        self.groups = groups
        try:
            with pyarrow.parquet.ParquetFile(path) as file:
                self.metadata, self.schema = file.metadata, file.schema_arrow
        except (OSError, pyarrow.ArrowException) as error:
            raise RunError(f"{path} cannot be read as parquet: {error}", hint="download or write it again") from error
        names = check_table(self.schema.names, columns, str(path))
        self.rows = TableRows(self, names, class_labels(self.schema.metadata or {}), str(path), path.parent)
        if "images" in names:
            groups.expect(self.metadata, names["images"])
        numbers = range(self.metadata.num_row_groups)
        self._starts = [0, *accumulate(self.metadata.row_group(number).num_rows for number in numbers)]

    def records(self, position: int) -> Iterator[Record]:
        """Every row; the first one is number `position` of the set. Raises RunError where the file is damaged."""
        import pyarrow.parquet

        light = self.rows.light_columns(self.schema.names)
        number = 0
        try:
            with pyarrow.parquet.ParquetFile(self.path, memory_map=True) as file:
                for batch in file.iter_batches(LIGHT_ROWS, columns=light):
                    for found in batch.to_pylist():
                        yield self.rows.record(found, number, position + number)
                        number += 1
        except (OSError, pyarrow.ArrowException) as error:
            raise RunError(f"{self.path}: from row {number + 1} on it cannot be read: {error}", hint="download or write it again") from error

    def cell(self, row: int, column: str) -> Any:
        """The value of a column of pictures in a row."""
        import pyarrow

        group = bisect.bisect_right(self._starts, row) - 1
        try:
            return self.groups.value(self.path, self.metadata, column, (group, row - self._starts[group]))
        except (OSError, StopIteration, pyarrow.ArrowException) as error:
            raise ItemError(f"{self.path}:{row + 1}: cannot be read: {str(error) or 'the file was changed'}") from error


def class_labels(metadata: Mapping[bytes, bytes]) -> dict[str, Sequence[str]]:
    """Columns that hold numbers of classes, with the classes' names, as the datasets library notes them in a schema."""
    try:
        features = json.loads(metadata[b"huggingface"])["info"]["features"]
        return {name: feature["names"] for name, feature in features.items() if feature.get("_type") == "ClassLabel"}
    except (KeyError, ValueError, TypeError, AttributeError):
        return {}
