"""Pictures inside the files of a set: where they are, and their bytes when they are asked for.

A cell is what a row holds in its column of pictures: nothing, one item or a list of them. An item is the path of a file,
bytes, base64 text (plain or as a data URI), or the hub's object of `bytes` and `path`.
"""

from __future__ import annotations

import base64
import binascii
import re
from dataclasses import dataclass
from typing import Any, Protocol

from qvlopt.errors import ItemError

DATA_URI = re.compile(r"data:image/[\w.+-]+;base64,", re.IGNORECASE)
SIGNATURES = ("/9j/", "iVBORw0KGgo", "R0lGOD", "UklGR", "Qk", "SUkq", "TU0A", "AAAA")
"""How JPEG, PNG, GIF, WebP, BMP, TIFF and AVIF begin in base64."""

SHORTEST = 64
"""Characters of base64 below which a text is a path: no picture is as small."""


class CellSource(Protocol):
    """A file of a set. `row` is its own way to find a row again: a byte offset in text files, a number in tables."""

    def cell(self, row: int, column: str) -> Any:
        """The cell as the file holds it. Raises ItemError when it cannot be read any more."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One row's pictures, not read yet. `origin` names file and row."""

    source: CellSource
    row: int
    column: str
    origin: str

    def items(self) -> list[Any]:
        """What the cell holds, now."""
        return items_of(self.source.cell(self.row, self.column))


@dataclass(frozen=True, slots=True)
class StoredPicture:
    """One picture of a cell."""

    cell: Cell
    index: int

    @property
    def name(self) -> str:
        """File, row and, from the second picture on, which one of the row."""
        return self.cell.origin + (f"[{self.index}]" if self.index else "")

    def read(self) -> bytes:
        """The picture's file as bytes. Raises ItemError that names it."""
        items = self.cell.items()
        if self.index >= len(items):
            raise ItemError(f"{self.name}: is missing")
        try:
            return bytes_of(items[self.index])
        except ValueError as error:
            raise ItemError(f"{self.name}: {error}") from error


def items_of(value: Any) -> list[Any]:
    """The items of a cell: an empty one has none."""
    if value is None or value == "":
        return []
    return list(value) if isinstance(value, list | tuple) else [value]


def path_of(item: Any) -> str | None:
    """The path that an item names; None where it holds the bytes themselves, or neither."""
    if isinstance(item, dict) and item.get("bytes") is None:
        item = item.get("path")
    return item if isinstance(item, str) and not is_base64(item) else None


def is_base64(text: str) -> bool:
    """True for a data URI, and for text that begins as a picture does in base64 and cannot be a path."""
    if DATA_URI.match(text):
        return True
    start = text[:SHORTEST]
    return len(text) >= SHORTEST and start.startswith(SIGNATURES) and re.fullmatch(r"[A-Za-z0-9+/=\s]+", start) is not None


def bytes_of(item: Any) -> bytes:
    """The bytes of an item that is no path. Raises ValueError."""
    if isinstance(item, dict):
        item = item.get("bytes")
    if isinstance(item, bytes):
        return item
    if not isinstance(item, str):
        raise ValueError(f"holds {type(item).__name__} where a picture is expected: bytes, base64 text or a path")
    try:
        return base64.b64decode(re.sub(r"\s", "", DATA_URI.sub("", item, count=1)), validate=True)
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"is no valid base64: {error}") from error
