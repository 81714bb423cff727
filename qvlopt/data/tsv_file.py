"""Reads TSV files as VLMEvalKit publishes them: a header line, pictures in base64, texts quoted where they hold tabs or lines.

The file is walked once, row by row; pictures stay in it and are found again by the byte at which their row begins.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from qvlopt.data.cells import SHORTEST, Cell
from qvlopt.data.columns import check_columns, check_table, lettered
from qvlopt.data.rows import TASKS, Record
from qvlopt.errors import ItemError, RunError

MARK = b"\xef\xbb\xbf"
MAX_ROW = 1 << 28
"""Bytes of one row; a quoted text that goes on for longer was never closed."""

CLOSING = re.compile(rb'[^"]*+(?:""[^"]*+)*+"')
FIELD = re.compile(rb'(?:"([^"]*+(?:""[^"]*+)*+)"|([^\t]*+))(\t|\Z)')
LISTED = ("answers", "choices")
"""Keys whose text may be a list as Python writes it."""


class TsvFile:
    """One file. Every text is as in the file; an empty one counts as missing."""

    def __init__(self, path: Path, columns: Mapping[str, str]) -> None:
        check_columns(columns)
        self.path = path
        self.columns = columns
        self._header: list[str] = []
        self._starts: dict[str, int] = {}  # of rows by id, for pictures that are named by another row's id
        self._id_column = ""

    def records(self) -> Iterator[Record]:
        """Every row after the header. Raises RunError with file and line."""
        names: dict[str, str] = {}
        for number, start, row in self._rows():
            origin = f"{self.path}:{number}"
            fields = [_text(field, origin) for field in _fields(row)]
            if not self._header:
                self._header = fields
                names = check_table(fields, self.columns, origin)
                self._id_column = names.get("id", "")
                continue
            if len(fields) != len(self._header):
                raise RunError(f"{origin}: {len(fields)} columns, the header has {len(self._header)}", hint="quote texts that hold tabs or line ends")
            yield Record(origin, self._values(dict(zip(self._header, fields, strict=True)), names, start, origin), self.path.parent)

    def cell(self, row: int, column: str) -> Any:
        """The text in the row that begins at byte `row`, or the list that it spells; where it is another row's id, that row's."""
        value = self._field(row, column)
        if len(value) <= SHORTEST and value in self._starts and self._starts[value] != row:
            value = self._field(self._starts[value], column)
        return _listed(value)

    def _field(self, row: int, column: str) -> str:
        try:
            with self.path.open("rb") as handle:
                handle.seek(row)
                read = _next_row(handle, "")
                return _text(_fields(read or b"")[self._header.index(column)], "")
        except (OSError, IndexError, RunError) as error:
            raise ItemError(f"{self.path}: was changed while it was in use ({type(error).__name__})") from error

    def _values(self, found: Mapping[str, str], names: Mapping[str, str], start: int, origin: str) -> dict[str, Any]:
        values: dict[str, Any] = {key: found[name] for key, name in names.items() if found[name] != ""}
        values |= {key: _listed(values[key]) for key in LISTED if key in values}
        values |= {key: _numbers(values[key]) for key in ("box", "box_xywh", "box_1000") if key in values}
        if "choices" not in values and (options := lettered(found)):
            values["choices"] = options
        if values.get("task") not in TASKS:
            values.pop("task", None)  # a published column of that name says something else
        if "id" in values:
            self._starts.setdefault(values["id"], start)
        if "images" in values:
            values["images"] = Cell(self, start, names["images"], origin)
        return values

    def _rows(self) -> Iterator[tuple[int, int, bytes]]:
        """(number of its first line, first byte, bytes without the line end) of every row that is not blank."""
        number = 1
        try:
            with self.path.open("rb") as handle:
                while True:
                    start = handle.tell()
                    row = _next_row(handle, f"{self.path}:{number}")
                    if row is None:
                        return
                    text = row.removeprefix(MARK) if start == 0 else row
                    if text.strip(b"\r\n"):
                        yield number, start, text
                    number += max(1, row.count(b"\n"))
        except OSError as error:
            raise RunError(f"{self.path} cannot be read: {error.strerror}", hint="give a .tsv file with a header line") from error


def _next_row(handle: IO[bytes], origin: str) -> bytes | None:
    """The bytes up to a line end that no quoted text holds, with it; None at the end of the file."""
    lines = [handle.readline()]
    size = len(lines[0])
    is_open = _leaves_open(lines[0], False)
    while is_open:
        line = handle.readline()
        size += len(line)
        if not line or size > MAX_ROW:
            raise RunError(f"{origin}: a quoted text that begins here is never closed", hint="close it, or double the quotes inside it")
        lines.append(line)
        is_open = _leaves_open(line, True)
    return b"".join(lines) or None


def _leaves_open(line: bytes, is_open: bool) -> bool:
    """Whether a quoted field goes on behind this line. `is_open`: one came in. Quotes inside unquoted fields are characters."""
    position = 0
    while 0 <= position < len(line):
        if is_open or line.startswith(b'"', position):
            closing = CLOSING.match(line, position if is_open else position + 1)
            if closing is None:
                return True
            is_open, position = False, closing.end()
        position = line.find(b"\t", position) + 1 or -1
    return is_open


def _fields(row: bytes) -> list[bytes]:
    """The row's fields without their quotes; a field that goes on behind a closing quote is taken as it stands."""
    text = row.rstrip(b"\r\n")
    if b'"' not in text:
        return text.split(b"\t")
    fields, position = [], 0
    while True:
        match = FIELD.match(text, position)
        assert match is not None  # the second way to read a field takes anything
        fields.append(match[1].replace(b'""', b'"') if match[1] is not None else match[2])
        position = match.end()
        if match[3] == b"":
            return fields


def _text(field: bytes, origin: str) -> str:
    try:
        return field.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RunError(f"{origin}: byte {error.start + 1} of a column is not UTF-8", hint="save the file as UTF-8") from error


def _listed(text: str) -> Any:
    """The list of texts that `text` spells as Python or JSON would, else `text` itself. Nothing is evaluated."""
    if not text.startswith("["):
        return text
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text
    return value if isinstance(value, list) and all(isinstance(item, str) for item in value) else text


def _numbers(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text
