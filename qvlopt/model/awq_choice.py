"""Which linears a recipe quantises, decided from config and headers before anything is computed."""

from __future__ import annotations

import difflib
from typing import NamedTuple

from qvlopt.errors import UsageError
from qvlopt.model.names import LM_HEAD, vision_linears
from qvlopt.model.names import matching as match_patterns
from qvlopt.model.source import Source
from qvlopt.recipe.schema import QuantizeAwqSection

OUTPUTS_PER_WORD = 8
"""AutoAWQ's and compressed-tensors' 4-bit layouts pack this many outputs (or their zero points) into a word."""


class Choice(NamedTuple):
    """Canonical linear names: `quantised`, the tower's other linears, and why a linear in scope was left out."""

    quantised: tuple[str, ...]
    kept_vision: tuple[str, ...]
    skipped: dict[str, str]


def choose(source: Source, section: QuantizeAwqSection) -> Choice:
    """The linears of the section's scope without those it keeps or must skip.

    Raises UsageError for what this version does not do, for a pattern of `keep` that matches nothing, and for widths that
    the group size does not divide, naming every such layer.
    """
    _refuse_later(source, section)
    tower = vision_linears(source.settings.vision)
    asked = vision_linears(source.settings.vision, section.scope)
    kept = _kept(source, section)
    wanted = [name for name in asked if name not in kept]
    odd = {name: reason for name in wanted if (reason := _indivisible(source, name, section.group_size))}
    if odd and section.on_indivisible != "skip":
        layers = "; ".join(f"{name}: {reason}" for name, reason in odd.items())
        raise UsageError(
            f"quantize_awq.group_size {section.group_size} does not fit {len(odd)} layers ({layers})",
            "choose a group size that divides, add these layers to quantize_awq.keep, or set on_indivisible: skip",
        )
    quantised = tuple(name for name in wanted if name not in odd)
    if not quantised:
        raise UsageError(f"quantize_awq: scope {section.scope} leaves no layer to quantise", "shorten quantize_awq.keep or change group_size")
    return Choice(quantised, tuple(name for name in tower if name not in quantised), odd)


def module_names(source: Source) -> tuple[str, ...]:
    """Canonical names of all modules with a matrix of weights, and the head even where it is the embedding."""
    names = [
        parameter.removesuffix(".weight")
        for parameter, storage in source.storages.items()
        if parameter.endswith(".weight") and len(source.tensors.entry(source.names[storage.tensors[0]]).shape) > 1
    ]
    return tuple(dict.fromkeys([*names, LM_HEAD]))


def _refuse_later(source: Source, section: QuantizeAwqSection) -> None:
    """Values that the contract has and this version has not."""
    later = {
        "engine: autoawq": section.engine == "autoawq",
        "scope: vision+language": section.scope == "vision+language",
        "search.compensate: true": section.search.compensate,
        "on_indivisible: pad": section.on_indivisible == "pad",
    }
    for value, asked in later.items():
        if asked:
            raise UsageError(f"quantize_awq.{value} is not in this version", "see docs/contract.md and CHANGELOG.md")
    if source.settings.quant_method is not None:
        raise UsageError(
            f"model.path {source.id} is quantised already ({source.settings.quant_method})", "quantise the 16-bit checkpoint that it was made of"
        )


def _kept(source: Source, section: QuantizeAwqSection) -> frozenset[str]:
    names = module_names(source)
    found = match_patterns(section.keep, names)
    for pattern, matched in found.items():
        if not matched:
            near = difflib.get_close_matches(pattern, names, n=1, cutoff=0.3)
            hint = f"the nearest is {near[0]}" if near else "see qvlopt inspect for the names"
            raise UsageError(f"quantize_awq.keep: {pattern!r} matches no module of {source.id}", hint)
    return frozenset(name for matched in found.values() for name in matched)


def _indivisible(source: Source, name: str, group_size: int) -> str:
    rows, width = source.tensors.entry(source.names[f"{name}.weight"]).shape
    if width % group_size:
        return f"input width {width}"
    return f"output width {rows} is not a multiple of {OUTPUTS_PER_WORD}" if rows % OUTPUTS_PER_WORD else ""
