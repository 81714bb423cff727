"""From a file, a shipped name or a dict to a checked `Recipe`, with the origin of every value.

A flag beats `--set`, which beats the file, which beats the default. Everything that is wrong is reported at once, each
with its place, its key and the nearest valid key.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from qvlopt.errors import Problem, RecipeProblems, UsageError
from qvlopt.recipe.blame import Fault, problems_of
from qvlopt.recipe.parse import KeyPath, Parsed, parse_yaml, section_name
from qvlopt.recipe.paths import user_path
from qvlopt.recipe.rules import broken_rules
from qvlopt.recipe.schema import PIPELINE, Recipe
from qvlopt.recipe.shipped import shipped_names, shipped_recipe
from qvlopt.recipe.values import nearest

DEFAULT = "default"
FLAG_NAMES = {"model.path": "--model", "output": "--output", "hardware.threads": "--threads"}
MAX_BYTES = 1_000_000


@dataclass(frozen=True)
class LoadedRecipe:
    """A recipe with its origins.

    `origins` has one entry a value, lists of scalars as one: `demo.yaml:12`, `--set`, the flag, or `default`. `folder` is
    where relative paths are looked up first. `sections` are those present in the file, in pipeline order.
    """

    recipe: Recipe
    origins: dict[str, str]
    folder: Path
    sections: tuple[str, ...]
    source: str


def load_recipe(source: str | Path | Mapping[str, Any], *, overrides: Sequence[str] = (), flags: Mapping[str, object] | None = None) -> LoadedRecipe:
    """Loads and checks a recipe.

    `source` is a path, a shipped name or a mapping; `overrides` are `key.path=value` with YAML values; `flags` maps dotted
    keys to plain values. Raises RecipeProblems with everything that is wrong, and UsageError when there is no such recipe.
    """
    tree = _tree_of(source)
    sections = tuple(section for section in PIPELINE if section in tree.data)
    for override in overrides:
        tree.override(override)
    for key, value in (flags or {}).items():
        flag = FLAG_NAMES.get(key, f"--{key}")
        tree.put(key, value, {}, where=flag, label=flag)
    tree.put_default("name", tree.name)
    name = tree.data.get("name", tree.name)
    tree.put_default("output", f"out/{getattr(name, 'text', name)}")
    recipe = _validated(tree)
    return LoadedRecipe(recipe, dict(_origins(recipe, (), tree.labels)), tree.folder, sections, tree.source)


class _Tree:
    """The values of a recipe while it is put together: nested dicts and lists, and where each key came from."""

    def __init__(self, data: dict[str, Any], *, source: str, folder: Path, name: str) -> None:
        self.data = data
        self.source = source
        self.folder = folder
        self.name = name
        self.places: dict[KeyPath, str] = {(): source}
        self.labels: dict[KeyPath, str] = {}
        self.problems: list[Problem] = []

    def add_lines(self, lines: Mapping[KeyPath, int], *, label: str) -> None:
        for path, line in lines.items():
            self.places[path] = f"{self.source}:{line}"
            self.labels[path] = f"{label}:{line}"

    def override(self, option: str) -> None:
        """Applies one `key.path=value`; a malformed one becomes a problem."""
        key, equals, text = option.partition("=")
        where = f"--set {option}"
        if not equals or not key.strip():
            self.problems.append(Problem(where, "expected key.path=value, such as quantize_awq.bits=4"))
            return
        parsed = parse_yaml(text.strip() or "null", where=where)
        self.problems.extend(Problem(where, problem.message) for problem in parsed.problems)
        if not parsed.problems:
            self.put(key.strip(), parsed.value, parsed.lines, where=where, label="--set")

    def put(self, key: str, value: Any, below: Mapping[KeyPath, int], *, where: str, label: str) -> None:
        """Sets a dotted key, making sections on the way; `below` are the key paths inside a value that is a mapping or list."""
        first, *rest = key.split(".")
        path: KeyPath = (section_name(first), *(int(part) if part.isdecimal() else part for part in rest))
        holder: Any = self.data
        for index, part in enumerate(path[:-1]):
            if not _has(holder, part) or not isinstance(holder[part], dict | list):
                if isinstance(holder, list):
                    break
                holder[part] = {}
                self.places[path[: index + 1]] = where
            holder = holder[part]
        if isinstance(holder, list) and not _has(holder, path[-1]):
            self.problems.append(Problem(where, f"{key}: the list has {len(holder)} entries, counted from 0"))
            return
        holder[path[-1]] = value
        for known in [known for known in self.places if known[: len(path)] == path]:
            del self.places[known]
            self.labels.pop(known, None)
        for path_below in ((), *below):
            self.places[(*path, *path_below)] = where
            self.labels[(*path, *path_below)] = label

    def put_default(self, key: str, value: str) -> None:
        self.data.setdefault(key, value)


def _has(holder: Any, part: str | int) -> bool:
    return part in holder if isinstance(holder, dict) else isinstance(part, int) and part < len(holder)


def _tree_of(source: str | Path | Mapping[str, Any]) -> _Tree:
    if isinstance(source, Mapping):
        data = {section_name(str(key)): value for key, value in _plain(source).items()}
        tree = _Tree(data, source="the given recipe", folder=Path.cwd(), name="recipe")
        tree.labels.update(dict.fromkeys(_paths(data, ()), "given"))
    else:
        path = _find(source)
        shown = path.name if path == shipped_recipe(path.stem) else str(source)
        parsed = parse_yaml(_text_of(path), where=shown)
        tree = _Tree(_as_mapping(parsed, shown), source=shown, folder=path.resolve().parent, name=_name_of(path))
        tree.problems.extend(parsed.problems)
        tree.add_lines(parsed.lines, label=path.name)
    for section in Recipe.model_fields:
        # An empty section (`evaluate:` and nothing below) is that section with its defaults.
        if section in (*PIPELINE, "hardware", "model") and _is_null(tree.data.get(section, "absent")):
            tree.data[section] = {}
    return tree


def _name_of(path: Path) -> str:
    """What a recipe without a name is called: its file, as far as a folder may be called so."""
    return re.sub(r"[\x00-\x1f]", "", path.stem).lstrip(".") or "recipe"


def _is_null(value: object) -> bool:
    return value is None or bool(getattr(value, "is_null", False))


def _plain(value: Any) -> Any:
    """A copy in dicts and lists that overrides may change."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def _paths(value: Any, path: KeyPath) -> Iterator[KeyPath]:
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from _paths(item, (*path, key))


def _find(source: str | Path) -> Path:
    path = user_path(source)
    if os.path.isfile(path):
        return path
    shipped = shipped_recipe(str(source))
    if shipped is not None:
        return shipped
    names = shipped_names("recipes")
    near = nearest(str(source), names)
    what = "is a folder, not a recipe" if os.path.isdir(path) and str(source) else "is neither a file nor a shipped recipe"
    raise UsageError(f"{source or 'an empty name'} {what}", f"did you mean {near}?" if near else f"shipped recipes: {', '.join(names)}")


def _text_of(path: Path) -> str:
    try:
        if path.stat().st_size > MAX_BYTES:
            raise UsageError(f"{path} has more than {MAX_BYTES:,} bytes, which is no recipe", "give a YAML file, or the name of a shipped one")
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8 text: byte {error.start}", "a recipe is a YAML file; save it as UTF-8") from error
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}", "check its permissions") from error


def _as_mapping(parsed: Parsed, shown: str) -> dict[str, Any]:
    if isinstance(parsed.value, dict):
        return parsed.value
    if parsed.problems:
        raise RecipeProblems(parsed.problems)
    raise RecipeProblems([Problem(f"{shown}:1", "a recipe is a mapping with keys such as model and quantize_awq")])


def _validated(tree: _Tree) -> Recipe:
    """The recipe, or RecipeProblems with everything that is wrong, broken pairs included."""
    faults, recipe = _check_keys(tree)
    faulty = frozenset(".".join(map(str, fault.path)) for fault in faults)
    # A value that could not even be read (a tag) is not blamed a second time for being absent.
    told = {(where, message.partition(":")[0]) for where, message in tree.problems}
    faults = [fault for fault in faults if (fault.problem.where, fault.problem.message.partition(":")[0]) not in told]
    problems = [*tree.problems, *(fault.problem for fault in faults)]
    for broken in broken_rules(recipe, faulty=faulty):
        problems.append(Problem(place_of(broken.key, tree.places), f"{broken.key}: {broken.message}"))
    if problems:
        raise RecipeProblems(sorted(problems, key=_by_line))
    return recipe


def _check_keys(tree: _Tree) -> tuple[list[Fault], Recipe]:
    """The keys that are wrong by themselves, and the recipe that the others make, so that their pairs can be judged too."""
    data = tree.data
    faults: list[Fault] | None = None
    while True:
        try:
            return faults or [], Recipe.model_validate(data)
        except ValidationError as error:
            found = problems_of(error, tree.places)
            faults = found if faults is None else faults
        dropped = [_written(data, fault.path[:-1] if fault.is_missing else fault.path) for fault in found]
        data = {"model": {"path": "missing"}, **_without(data, dropped, ())} if () not in dropped else {**data, "model": {"path": "missing"}}


def _written(data: Any, path: KeyPath) -> KeyPath:
    """As much of a path as is in the data: pydantic's goes on with the name of a union's member."""
    for index, part in enumerate(path):
        if not _has(data, part):
            return path[:index]
        data = data[part]
    return path


def place_of(key: str, places: Mapping[KeyPath, str]) -> str:
    """Where a dotted key, or what holds it, was written."""
    path: KeyPath = tuple(int(part) if part.isdecimal() else part for part in key.split("."))
    while path not in places:
        path = path[:-1]
    return places[path]


def _by_line(problem: Problem) -> tuple[str, int]:
    source, _, line = problem.where.rpartition(":")
    return (source, int(line)) if line.isdecimal() else (problem.where, 0)


def _without(value: Any, paths: list[KeyPath], at: KeyPath) -> Any:
    if isinstance(value, dict):
        return {key: _without(item, paths, (*at, key)) for key, item in value.items() if (*at, key) not in paths}
    if isinstance(value, list):
        return [_without(item, paths, (*at, index)) for index, item in enumerate(value) if (*at, index) not in paths]
    return value


def _origins(value: object, path: KeyPath, labels: Mapping[KeyPath, str]) -> Iterator[tuple[str, str]]:
    if isinstance(value, BaseModel):
        for key in type(value).model_fields:
            yield from _origins(getattr(value, key), (*path, key), labels)
    elif isinstance(value, tuple) and any(isinstance(item, BaseModel) for item in value):
        for index, item in enumerate(value):
            yield from _origins(item, (*path, index), labels)
    else:
        yield ".".join(map(str, path)), labels.get(path, DEFAULT)
