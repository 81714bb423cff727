"""What every stage of a recipe will take, before it runs: memory, disk and time, from headers and a second of measuring."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import Any, NamedTuple

import torch

from qvlopt.artifact.tensors import TensorEntry
from qvlopt.commands.calibration_data import Asked, check_flight, in_seeded_order, opened_inputs
from qvlopt.commands.speed_probe import measured_rates
from qvlopt.data.preflight import Preflight, check_pictures
from qvlopt.errors import ItemError
from qvlopt.model.awq_choice import Choice, choose
from qvlopt.model.cost import IMPORTED_BYTES, START_SECONDS, Cost, Rates, TowerCost
from qvlopt.model.preprocess import PictureProcessor
from qvlopt.model.source import Source
from qvlopt.model.stage_forward import linear_dtype
from qvlopt.recipe.load import LoadedRecipe
from qvlopt.recipe.schema import PIPELINE, QuantizeAwqSection

COUNTED = ("calibrate", "quantize_awq")
"""Stages whose operations are counted and were compared with runs; the others are rough."""
ANSWER_TOKENS, PROMPT_TOKENS = 24, 300
"""What an evaluated item has where nothing says otherwise: an answer, and a question with its picture's tokens."""
GIVEN_ITEMS = 1000
"""Items of an evaluation set without a limit."""


def sized(count: int) -> str:
    """Bytes for people."""
    return f"{count / 1e9:.2f} GB" if count >= 1e8 else f"{count / 1e6:.1f} MB"


def lasting(seconds: float) -> str:
    """A duration for people."""
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


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
    """Of the recipe's sections in pipeline order. Raises UsageError or RunError for inputs that are not there or not usable."""
    view = _View.of(loaded, device)
    known: Mapping[str, Callable[[], Cost]] = {
        "calibrate": view.tower.calibrate,
        "quantize_awq": view.quantize_awq,
        "export": view.export,
        "quantize_int8": view.quantize_int8,
        "evaluate": view.evaluate,
        "bench": view.bench,
    }
    wanted = [section for section in PIPELINE if section in loaded.sections]
    return tuple(Forecast(section.replace("_", "-"), *known[section](), basis=_basis(section, loaded)) for section in wanted)


def _basis(section: str, loaded: LoadedRecipe) -> str:
    """The tower's own search is counted; language models and other searches are not."""
    asked = loaded.recipe.quantize_awq
    usual = asked.engine == "native" and asked.scope != "vision+language" and not asked.search.compensate
    return "counted" if section in COUNTED and loaded.recipe.calibrate.scope == "vision" and (usual or section == "calibrate") else "rough"


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
    tower = _tower_cost(asked.loaded, asked.source, asked.flight, asked.processor, device)
    section = asked.loaded.recipe.quantize_awq
    packed, written = awq_bytes(asked.source, section, choice)
    return tower.quantize(section, packed_bytes=packed, written_bytes=written, has_statistics=has_statistics)


def _tower_cost(loaded: LoadedRecipe, source: Source, flight: Preflight, processor: PictureProcessor, device: torch.device) -> TowerCost:
    used = in_seeded_order(flight.usable, loaded.recipe.seed)[: loaded.recipe.calibrate.samples]
    tokens = [count for sample in used for size in flight.sizes[sample.id] if (count := _patches(processor, size))]
    return TowerCost(source.settings.vision, tokens, checkpoint_bytes(source), measured_rates(linear_dtype(source, device)))


def _patches(processor: PictureProcessor, size: tuple[int, int]) -> int:
    """0 for a picture that the checkpoint's rule refuses."""
    try:
        return prod(processor.grid(*size))
    except ItemError:
        return 0


class _View(NamedTuple):
    """A recipe's source, pictures and this machine, as far as costs depend on them."""

    loaded: LoadedRecipe
    source: Source
    tower: TowerCost
    rates: Rates

    @classmethod
    def of(cls, loaded: LoadedRecipe, device: torch.device) -> _View:
        source, data, processor = opened_inputs(loaded, cached=True)
        flight = check_pictures(data.samples)
        if not {"calibrate", "quantize_awq"}.isdisjoint(loaded.sections):
            check_flight(Asked(loaded, source, data, flight, processor, digest=""))  # a digest would read all weights
        tower = _tower_cost(loaded, source, flight, processor, device)
        return cls(loaded, source, tower, tower.rates)

    def quantize_awq(self) -> Cost:
        section = self.loaded.recipe.quantize_awq
        packed, written = awq_bytes(self.source, section, choose(self.source, section))
        found = "calibrate" in self.loaded.sections or section.statistics is not None
        return self.tower.quantize(section, packed_bytes=packed, written_bytes=written, has_statistics=found)

    def export(self) -> Cost:
        """Graphs in float32; at 2B's shape 2.3 GB were seen: the largest tensor and a few layers at a time, to write and to compare."""
        written = 4 * self._parameters
        return Cost(IMPORTED_BYTES + 6 * self._largest, written, START_SECONDS + 3 * written / (1e9 * self.rates.bytes) + self._items(8))

    def quantize_int8(self) -> Cost:
        """One byte a weight, two where a 4-bit twin is kept beside it; calibrated over the float32 graphs."""
        written = int(self._parameters * {"int8": 1.1, "fast": 1.7, "small": 0.8}[self.loaded.recipe.quantize_int8.layout])
        seconds = START_SECONDS + 4 * self._parameters / (1e9 * self.rates.bytes) + self._items(self.loaded.recipe.calibrate.samples)
        return Cost(IMPORTED_BYTES + int(2.7 * self._parameters), written, seconds)  # 6.2 GB were seen at 2B's shape

    def evaluate(self) -> Cost:
        """The source, then one candidate, over every set, in float32 on a CPU."""
        section = self.loaded.recipe.evaluate
        items = sum(min(filter(None, (entry.limit, section.limit)), default=GIVEN_ITEMS) for entry in section.data)
        seconds = 2 * (START_SECONDS + self._items(items, answer=ANSWER_TOKENS))
        return Cost(IMPORTED_BYTES + 4 * self._parameters, 1_000_000 + 2000 * items, seconds)

    def bench(self) -> Cost:
        section = self.loaded.recipe.bench
        runs = (section.repeats + section.warmup) * len(section.images) * sum(section.concurrency)
        seconds = 2 * (START_SECONDS + self._items(runs, answer=section.new_tokens))
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
