"""What quantising each part of a model saves and costs: an honest return, since the tower is a small part of a large model."""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple, get_args

from qvlopt.artifact.manifest import Manifest
from qvlopt.commands.plan import PlanRow
from qvlopt.model.names import LANGUAGE, VISION, Scope, language_linears, vision_linears
from qvlopt.model.source import Source
from qvlopt.recipe.schema import QuantizeAwqSection

TOWER, DECODER, REST = "vision tower", "decoder layers", "embeddings and head"


class Part(NamedTuple):
    """Stored bytes of one part before and after, its quantised linears, and the sums of their losses."""

    name: str
    bytes_before: int
    bytes_after: int
    linears: int
    rounding_loss: float
    loss: float

    def to_json(self) -> dict[str, Any]:
        return self._asdict()


def part_of(module: str) -> str:
    """The part that a module of that canonical name belongs to."""
    if module.startswith(f"{VISION}."):
        return TOWER
    return DECODER if module.startswith(f"{LANGUAGE}.layers.") else REST


def parts_of(manifest: Manifest) -> tuple[Part, ...]:
    """The three parts of a finished artifact."""
    found = []
    for name in (TOWER, DECODER, REST):
        modules = [module for module in manifest.modules if part_of(module.name) == name]
        layers = [layer for layer in manifest.layers if part_of(layer.name) == name]
        before, after = sum(module.bytes_before for module in modules), sum(module.bytes_after for module in modules)
        found.append(Part(name, before, after, len(layers), sum(layer.rounding_loss for layer in layers), sum(layer.loss for layer in layers)))
    return tuple(found)


def scope_rows(source: Source, section: QuantizeAwqSection) -> tuple[PlanRow, ...]:
    """Of every scope: what its linears are of the checkpoint, and how much smaller that gets. From headers alone."""
    entries = source.tensors.entries.values()
    whole = sum(entry.nbytes for entry in entries)
    bits = section.bits + (16 + section.bits) / section.group_size
    rows = []
    for scope in reversed(get_args(Scope)) if section.format != "bf16" else ():
        language = language_linears(source.settings.text) if scope == "vision+language" else ()
        names = (*vision_linears(source.settings.vision, scope), *language)
        weights = [source.tensors.entry(source.names[f"{name}.weight"]) for name in names]
        before, after = sum(entry.nbytes for entry in weights), int(sum(prod(entry.shape) for entry in weights) * bits / 8)
        share = f"{before / whole:.0%} of the checkpoint" if whole else "nothing"
        said = f"{len(names)} linears, {before:,} bytes, {share}, to {after:,}: the checkpoint shrinks by {(before - after) / max(whole, 1):.0%}"
        rows.append(PlanRow(f"scope {scope}", said))
    return tuple(rows)
