"""YAML text to plain mappings and lists of `Scalar`s with the line of every key; safe, and every problem at once.

Only the structure is read from YAML. Scalars stay text until the field they are for is known (`values.py`), so neither
YAML 1.1's rules nor tags can turn a value into something else.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from qvlopt.errors import Problem
from qvlopt.recipe.values import Scalar

KeyPath = tuple[str | int, ...]
MAX_VALUES = 10_000
"""More values than this after expanding aliases is an attack or a mistake, not a recipe."""
MAX_DEPTH = 20
PLAIN_TAGS = tuple(f"tag:yaml.org,2002:{kind}" for kind in ("str", "int", "float", "bool", "null", "timestamp", "map", "seq", "merge", "value"))


class Parsed(NamedTuple):
    """`value` holds dicts, lists and Scalars; `lines` the line (from 1) of every key and list item."""

    value: Any
    lines: dict[KeyPath, int]
    problems: list[Problem]


def parse_yaml(text: str, *, where: str) -> Parsed:
    """Reads one YAML document; problems name `where:line`. Raises nothing for bad text, it is in `problems`."""
    yaml = YAML(typ="safe", pure=True)
    reader = _Reader(where)
    value = None
    try:
        node = yaml.compose(text)
        value = {} if node is None else reader.read(node, ())
    except YAMLError as error:
        reader.problems.append(_syntax_problem(error, where))
    except RecursionError:
        reader.problems.append(Problem(where, "nested too deeply for a recipe"))
    return Parsed(value, reader.lines, reader.problems)


class _Reader:
    """Walks the composed nodes, counting what aliases expand to and noting lines, duplicates and tags."""

    def __init__(self, where: str) -> None:
        self.where = where
        self.lines: dict[KeyPath, int] = {}
        self.problems: list[Problem] = []
        self.n_values = 0
        self.is_over_limit = False

    def read(self, node: Node, path: KeyPath) -> Any:
        self.n_values += 1
        line = node.start_mark.line + 1
        if self.is_over_limit:
            return None
        if self.n_values > MAX_VALUES or len(path) > MAX_DEPTH:
            self.is_over_limit = True
            self.problems.append(Problem(f"{self.where}:{line}", f"more than {MAX_VALUES} values or {MAX_DEPTH} levels, aliases counted"))
            return None
        if str(node.tag) not in PLAIN_TAGS:
            self.problems.append(Problem(f"{self.where}:{line}", f"{_dotted(path)}: the tag {node.tag} is not read; write a plain value"))
            return None
        self.lines.setdefault(path, line)
        if isinstance(node, MappingNode):
            return self._read_mapping(node, path)
        if isinstance(node, SequenceNode):
            return [self.read(item, (*path, index)) for index, item in enumerate(node.value)]
        return Scalar(node.value, is_plain=isinstance(node, ScalarNode) and node.style not in ("'", '"', "|", ">"))

    def _read_mapping(self, node: MappingNode, path: KeyPath) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value_node in self._keys(node, path):
            found[key] = self.read(value_node, (*path, key))
        return found

    def _keys(self, node: MappingNode, path: KeyPath) -> Iterator[tuple[str, Node]]:
        seen: dict[str, int] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            if not isinstance(key_node, ScalarNode):
                self.problems.append(Problem(f"{self.where}:{line}", f"{_dotted(path)}: a key must be one word"))
                continue
            key = section_name(key_node.value) if not path else str(key_node.value)
            if key in seen:
                self.problems.append(Problem(f"{self.where}:{line}", f"{_dotted((*path, key))}: given twice, first on line {seen[key]}"))
                continue
            seen[key] = line
            self.lines[(*path, key)] = line
            yield key, value_node


def section_name(key: str) -> str:
    """A top-level key in its one spelling: hyphen and underscore are the same."""
    return key.replace("-", "_")


def _dotted(path: KeyPath) -> str:
    return ".".join(str(part) for part in path) or "the recipe"


def _syntax_problem(error: YAMLError, where: str) -> Problem:
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    said = getattr(error, "problem", None) or str(error).splitlines()[0]
    return Problem(where if mark is None else f"{where}:{mark.line + 1}", f"not YAML: {said}")
