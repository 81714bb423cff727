"""Quantises the tower stage by stage: at most one stage's weights and statistics are in memory, and what is packed already."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from qvlopt.errors import RunError
from qvlopt.model.awq_choice import Choice
from qvlopt.model.load import checkpoint_dtype
from qvlopt.model.names import VISION, Stage, vision_stages
from qvlopt.model.pack_layer import pack_layer
from qvlopt.model.quantization_config import awq_config, compressed_config
from qvlopt.model.quantize import LayerReport, QuantizedStage, Search, quantize_stage
from qvlopt.model.rewrite import Rewrite
from qvlopt.model.source import Source
from qvlopt.quant.objective import Gram
from qvlopt.quant.rounding import QuantSpec
from qvlopt.recipe.schema import QuantizeAwqSection

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}


class QuantizedTower(NamedTuple):
    """What becomes of the source, and what it costs per layer, in order of computation."""

    rewrite: Rewrite
    reports: tuple[LayerReport, ...]


def quantize_tower(
    source: Source,
    section: QuantizeAwqSection,
    choice: Choice,
    *,
    read: Callable[[str], Gram],
    device: torch.device,
    seen: Callable[[int, str], None] = lambda _count, _text: None,
) -> QuantizedTower:
    """Quantises the chosen linears with the statistics that `read` gives by canonical name.

    `seen` is told how many linears a stage had, and how it went. Raises RunError, naming stage or tensor, where a layer got
    worse than plain rounding or a value is not finite.
    """
    spec = QuantSpec(section.bits, section.group_size, symmetric=not section.zero_point)
    dtype = DTYPES.get(section.dtype, checkpoint_dtype(source))
    search = Search(dtype, section.search.scale, section.search.clip, section.search.bias, section.search.grid)
    added: dict[str, torch.Tensor] = {}
    reports: list[LayerReport] = []
    chosen = frozenset(choice.quantised)
    for stage in vision_stages(source.settings.vision):
        wanted = [name for linear in stage.linears if (name := f"{VISION}.{linear}") in chosen]
        if not wanted:
            continue
        grams = {name: _on(_seen_tokens(name, read(name)), device) for name in wanted}
        done = _quantised(stage, _weights(source, stage, device), grams, spec, search=search, chosen=chosen)
        for name, integers in done.integers.items():
            packed = pack_layer(integers, spec, form=section.format, dtype=dtype)
            added.update({f"{name}.{suffix}": tensor.cpu() for suffix, tensor in packed.items()})
        added.update({name: _cast(name, tensor, dtype).cpu() for name, tensor in done.changed.items()})
        reports += done.reports
        seen(len(wanted), f"quantise {stage.name} (loss {done.reports[-1].loss:.5f})")
    removed = frozenset(f"{name}.weight" for name in chosen) - set(added)
    config = {"awq": awq_config, "compressed-tensors": compressed_config}.get(section.format)
    rewrite = Rewrite(removed, added, DTYPES.get(section.dtype), config(spec, choice.kept_vision) if config else None)
    return QuantizedTower(rewrite, tuple(reports))


def _weights(source: Source, stage: Stage, device: torch.device) -> dict[str, torch.Tensor]:
    prefix = f"{VISION}.{stage.name}."
    return {name: source.tensors.read(stored).to(device) for name, stored in source.names.items() if name.startswith(prefix)}


def _on(gram: Gram, device: torch.device) -> Gram:
    return Gram(gram.count, *(t.to(device) for t in (gram.sum, gram.centred, gram.abs_sum, gram.abs_max)))


def _seen_tokens(name: str, gram: Gram) -> Gram:
    if gram.count == 0:
        raise RunError(f"{name}: the statistics saw no token", "calibrate with pictures")
    return gram


def _quantised(
    stage: Stage, weights: dict[str, torch.Tensor], grams: dict[str, Gram], spec: QuantSpec, *, search: Search, chosen: frozenset[str]
) -> QuantizedStage:
    try:
        done = quantize_stage(stage, weights, grams, spec, search=search, chosen=chosen)
    except ValueError as error:
        raise RunError(f"{VISION}.{stage.name}: {error}") from error
    for report in done.reports:
        if not report.loss <= report.rounding_loss:
            raise RunError(f"{report.name}: the loss {report.loss:g} is not at or below plain rounding's {report.rounding_loss:g}")
    return done


def _cast(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A folded norm or corrected bias as it is stored."""
    cast = tensor.to(dtype)
    if not bool(torch.isfinite(cast).all()):
        raise RunError(f"{name} does not fit {dtype}, whose largest is {torch.finfo(dtype).max:g}", "set quantize_awq.dtype: source")
    return cast
