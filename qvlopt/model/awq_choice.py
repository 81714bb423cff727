"""Which linears a recipe quantises, decided from config and headers before anything is computed."""

from __future__ import annotations

import difflib
from collections.abc import Container, Sequence
from typing import NamedTuple

from qvlopt.errors import UsageError
from qvlopt.model.names import FUSED, LANGUAGE, LM_HEAD, language_linears, vision_linears
from qvlopt.model.names import matching as match_patterns
from qvlopt.model.pad_inner import is_inner_input, is_inner_output, padded_width
from qvlopt.model.source import Source
from qvlopt.recipe.schema import QuantizeAwqSection

OUTPUTS_PER_WORD = 8
"""AutoAWQ's and compressed-tensors' 4-bit layouts pack this many outputs (or their zero points) into a word."""


class Choice(NamedTuple):
    """Canonical linear names: `quantised`, the tower's other linears, and why a linear in scope was left out.

    `inner`: the width that the tower's MLPs are padded to; None where they stay as they are. `kept_language`: the decoder
    layers' other linears; None where the language model is out of the scope.
    """

    quantised: tuple[str, ...]
    kept_vision: tuple[str, ...]
    skipped: dict[str, str]
    inner: int | None = None
    kept_language: tuple[str, ...] | None = None


def choose(source: Source, section: QuantizeAwqSection) -> Choice:
    """The linears of the section's scope without those it keeps or must skip.

    Raises UsageError for what this version does not do, for a pattern of `keep` that matches nothing, and for widths that
    the group size does not divide, padded or not, naming every such layer.
    """
    _refuse_impossible(source, section)
    tower = vision_linears(source.settings.vision)
    language = language_linears(source.settings.text) if section.scope == "vision+language" else ()
    asked = (*vision_linears(source.settings.vision, section.scope), *language)
    kept = _kept(source, section)
    _refuse_half_fused(source, kept, asked)
    wanted = [name for name in asked if name not in kept]
    inner = _inner(source, section, wanted)
    odd = {name: reason for name in wanted if (reason := _indivisible(source, name, section.group_size, inner))}
    if odd and section.on_indivisible != "skip":
        layers = "; ".join(f"{name}: {reason}" for name, reason in odd.items())
        ways = "on_indivisible: skip" if section.on_indivisible == "pad" else "on_indivisible: skip, or pad for the tower's MLPs"
        raise UsageError(
            f"quantize_awq.group_size {section.group_size} does not fit {len(odd)} layers ({layers})",
            f"choose a group size that divides, add these layers to quantize_awq.keep, or set {ways}",
        )
    odd |= {name: f"an engine fuses it with {other}, which stays" for name, other in _fused_with(source, odd, wanted).items()}
    quantised = tuple(name for name in wanted if name not in odd)
    if not quantised:
        raise UsageError(f"quantize_awq: scope {section.scope} leaves no layer to quantise", "shorten quantize_awq.keep or change group_size")
    kept_language = tuple(name for name in language if name not in quantised) if language else None
    return Choice(quantised, tuple(name for name in tower if name not in quantised), odd, inner, kept_language)


def module_names(source: Source) -> tuple[str, ...]:
    """Canonical names of all modules with a matrix of weights, and the head even where it is the embedding."""
    names = [
        parameter.removesuffix(".weight")
        for parameter, storage in source.storages.items()
        if parameter.endswith(".weight") and len(source.tensors.entry(source.names[storage.tensors[0]]).shape) > 1
    ]
    return tuple(dict.fromkeys([*names, LM_HEAD]))


def _refuse_impossible(source: Source, section: QuantizeAwqSection) -> None:
    """What AutoAWQ has no notion of, and sources that are quantised already."""
    beyond = {
        "scope: vision+language": section.scope == "vision+language",
        "search.compensate: true": section.search.compensate,
        "on_indivisible: pad": section.on_indivisible == "pad",
    }
    for value, asked in beyond.items():
        if asked and section.engine == "autoawq":
            raise UsageError(f"quantize_awq.{value} does not fit engine: autoawq", "use engine: native")
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


def _fused_with(source: Source, kept: Container[str], names: Sequence[str]) -> dict[str, str]:
    """Those of `names` that are not `kept`, but that engines fuse with one that is, and that one."""
    found = {}
    for layer in range(source.settings.text["num_hidden_layers"]):
        for parts in FUSED:
            together = [f"{LANGUAGE}.layers.{layer}.{part}" for part in parts]
            stays = next((name for name in together if name in kept), None)
            found.update({name: stays for name in together if stays is not None and name in names and name not in kept})
    return found


def _refuse_half_fused(source: Source, kept: Container[str], asked: Sequence[str]) -> None:
    for name, other in _fused_with(source, kept, asked).items():
        parts = " and ".join("/".join(part.rpartition(".")[2] for part in fused) for fused in FUSED)
        raise UsageError(
            f"quantize_awq.keep: {other} would stay and {name} not, which engines fuse into one linear", f"keep all of {parts} of a layer, or none"
        )


def _inner(source: Source, section: QuantizeAwqSection, wanted: Sequence[str]) -> int | None:
    """The inner width to pad the tower's MLPs to, where the recipe wants that and one of their layers needs it."""
    needed = any(is_inner_input(name) and _indivisible(source, name, section.group_size, None) for name in wanted)
    return padded_width(source.settings.vision.intermediate_size, section.group_size) if needed and section.on_indivisible == "pad" else None


def _indivisible(source: Source, name: str, group_size: int, inner: int | None) -> str:
    rows, width = source.tensors.entry(source.names[f"{name}.weight"]).shape
    if inner is not None:
        rows, width = inner if is_inner_output(name) else rows, inner if is_inner_input(name) else width
    if width % group_size:
        return f"input width {width}"
    return f"output width {rows} is not a multiple of {OUTPUTS_PER_WORD}" if rows % OUTPUTS_PER_WORD else ""
