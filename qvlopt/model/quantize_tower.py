"""Quantises the tower stage by stage: one stage's weights and statistics are in memory, and its result is handed on at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch

from qvlopt.errors import RunError
from qvlopt.model.autoawq_stage import quantize_stage_by_autoawq
from qvlopt.model.awq_choice import Choice
from qvlopt.model.input_sums import GramWithInputs
from qvlopt.model.names import Stage, language_stages, vision_stages
from qvlopt.model.pack_layer import pack_layer
from qvlopt.model.pad_inner import is_inner_input, padded, padded_gram, padded_parameters
from qvlopt.model.parameters import checkpoint_dtype
from qvlopt.model.quantization_config import awq_config, compressed_config
from qvlopt.model.quantize import LayerReport, QuantizedStage, Search, quantize_stage
from qvlopt.model.rewrite import Added, Rewrite
from qvlopt.model.source import Source
from qvlopt.model.token_draw import HELD_OUT
from qvlopt.quant.objective import Gram
from qvlopt.quant.rounding import QuantSpec
from qvlopt.recipe.schema import QuantizeAwqSection

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}


class QuantizedTower(NamedTuple):
    """What becomes of the source, and what it costs per layer, in order of computation."""

    rewrite: Rewrite
    reports: tuple[LayerReport, ...]


class StoredStage(NamedTuple):
    """A stage as it is stored: new tensors by canonical name, and what they cost per layer."""

    tensors: dict[str, torch.Tensor]
    reports: tuple[LayerReport, ...]


@dataclass(frozen=True)
class TowerQuantizer:
    """Quantises the chosen linears of one stage after another, in any order."""

    source: Source
    section: QuantizeAwqSection
    choice: Choice
    device: torch.device

    @property
    def all_stages(self) -> tuple[Stage, ...]:
        """In order of computation."""
        language = language_stages(self.source.settings.text) if self.section.scope == "vision+language" else ()
        return (*vision_stages(self.source.settings.vision), *language)

    @property
    def stages(self) -> tuple[Stage, ...]:
        """Those with a chosen linear, in order of computation."""
        return tuple(stage for stage in self.all_stages if self.wanted(stage))

    def wanted(self, stage: Stage) -> tuple[str, ...]:
        """The chosen linears of a stage by canonical name."""
        return tuple(name for linear in stage.linears if (name := f"{stage.root}.{linear}") in self._chosen)

    def quantized(self, stage: Stage, grams: Mapping[str, Gram]) -> StoredStage:
        """Raises RunError, naming stage or tensor, where a layer got worse than plain rounding or a value is not finite."""
        used = {name: self._fitting(name, _seen_tokens(name, grams[name])) for name in self.wanted(stage)}
        used |= {name + HELD_OUT: self._fitting(name, grams[name + HELD_OUT]) for name in used if name + HELD_OUT in grams}
        done = self._done(stage, used) if self.section.engine == "native" else self._done_by_autoawq(stage, grams)
        tensors: dict[str, torch.Tensor] = {}
        for name, integers in done.integers.items():
            packed = pack_layer(integers, self._spec, form=self.section.format, dtype=self._dtype)
            tensors.update({f"{name}.{suffix}": tensor.cpu() for suffix, tensor in packed.items()})
        tensors.update({name: _cast(name, tensor, self._dtype).cpu() for name, tensor in done.changed.items()})
        return StoredStage(tensors, done.reports)

    def rewrite(self, added: Mapping[str, Added]) -> Rewrite:
        """What becomes of the source when the tensors of all stages are `added`."""
        removed = frozenset(f"{name}.weight" for name in self._chosen) - set(added)
        widened = {name: tensor for name, tensor in self._widened() if name not in added and name not in removed}
        config = {"awq": awq_config, "compressed-tensors": compressed_config}.get(self.section.format)
        settings = config(self._spec, self.choice.kept_vision, self.choice.kept_language) if config else None
        changes = {} if self.choice.inner is None else {"vision_config": {"intermediate_size": self.choice.inner}}
        return Rewrite(removed, {**added, **widened}, DTYPES.get(self.section.dtype), settings, changes)

    def _widened(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every parameter that the padding of the MLPs changes, as it is kept in 16 bits."""
        for name in padded_parameters(self.source.settings.vision) if self.choice.inner is not None else ():
            tensor = self._weight(name)
            yield name, _cast(name, tensor, DTYPES.get(self.section.dtype, tensor.dtype)).cpu()

    def _fitting(self, name: str, gram: Gram) -> Gram:
        """Statistics on the device, and as wide as the layer is to be."""
        wide = gram if self.choice.inner is None or not is_inner_input(name) else padded_gram(gram, self.choice.inner)
        return _on(wide, self.device)

    @cached_property
    def _chosen(self) -> frozenset[str]:
        return frozenset(self.choice.quantised)

    @cached_property
    def _spec(self) -> QuantSpec:
        return QuantSpec(self.section.bits, self.section.group_size, symmetric=not self.section.zero_point)

    @cached_property
    def _dtype(self) -> torch.dtype:
        return DTYPES.get(self.section.dtype, checkpoint_dtype(self.source))

    def _done(self, stage: Stage, grams: dict[str, Gram]) -> QuantizedStage:
        search = self.section.search
        asked = Search(self._dtype, search.scale, search.clip, search.bias, search.grid, search.compensate)
        try:
            done = quantize_stage(stage, self._weights(stage), grams, self._spec, search=asked, chosen=self._chosen)
        except ValueError as error:
            raise RunError(f"{stage.root}.{stage.name}: {error}") from error
        for report in done.reports:
            if not report.loss <= report.rounding_loss:
                raise RunError(f"{report.name}: the loss {report.loss:g} is not at or below plain rounding's {report.rounding_loss:g}")
        return done

    def _done_by_autoawq(self, stage: Stage, grams: Mapping[str, Gram]) -> QuantizedStage:
        """As AutoAWQ finds it, better than plain rounding or not: the reports tell."""
        seen = {name: gram for name in self.wanted(stage) if isinstance(gram := grams[name], GramWithInputs)}
        return quantize_stage_by_autoawq(stage, self._weights(stage), seen, self._spec, dtype=self._dtype, chosen=self._chosen)

    def _weights(self, stage: Stage) -> dict[str, torch.Tensor]:
        prefix = f"{stage.root}.{stage.name}."
        source = self.source
        return {name: self._weight(name) for name in source.names if name.startswith(prefix)}

    def _weight(self, name: str) -> torch.Tensor:
        tensor = self.source.tensors.read(self.source.names[name])
        return (tensor if self.choice.inner is None else padded(name, tensor, self.choice.inner)).to(self.device)


def quantize_tower(
    source: Source,
    section: QuantizeAwqSection,
    choice: Choice,
    *,
    read: Callable[[str], Gram],
    device: torch.device,
    seen: Callable[[int, str], None] = lambda _count, _text: None,
) -> QuantizedTower:
    """All stages at once, in memory, with the statistics that `read` gives by canonical name.

    `seen` is told how many linears a stage had, and how it went. Raises RunError as TowerQuantizer does.
    """
    quantizer = TowerQuantizer(source, section, choice, device)
    added: dict[str, torch.Tensor] = {}
    reports: list[LayerReport] = []
    for stage in quantizer.stages:
        done = quantizer.quantized(stage, {name: read(name) for name in quantizer.wanted(stage)})
        added.update(done.tensors)
        reports += done.reports
        seen(len(done.reports), progress_text(stage, done.reports))
    return QuantizedTower(quantizer.rewrite(added), tuple(reports))


def progress_text(stage: Stage, reports: Sequence[LayerReport]) -> str:
    """How a stage went, for people."""
    return f"quantise {stage.name} (loss {reports[-1].loss:.5f})"


def _on(gram: Gram, device: torch.device) -> Gram:
    return Gram(gram.count, *(t.to(device) for t in (gram.sum, gram.centred, gram.abs_sum, gram.abs_max)))


def _seen_tokens(name: str, gram: Gram) -> Gram:
    if gram.count == 0:
        raise RunError(f"{name}: the statistics saw no token", "calibrate with pictures")
    return gram


def _cast(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A folded norm or corrected bias as it is stored."""
    cast = tensor.to(dtype)
    if not bool(torch.isfinite(cast).all()):
        raise RunError(f"{name} does not fit {dtype}, whose largest is {torch.finfo(dtype).max:g}", "set quantize_awq.dtype: source")
    return cast
