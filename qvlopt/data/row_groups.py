"""Row groups of parquet files whose pictures are asked for.

Small sets (ChartQA, OCRBench: 70 MB) are held as they are read, so that their pictures cost nothing in any order. Of a
larger set one group is walked with one batch in memory: holding a part would not help, since pictures are asked for by size.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow.parquet

HELD_BYTES = 256 << 20
"""Bytes of all pictures of a set up to which they are held."""
BATCH_ROWS = 8


class RowGroups:
    """The pictures of one set's files, as far as they are in memory. For several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bytes = 0
        self._held: dict[tuple[Path, int, str], Any] = {}
        self._walk: _Walk | None = None

    def expect(self, metadata: pyarrow.parquet.FileMetaData, column: str) -> None:
        """Another file of the set, whose pictures are in that column."""
        groups = (metadata.row_group(number) for number in range(metadata.num_row_groups))
        parts = (group.column(index) for group in groups for index in range(metadata.num_columns))
        self._bytes += sum(part.total_uncompressed_size for part in parts if part.path_in_schema.split(".")[0] == column)

    def value(self, path: Path, metadata: pyarrow.parquet.FileMetaData, column: str, place: tuple[int, int]) -> Any:
        """The cell at `place` = (group, row in it). Raises OSError, StopIteration and Arrow's errors for a damaged file."""
        group, row = place
        key = (path, group, column)
        with self._lock:
            if self._bytes <= HELD_BYTES:
                if key not in self._held:
                    self._held[key] = _whole(path, metadata, group, column)
                return self._held[key][row].as_py()
            if self._walk is None or self._walk.key != key or row < self._walk.first:
                self._stop()
                self._walk = _Walk(path, metadata, group, column)
            try:
                return self._walk.value(row)
            except Exception:
                self._stop()
                raise

    def _stop(self) -> None:
        if self._walk is not None:
            self._walk.file.close()
        self._walk = None


class _Walk:
    """On the way through one row group: the last batch that was read."""

    def __init__(self, path: Path, metadata: pyarrow.parquet.FileMetaData, group: int, column: str) -> None:
        self.key = (path, group, column)
        self.file = _opened(path, metadata)
        self.batches: Iterator[Any] = self.file.iter_batches(BATCH_ROWS, row_groups=[group], columns=[column], use_threads=False)
        self.batch: Any = None
        self.first = self.past = 0

    def value(self, row: int) -> Any:
        while row >= self.past:
            self.batch = next(self.batches)
            self.first, self.past = self.past, self.past + self.batch.num_rows
        return self.batch.column(0)[row - self.first].as_py()


def _whole(path: Path, metadata: pyarrow.parquet.FileMetaData, group: int, column: str) -> Any:
    with _opened(path, metadata) as file:
        return file.read_row_group(group, columns=[column], use_threads=False).column(0)


def _opened(path: Path, metadata: pyarrow.parquet.FileMetaData) -> pyarrow.parquet.ParquetFile:
    import pyarrow.parquet

    return pyarrow.parquet.ParquetFile(path, metadata=metadata, memory_map=True)
