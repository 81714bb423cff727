"""Pairs of recipe values that cannot go together, as data: the keys, the test and what the message says."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from qvlopt.recipe.schema import Recipe


class Rule(NamedTuple):
    """`broken` tells whether a recipe breaks it. The first of `keys` is blamed; none of them may be wrong by itself."""

    keys: tuple[str, ...]
    broken: Callable[[Recipe], bool]
    message: str


class Broken(NamedTuple):
    """A rule that a recipe breaks: the key blamed and the message, values filled in."""

    key: str
    message: str


RULES = (
    Rule(
        ("quantize_awq.bits", "quantize_awq.format"),
        lambda r: r.quantize_awq.format == "awq" and r.quantize_awq.bits != 4,
        "{quantize_awq.bits} does not fit format awq, which holds 4 bits only; use format: compressed-tensors (4, 8) or bf16 (2 to 8)",
    ),
    Rule(
        ("quantize_awq.bits", "quantize_awq.format"),
        lambda r: r.quantize_awq.format == "compressed-tensors" and r.quantize_awq.bits not in (4, 8),
        "{quantize_awq.bits} does not fit format compressed-tensors, which holds 4 or 8 bits; use format: bf16 (2 to 8)",
    ),
    Rule(
        ("quantize_awq.bits", "quantize_awq.format"),
        lambda r: r.quantize_awq.format == "bf16" and not 2 <= r.quantize_awq.bits <= 8,
        "{quantize_awq.bits} does not fit format bf16, which takes 2 to 8 bits",
    ),
    Rule(
        ("quantize_awq.zero_point", "quantize_awq.format"),
        lambda r: r.quantize_awq.format == "awq" and not r.quantize_awq.zero_point,
        "false does not fit format awq, whose readers always subtract zero points; use true, or format: compressed-tensors",
    ),
    Rule(
        ("quantize_awq.engine", "quantize_awq.bits"),
        lambda r: r.quantize_awq.engine == "autoawq" and r.quantize_awq.bits != 4,
        "autoawq does not fit bits: {quantize_awq.bits}, AutoAWQ knows 4 bits only; use engine: native",
    ),
    Rule(
        ("quantize_awq.statistics", "quantize_awq.engine"),
        lambda r: r.quantize_awq.engine == "autoawq" and r.quantize_awq.statistics is not None,
        "statistics do not fit engine autoawq, which looks at the data itself; leave statistics out or use engine: native",
    ),
    Rule(
        ("pixels.min", "pixels.max"),
        lambda r: r.pixels is not None and r.pixels.min > r.pixels.max,
        "{pixels.min} is more than pixels.max: {pixels.max}",
    ),
    Rule(
        ("evaluate.engine", "evaluate.server.url"),
        lambda r: r.evaluate.engine == "openai" and r.evaluate.server.url is None,
        "openai needs evaluate.server.url",
    ),
    Rule(
        ("evaluate.server.url", "evaluate.engine"),
        lambda r: r.evaluate.engine in ("torch", "onnx") and r.evaluate.server.url is not None,
        "a server does not fit engine {evaluate.engine}; use engine: openai or auto",
    ),
)


def broken_rules(recipe: Recipe, *, faulty: frozenset[str]) -> Iterator[Broken]:
    """Every rule that the recipe breaks; rules over a key in `faulty` (wrong by itself, reported already) are left out."""
    for rule in RULES:
        touched = any(key == bad or key.startswith(f"{bad}.") for key in rule.keys for bad in faulty)
        if not touched and rule.broken(recipe):
            yield Broken(rule.keys[0], _filled(rule, recipe))
    if "evaluate" not in faulty and not any(key.startswith("evaluate.data") for key in faulty):
        yield from _broken_names(recipe)


def _filled(rule: Rule, recipe: Recipe) -> str:
    message = rule.message
    for key in rule.keys:
        message = message.replace("{" + key + "}", str(_value(recipe, key)))
    return message


def _value(recipe: Recipe, key: str) -> object:
    value: object = recipe
    for part in key.split("."):
        value = getattr(value, part, None)
    return value


def _broken_names(recipe: Recipe) -> Iterator[Broken]:
    """Two evaluation sets of one name, and floors for a set that is not evaluated."""
    names = [entry.name for entry in recipe.evaluate.data]
    for index, name in enumerate(names):
        if name in names[:index]:
            yield Broken(f"evaluate.data.{index}.name", f"{name} is the name of evaluate.data.{names.index(name)} as well; every entry needs its own")
    for floor in recipe.evaluate.gate.floors:
        if floor not in names and floor.split(".")[0] not in names:
            yield Broken(f"evaluate.gate.floors.{floor}", f"no evaluation entry has this name; there are {', '.join(names)}")
