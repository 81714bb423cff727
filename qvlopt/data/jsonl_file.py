"""Reads JSONL files line by line, without holding them: one object a line (docs/data.md).

The text is UTF-8 whatever the locale says, with or without a byte order mark, with LF or CRLF; blank lines are skipped.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from qvlopt.data.cells import Cell, items_of, path_of
from qvlopt.data.columns import check_columns, check_keys, found_names, lettered
from qvlopt.data.rows import A_LINE, Record, without_halves
from qvlopt.errors import ItemError, RunError

MARK = b"\xef\xbb\xbf"


class JsonlFile:
    """One file. A row is found again by the byte at which its line begins."""

    def __init__(self, path: Path, columns: Mapping[str, str]) -> None:
        check_columns(columns)
        self.path = path
        self.columns = columns

    def records(self) -> Iterator[Record]:
        """Every line that is not blank. Raises RunError with file and line."""
        for number, start, line in self._lines():
            origin = f"{self.path}:{number}"
            found = _parse(line, origin)
            check_keys(found, self.columns, origin)
            yield Record(origin, self._values(found, start, origin), self.path.parent)

    def cell(self, row: int, column: str) -> Any:
        """The value in the line that begins at byte `row`."""
        try:
            with self.path.open("rb") as handle:
                handle.seek(row)
                return without_halves(json.loads(handle.readline().removeprefix(MARK)))[column]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ItemError(f"{self.path}: was changed while it was in use ({type(error).__name__})") from error

    def _lines(self) -> Iterator[tuple[int, int, bytes]]:
        """(number from 1, first byte, line)."""
        start = 0
        try:
            with self.path.open("rb") as handle:
                for number, line in enumerate(handle, 1):
                    text = line.removeprefix(MARK) if number == 1 else line
                    if text.strip():
                        yield number, start, text
                    start += len(line)
        except OSError as error:
            hint = "give the folder that holds manifest.jsonl, or a .jsonl file"
            raise RunError(f"{self.path} cannot be read: {error.strerror}", hint=hint) from error

    def _values(self, found: Mapping[str, Any], start: int, origin: str) -> dict[str, Any]:
        names = found_names(found, self.columns)
        values = {key: found[name] for key, name in names.items()}
        if "choices" not in values and (options := lettered(found)):
            values["choices"] = options
        if "images" in values and any(map(_is_stored, items_of(values["images"]))):
            values["images"] = Cell(self, start, names["images"], origin)
        return values


def _is_stored(item: Any) -> bool:
    """Whether an item is no plain path: base64, or an object of bytes and path."""
    return isinstance(item, dict) or (isinstance(item, str) and path_of(item) is None)


def _parse(line: bytes, origin: str) -> dict[str, Any]:
    try:
        value = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise RunError(f"{origin}: byte {error.start + 1} is not UTF-8", hint="save the file as UTF-8") from error
    except (ValueError, RecursionError) as error:
        raise RunError(f"{origin}: not valid JSON: {error}", hint=A_LINE) from error
    if not isinstance(value, dict):
        raise RunError(f"{origin}: expected an object with id, images, question and answers, got {type(value).__name__}", hint=A_LINE)
    return {without_halves(key): without_halves(item) for key, item in value.items()}
