"""Values out of a checkpoint's JSON settings; a wrong one is refused by file, key and what was expected, before any work."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from qvlopt.errors import RunError

MOST = 2**31 - 1
RESTORE = "take the file from the original checkpoint"


class Settings:
    """One JSON object. `where` names its file, and its place in there, in errors, which are RunErrors."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self._values = values
        self._where = where

    def whole(self, key: str, default: int | None = None, *, most: int = MOST) -> int:
        """A whole number from 1 to `most`; `default` where the key is absent or null."""
        value = self._get(key, default)
        if not _is_whole(value, 1, most):
            raise self._refused(key, value, "a whole number above 0" if most == MOST else f"a whole number from 1 to {most}")
        return int(value)

    def wholes(self, key: str, *, least: int, most: int) -> tuple[int, ...]:
        """A list of whole numbers within the bounds."""
        value = self._get(key, None)
        if not isinstance(value, list) or not all(_is_whole(item, least, most) for item in value):
            raise self._refused(key, value, f"a list of whole numbers from {least} to {most}")
        return tuple(value)

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number above 0."""
        value = self._get(key, default)
        if not _is_number(value) or value <= 0:
            raise self._refused(key, value, "a number above 0")
        return float(value)

    def numbers(self, key: str, count: int) -> tuple[float, ...]:
        """A list of so many finite numbers."""
        value = self._get(key, None)
        if not isinstance(value, list) or len(value) != count or not all(map(_is_number, value)):
            raise self._refused(key, value, f"a list of {count} numbers")
        return tuple(float(item) for item in value)

    def choice(self, key: str, default: str, choices: tuple[str, ...]) -> str:
        """One of the texts."""
        value = self._get(key, default)
        if not isinstance(value, str) or value not in choices:
            raise self._refused(key, value, " or ".join(choices))
        return value

    def section(self, key: str) -> Settings:
        """An object inside this one; an empty one where the key is absent or null."""
        value = self._get(key, {})
        if not isinstance(value, dict):
            raise self._refused(key, value, "an object")
        return Settings(value, f"{self._where}: {key}")

    def _get(self, key: str, default: object) -> Any:
        value = self._values.get(key)
        if value is None and default is None:
            raise RunError(f"{self._where}: {key} is missing", hint=RESTORE)
        return default if value is None else value

    def _refused(self, key: str, value: object, expected: str) -> RunError:
        shown = repr(value)
        return RunError(f"{self._where}: {key} is {shown[:60]}{'...' if len(shown) > 60 else ''}, expected {expected}", hint=RESTORE)


def _is_whole(value: object, least: int, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e300 and math.isfinite(value)
