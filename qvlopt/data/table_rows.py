"""Makes records of a table's rows, whether they come from parquet files or from the datasets library."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from qvlopt.data.cells import Cell, CellSource
from qvlopt.data.columns import LETTERS, lettered
from qvlopt.data.rows import TASKS, Record


class TableRows:
    """What every row of one table has in common.

    `names`: our keys and the table's names for them. `labels`: names of the classes of columns that hold their numbers.
    `first_id`: the id of the first row where the table has no column of ids.
    """

    def __init__(self, source: CellSource, names: Mapping[str, str], labels: Mapping[str, Sequence[str]], place: str, folder: Path) -> None:
        self.source = source
        self.names = names
        self.labels = labels
        self.place = place
        self.folder = folder

    def light_columns(self, present: Sequence[str]) -> list[str]:
        """The columns to read for every row: all that are used, without the pictures."""
        used = {name for key, name in self.names.items() if key != "images"}
        return [name for name in present if name in used or name in LETTERS]

    def record(self, found: Mapping[str, Any], number: int, position: int) -> Record:
        """The row of that `number` from 0 in its file; `position` is its number in the set, its id where it has none."""
        origin = f"{self.place}:{number + 1}"
        values = {key: self._value(name, found[name]) for key, name in self.names.items() if key != "images" and found[name] is not None}
        if "id" not in self.names:
            values["id"] = position
        if "choices" not in values and (options := lettered(found)):
            values["choices"] = options
        if values.get("task") not in TASKS:
            values.pop("task", None)  # a published column of that name says something else
        if "images" in self.names:
            values["images"] = Cell(self.source, number, self.names["images"], origin)
        return Record(origin, values, self.folder)

    def _value(self, name: str, value: Any) -> Any:
        classes = self.labels.get(name)
        if classes and isinstance(value, int) and 0 <= value < len(classes):
            return classes[value]
        return value
