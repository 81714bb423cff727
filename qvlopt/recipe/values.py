"""Reads a scalar of a recipe by the type of its field, not by YAML's guess at it.

So `1e-4` is a number, `no` is a name where a name is wanted and false where a switch is, `012` keeps its zero as a
revision and is 12 as a count.
"""

from __future__ import annotations

import difflib
import math
import types
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import Annotated, Any, Literal, Union, get_args, get_origin

SWITCHES = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
NULLS = ("", "~", "null")


@dataclass(frozen=True)
class Scalar:
    """A scalar as it stands in the file; `is_plain` when it is not in quotes."""

    text: str
    is_plain: bool

    @property
    def is_null(self) -> bool:
        return self.is_plain and self.text.lower() in NULLS

    def __repr__(self) -> str:
        return self.text if self.is_plain and self.text else repr(self.text)


def read_as(value: object, annotation: Any) -> object:
    """`value` (Scalars inside) as the annotation wants it; ValueError says what was expected.

    Values that are no Scalars (a recipe given as a dict) are not reinterpreted, only checked by pydantic afterwards.
    """
    if get_origin(annotation) is Annotated:
        return read_as(value, get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        return _read_optional(value, get_args(annotation))
    if isinstance(value, Mapping):
        return _read_mapping(value, annotation)
    if isinstance(value, list | tuple):
        return _read_list(value, annotation)
    reader = {bool: _read_switch, int: _read_integer, float: _read_number, str: _read_text}.get(annotation)
    if reader is not None:
        return reader(value)
    if get_origin(annotation) is Literal:
        return _read_choice(value, get_args(annotation))
    return _expected_container(value, annotation)


def nearest(word: str, candidates: Iterable[str]) -> str | None:
    """The candidate that `word` most likely means, or None."""
    matches = difflib.get_close_matches(word, list(candidates), n=1, cutoff=0.6)
    return matches[0] if matches else None


def _read_optional(value: object, members: tuple[Any, ...]) -> object:
    if value is None or (isinstance(value, Scalar) and value.is_null):
        return None
    wanted = [member for member in members if member is not types.NoneType]
    listed = [member for member in wanted if isinstance(value, list | tuple) and _is_list(member)]
    return read_as(value, (listed or wanted)[0])


def _is_list(annotation: Any) -> bool:
    inner = get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation
    return get_origin(inner) is tuple


def _read_mapping(value: Mapping[Any, object], annotation: Any) -> object:
    if get_origin(annotation) is dict:
        of_key, of_value = get_args(annotation)
        return {read_as(key, of_key): read_as(item, of_value) for key, item in value.items()}
    if hasattr(annotation, "model_fields"):
        return value
    raise ValueError(f"expected {_kind(annotation)}, not a mapping")


def _read_list(value: list[Any] | tuple[Any, ...], annotation: Any) -> object:
    if get_origin(annotation) is not tuple:
        raise ValueError(f"expected {_kind(annotation)}, not a list")
    return tuple(read_as(item, get_args(annotation)[0]) for item in value)


def _expected_container(value: object, annotation: Any) -> object:
    if isinstance(value, Scalar) or value is None or isinstance(value, str | int | float):
        raise ValueError(f"expected {_kind(annotation)}, got {value!r}")
    return value


def _read_switch(value: object) -> object:
    if isinstance(value, bool):
        return value
    if isinstance(value, Scalar) and value.text.lower() in SWITCHES:
        return SWITCHES[value.text.lower()]
    raise ValueError(f"expected true or false, got {value!r}")


def _read_integer(value: object) -> object:
    number = _read_number(value, kind="a whole number")
    if not isinstance(number, float):
        return number
    if number != int(number):
        raise ValueError(f"expected a whole number, got {value!r}")
    return int(number)


def _read_number(value: object, kind: str = "a number") -> object:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return _finite(value, value, kind)
    text = value.text if isinstance(value, Scalar) else ""
    for number_type in (int, float):
        try:
            return _finite(number_type(text), value, kind)
        except (ValueError, OverflowError):
            continue
    raise ValueError(f"expected {kind}, got {value!r}")


def _finite(number: int | float, value: object, kind: str) -> int | float:
    if not math.isfinite(number):
        raise ValueError(f"expected {kind}, got {value!r}")
    return number


def _read_text(value: object) -> object:
    if isinstance(value, Scalar) and not value.is_null:
        return value.text
    if isinstance(value, str | PurePath):
        return str(value)
    raise ValueError(f"expected text, got {value!r}")


def _read_choice(value: object, choices: tuple[Any, ...]) -> object:
    text = value.text if isinstance(value, Scalar) else value
    for choice in choices:
        if text == choice or (isinstance(value, Scalar) and text == str(choice)):
            return choice
    shown = ", ".join(str(choice) for choice in choices)
    near = nearest(str(text), [str(choice) for choice in choices])
    meant = f"; did you mean {near}?" if near else ""
    raise ValueError(f"expected {'one of ' if len(choices) > 1 else ''}{shown}, got {value!r}{meant}")


def _kind(annotation: Any) -> str:
    """How a message calls what the annotation takes."""
    if get_origin(annotation) is tuple:
        return "a list, such as [...]"
    if get_origin(annotation) is dict or hasattr(annotation, "model_fields"):
        return "a mapping, such as {key: value}"
    return {bool: "true or false", int: "a whole number", float: "a number", str: "text"}.get(annotation, "one value")
