"""What every stage of a recipe will take, before it runs: memory, disk and time, from headers and a second of measuring."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any, NamedTuple

import torch

from qvlopt.artifact.tensors import TensorEntry
from qvlopt.commands.calibration_data import Asked, check_flight, in_seeded_order
from qvlopt.commands.evaluate_cost import evaluate_cost, patches_of
from qvlopt.commands.int8_prompts import CHECKED, MEASURED
from qvlopt.commands.plan import PlanRow
from qvlopt.commands.speed_probe import measured_rates
from qvlopt.model.awq_choice import Choice, choose
from qvlopt.model.cost import IMPORTED_BYTES, START_SECONDS, Cost, Rates, TowerCost
from qvlopt.model.names import Scope
from qvlopt.model.source import Source, open_source
from qvlopt.model.stage_forward import linear_dtype
from qvlopt.recipe.load import LoadedRecipe
from qvlopt.recipe.schema import PIPELINE, QuantizeAwqSection

PROMPT_TOKENS, QUESTION_TOKENS = 300, 30
"""What is read of an item where nothing says otherwise, its pictures' tokens included, and what is read beside pictures."""


def sized(count: int) -> str:
    """Bytes for people."""
    return f"{count / 1e9:.2f} GB" if count >= 1e8 else f"{count / 1e6:.1f} MB"


def lasting(seconds: float) -> str:
    """A duration for people."""
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


GRAPHS_SECONDS = 6.5
"""Imports with onnx and onnxruntime, and opening sessions. Measured on nano."""
ROUNDED_PASSES = 40
"""Reads and writes of a weight while it is rounded, compared and stored in integers."""


class Forecast(NamedTuple):
    """What a stage will take. `basis`: counted (from the stage's own operations) or rough (within a factor of two or three)."""

    name: str
    rss_bytes: int
    disk_bytes: int
    seconds: float
    basis: str

    def to_json(self) -> dict[str, Any]:
        return self._asdict() | {"seconds": round(self.seconds, 1)}


def forecasts(loaded: LoadedRecipe, device: torch.device) -> tuple[Forecast, ...]:
    """Of the recipe's sections in pipeline order. Raises UsageError or RunError for inputs that are not there or not usable.

    Reads headers and tokenizer alone and fetches nothing: NotFetchedError for what is on the hub and not in the cache.
    """
    view = _View(loaded, device)
    if not {"calibrate", "quantize_awq", "quantize_int8"}.isdisjoint(loaded.sections):
        check_flight(view.asked)
    return tuple(_forecast(view, section) for section in PIPELINE if section in loaded.sections)


def forecast(loaded: LoadedRecipe, section: str, device: torch.device) -> Forecast:
    """Of one section, whether the recipe has it or not. Raises as `forecasts`."""
    return _forecast(_View(loaded, device), section)


def takes(cost: Cost | Forecast) -> PlanRow:
    """What a stage will take, in words for its plan."""
    said = f"about {sized(cost.rss_bytes)} of memory, {sized(cost.disk_bytes)} of disk, {lasting(cost.seconds)} here"
    return PlanRow("takes", f"{said}; qvlopt doctor says more")


def _forecast(view: _View, section: str) -> Forecast:
    cost: Cost = getattr(view, section)()
    return Forecast(section.replace("_", "-"), *cost, basis=_basis(section, view.loaded))


def _basis(section: str, loaded: LoadedRecipe) -> str:
    """Language models and other searches than the usual one are counted as well, but were compared with runs of a small model only."""
    recipe, asked = loaded.recipe, loaded.recipe.quantize_awq
    is_usual = {
        "calibrate": recipe.calibrate.scope == "vision",
        "quantize_awq": asked.engine == "native" and asked.scope != "vision+language" and not asked.search.compensate,
        "evaluate": recipe.evaluate.engine in ("auto", "torch"),
    }
    return "counted" if is_usual.get(section, False) else "rough"


def awq_bytes(source: Source, section: QuantizeAwqSection, choice: Choice) -> tuple[int, int]:
    """Bytes of the quantised linears as they will be stored, and of all stored tensors of the artifact."""
    weights = [source.tensors.entry(source.names[f"{name}.weight"]) for name in choice.quantised]
    numbers = sum(prod(entry.shape) for entry in weights)
    bits = section.bits + (16 + section.bits) / section.group_size
    before = sum(entry.nbytes for entry in weights)
    packed = before if section.format == "bf16" else int(numbers * bits / 8)
    return packed, checkpoint_bytes(source) - before + packed


def checkpoint_bytes(source: Source) -> int:
    """Bytes of all stored tensors."""
    return sum(entry.nbytes for entry in source.tensors.entries.values())


def awq_cost(asked: Asked, choice: Choice, device: torch.device, *, has_statistics: bool) -> Cost:
    """Of quantize-awq, for its plan and for the space that it asks for."""
    section = asked.loaded.recipe.quantize_awq
    packed, written = awq_bytes(asked.source, section, choice)
    return _tower_cost(asked, device, section.scope).quantize(section, packed_bytes=packed, written_bytes=written, has_statistics=has_statistics)


def calibrate_cost(asked: Asked, device: torch.device) -> Cost:
    """Of calibrate, for its plan and for the space that it asks for."""
    return _tower_cost(asked, device, asked.loaded.recipe.calibrate.scope).calibrate(held_out=asked.held_out)


def hidden_bytes(asked: Asked, device: torch.device) -> int:
    """Hidden states on disk during a pass over the calibration set."""
    return _tower_cost(asked, device, asked.loaded.recipe.calibrate.scope).hidden_bytes


def _tower_cost(asked: Asked, device: torch.device, scope: Scope) -> TowerCost:
    """Of the tower, and of the decoder layers where the scope has them, over the pictures that calibrate."""
    source, recipe = asked.source, asked.loaded.recipe
    used = in_seeded_order(asked.flight.usable, recipe.seed)[: recipe.calibrate.samples]
    patches = [[patches_of(asked.processor, size) for size in asked.flight.sizes[sample.id]] for sample in used]
    tokens = [count for counts in patches for count in counts if count]
    rates = measured_rates(linear_dtype(source, device))
    tower = TowerCost(source.settings.vision, tokens, checkpoint_bytes(source), rates)
    if scope != "vision+language":
        return tower
    merge = source.settings.vision.spatial_merge_size**2
    return replace(tower, text=source.settings.text, prompts=[sum(counts) // merge + QUESTION_TOKENS for counts in patches])


@dataclass(frozen=True)
class _View:
    """A recipe and this machine, as far as costs depend on them; inputs are opened when a section needs them."""

    loaded: LoadedRecipe
    device: torch.device

    @cached_property
    def asked(self) -> Asked:
        return Asked.by(self.loaded, cached=True)

    @cached_property
    def source(self) -> Source:
        model = self.loaded.recipe.model
        return open_source(model.path, revision=model.revision, folder=self.loaded.folder, cached=True)

    @cached_property
    def rates(self) -> Rates:
        return measured_rates(linear_dtype(self.source, self.device))

    def calibrate(self) -> Cost:
        return calibrate_cost(self.asked, self.device)

    def quantize_awq(self) -> Cost:
        section = self.loaded.recipe.quantize_awq
        found = "calibrate" in self.loaded.sections or section.statistics is not None
        return awq_cost(self.asked, choose(self.source, section), self.device, has_statistics=found)

    def export(self) -> Cost:
        """Graphs in float32; at 2B's shape 2.3 GB were seen: the largest tensor and a few layers at a time, to write and to compare."""
        written = 4 * self._parameters
        return Cost(IMPORTED_BYTES + 6 * self._largest, written, GRAPHS_SECONDS + 3 * written / (1e9 * self.rates.bytes) + self._items(8))

    def quantize_int8(self) -> Cost:
        """One byte a weight, more with a 4-bit twin. Samples are seen once; every layer is measured, graphs and torch are compared."""
        written = int(self._parameters * {"int8": 1.1, "fast": 1.7, "small": 0.8}[self.loaded.recipe.quantize_int8.layout])
        rounding = self._parameters * (4 / self.rates.bytes + ROUNDED_PASSES / self.rates.passes) / 1e9
        section = self.loaded.recipe.quantize_int8
        seen = self.loaded.recipe.calibrate.samples if section.smooth else 0
        seconds = GRAPHS_SECONDS + rounding + self._items(2 * (MEASURED + CHECKED) + seen)
        has_statistics = "calibrate" in self.loaded.sections or section.statistics is not None
        disk = max(written, hidden_bytes(self.asked, self.device)) if seen and not has_statistics else written
        return Cost(IMPORTED_BYTES + int(1.6 * self._parameters), disk, seconds)  # 3.3 GB (small) to 4.3 (fast) were seen at 2B's shape

    def evaluate(self) -> Cost:
        return evaluate_cost(self.loaded, self.source, self.rates)

    def bench(self) -> Cost:
        section = self.loaded.recipe.bench
        prompts = 1 if isinstance(section.prompt_tokens, int) else len(section.prompt_tokens)
        runs = (section.repeats + section.warmup) * len(section.images) * prompts * sum(section.concurrency)
        engines = 2 + len({"quantize_awq", "export", "quantize_int8"}.intersection(self.loaded.sections))
        seconds = engines * (START_SECONDS + self._items(runs, answer=section.new_tokens))
        return Cost(IMPORTED_BYTES + 4 * self._parameters, 1_000_000, seconds)

    @property
    def _parameters(self) -> int:
        return sum(_numbers(self.source.tensors.entry(self.source.names[name])) for s in self.source.storages.values() for name in s.tensors)

    @property
    def _largest(self) -> int:
        return max(_numbers(self.source.tensors.entry(self.source.names[name])) for s in self.source.storages.values() for name in s.tensors)

    def _items(self, count: int, *, answer: int = 0) -> float:
        """Seconds of reading prompts and writing answers: two operations a weight and token, and all weights read for a token."""
        prompts = 2 * self._parameters * PROMPT_TOKENS / (1e9 * self.rates.float32)
        answers = answer * 4 * self._parameters / (4e9 * self.rates.passes)
        return count * (prompts + answers)


def _numbers(entry: TensorEntry) -> int:
    return prod(entry.shape)
