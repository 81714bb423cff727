"""Turns pydantic's errors into problems that name the place, the key, what was found and the nearest valid key."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from qvlopt.errors import Problem
from qvlopt.recipe.parse import KeyPath
from qvlopt.recipe.schema import Recipe
from qvlopt.recipe.values import nearest


class Fault(NamedTuple):
    """A wrong key: its path in the recipe, what to say, and whether the fault is that it is missing."""

    path: KeyPath
    problem: Problem
    is_missing: bool


def problems_of(error: ValidationError, places: Mapping[KeyPath, str]) -> list[Fault]:
    """Every fault of a validation, once a key. `places` says where each key was written."""
    faults: dict[KeyPath, Fault] = {}
    for details in error.errors(include_url=False):
        path: KeyPath = tuple(details["loc"])
        place = path
        while place not in places:
            place = place[:-1]
        message = f"{'.'.join(map(str, path))}: {_said(details, path)}"
        faults.setdefault(path, Fault(path, Problem(places[place], message), details["type"] == "missing"))
    # A list is not blamed for being empty when it is its entries that were wrong.
    return [fault for path, fault in faults.items() if not any(other[: len(path)] == path and other != path for other in faults)]


def _said(details: ErrorDetails, path: KeyPath) -> str:
    kind = details["type"]
    if kind == "extra_forbidden":
        return _unknown_key(str(path[-1]), path[:-1])
    if kind == "missing":
        return "is missing; name a hub id, a folder or builtin:nano, here or with --model" if path[0] == "model" else "is missing"
    if kind == "value_error":
        return str(details["ctx"]["error"])
    if kind == "string_unicode":
        return f"is no text in this locale, got {details['input']!r}; use another path or a UTF-8 locale, such as LC_ALL=C.UTF-8"
    if kind == "too_short":
        return "needs at least one entry"
    said = details["msg"].replace("Input should be", "must be").replace("String should", "must")
    if kind == "string_pattern_mismatch":
        said = "has characters that are not allowed here" if path[-1] == "name" else "expected WIDTHxHEIGHT, such as 640x480"
    return f"{said}, got {details['input']!r}"


def _unknown_key(key: str, section: KeyPath) -> str:
    """Names the nearest key of the same section, else the section that has this key, else the keys there are."""
    model = _model_at(section)
    near = nearest(key.replace("-", "_"), model.model_fields)
    if near:
        return f"unknown key; did you mean {near}?"
    owners = [".".join((*home, key)) for home in _homes(Recipe, ()) if key in _model_at(home).model_fields]
    if owners:
        return f"unknown key here; it belongs to {' or '.join(owners)}"
    return f"unknown key; there are {', '.join(model.model_fields)}"


def _model_at(section: KeyPath) -> type[BaseModel]:
    model: type[BaseModel] = Recipe
    for part in section:
        if isinstance(part, str):
            model = _model_in(model.model_fields[part].annotation) or model
    return model


def _homes(model: type[BaseModel], path: tuple[str, ...]) -> list[tuple[str, ...]]:
    """The paths of all sections, outer ones first."""
    homes = [path]
    for key, field in model.model_fields.items():
        inner = _model_in(field.annotation)
        if inner is not None:
            homes.extend(_homes(inner, (*path, key)))
    return homes


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """The section type in an annotation such as `PixelLimits | None` or `tuple[DataEntry, ...]`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for found in map(_model_in, get_args(annotation)) if found), None)
