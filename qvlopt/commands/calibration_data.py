"""The pictures that a recipe calibrates on, opened and checked, and the tower's statistics over them, stage by stage."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

import qvlopt
from qvlopt.artifact.digest import digest_of
from qvlopt.artifact.unfinished import Parts
from qvlopt.data.preflight import Preflight, Skipped, check_pictures
from qvlopt.data.samples import Sample, SampleSet, read_samples
from qvlopt.data.set_files import find_set
from qvlopt.errors import ItemError, RunError
from qvlopt.model.capture import Capture
from qvlopt.model.input_sums import GramSum
from qvlopt.model.names import Stage
from qvlopt.model.preprocess import Picture, PictureProcessor
from qvlopt.model.source import Source, open_source
from qvlopt.model.stage_forward import Batch, linear_dtype
from qvlopt.model.token_draw import HELD_OUT_EVERY, MOST_TOKENS
from qvlopt.quant.objective import Gram
from qvlopt.recipe.load import LoadedRecipe
from qvlopt.report.progress import Progress

log = logging.getLogger(__name__)

KIND = "statistics"
ALGORITHM = 2
"""Part of the digest: raised whenever the same inputs give other bits. 2: inputs are gathered in larger pieces."""
PART = "coverage"
"""Name of the part that keeps which samples were used."""


@dataclass
class Coverage:
    """The samples that were used, counted as they pass. `tokens` are patches."""

    samples: int = 0
    images: int = 0
    tokens: int = 0
    skipped: list[Skipped] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self) | {"skipped": [item._asdict() for item in self.skipped]}

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Coverage:
        return cls(**fields | {"skipped": [Skipped(**item) for item in fields["skipped"]]})


@dataclass(frozen=True)
class Asked:
    """What a recipe asks statistics of, opened and checked from headers alone.

    `flight` says of the data's samples which can be used as far as their pictures' headers tell.
    """

    loaded: LoadedRecipe
    source: Source
    data: SampleSet
    flight: Preflight
    processor: PictureProcessor

    @classmethod
    def by(cls, loaded: LoadedRecipe, *, cached: bool = False) -> Asked:
        """With `cached` nothing is fetched from a hub. Raises UsageError or RunError for a set or source that is not there or not usable."""
        recipe = loaded.recipe
        source = open_source(recipe.model.path, revision=recipe.model.revision, folder=loaded.folder, cached=cached)
        place = find_set(recipe.calibrate.data, loaded.folder, download=not cached)
        if place is None:
            raise RunError(f"calibrate.data: there is no set {recipe.calibrate.data}", "give a folder with manifest.jsonl, or builtin:nano")
        data = read_samples(place, split=recipe.calibrate.split, seed=recipe.seed)
        processor = PictureProcessor.for_tower(source.folder, source.settings.vision, recipe.pixels)
        return cls(loaded, source, data, check_pictures(data.samples), processor)

    @cached_property
    def digest(self) -> str:
        """Identifies model, data and preprocessing. Reads all weights once."""
        recipe = self.loaded.recipe
        section = recipe.calibrate.model_dump(include={"samples", "batch", "scope"})
        pictures = dataclasses.asdict(self.processor)
        asked = {"source": self.source.digest, "data": self.data.digest, "pictures": pictures, "seed": recipe.seed, "most_tokens": MOST_TOKENS}
        held_out = {"held_out_every": HELD_OUT_EVERY} if self.held_out else {}
        return digest_of({"kind": KIND, "algorithm": ALGORITHM, **asked, **section, **held_out})

    def conditions(self, device: torch.device) -> dict[str, str]:
        """What else decides the bytes: another version, product or number of threads may add up in another order."""
        versions = {"qvlopt": qvlopt.__version__, "torch": torch.__version__, "threads": str(torch.get_num_threads())}
        return versions | {"device": str(device), "linears": str(linear_dtype(self.source, device))}

    @property
    def held_out(self) -> bool:
        """Whether the statistics of some pictures are kept apart: what the choice to compensate is judged by."""
        return self.loaded.recipe.quantize_awq.search.compensate


def captured(
    asked: Asked, parts: Parts, device: torch.device, progress: Progress, *, done: Collection[str] = (), sums: type[GramSum] = GramSum
) -> Iterator[tuple[Stage, dict[str, Gram]]]:
    """Every stage of the tower that is not `done` with its linears' statistics; `parts` keeps what is needed to go on later.

    `sums` is what is kept of the inputs. Raises RunError when too few samples are usable or none has a picture.
    """
    dtype = linear_dtype(asked.source, device)
    capture = Capture(asked.source, parts, device, seed=asked.loaded.recipe.seed, dtype=dtype, held_out=asked.held_out, sums=sums)
    yield from capture.stages(lambda: _checked_batches(asked, parts), done=done, seen=progress.advance)


def coverage_of(parts: Parts) -> Coverage:
    """What the statistics cover, once the first stage has been given."""
    kept = parts.record(PART)
    if kept is None:
        raise RunError(f"{parts.folder}: the record of the samples used is gone", "it must not change during a run; run again")
    return Coverage.from_json(kept)


def _checked_batches(asked: Asked, parts: Parts) -> Iterator[Batch]:
    check_flight(asked)
    coverage = Coverage()
    yield from _batches(pictures(asked, coverage), asked.loaded.recipe.calibrate.batch)
    for item in coverage.skipped[len(asked.flight.skipped) :]:
        log.warning("skipped %s: %s", item.id, item.reason)
    if not coverage.images:
        raise RunError(
            f"{asked.data.name}: none of the {coverage.samples} samples taken has a picture, so the vision tower was never seen",
            "calibrate with pictures",
        )
    if asked.held_out and coverage.images < HELD_OUT_EVERY:
        raise RunError(
            f"{asked.data.name}: {coverage.images} pictures; quantize_awq.search.compensate holds one in {HELD_OUT_EVERY} out to judge by",
            "calibrate with more pictures, or set quantize_awq.search.compensate: false",
        )
    parts.keep(PART, coverage.to_json())


def pictures(asked: Asked, coverage: Coverage) -> Iterator[Picture]:
    """The pictures of the first usable samples by seeded hash of their ids, whatever the order of the file."""
    recipe = asked.loaded.recipe
    coverage.skipped.extend(asked.flight.skipped)
    for sample in in_seeded_order(asked.flight.usable, recipe.seed):
        if coverage.samples == recipe.calibrate.samples:
            return
        try:
            found = [asked.processor.process(image.load()) for image in sample.images]
        except ItemError as error:
            coverage.skipped.append(Skipped(sample.id, error.reason))
            continue
        coverage.samples += 1
        coverage.images += len(found)
        coverage.tokens += sum(picture.pixel_values.shape[0] for picture in found)
        yield from found
    if coverage.samples < recipe.calibrate.samples:
        raise _too_few(asked, coverage.samples, len(coverage.skipped))


def in_seeded_order(samples: Iterable[Sample], seed: int) -> list[Sample]:
    """Samples by a hash of seed and id: a fair choice whatever the order of the file."""
    return sorted(samples, key=lambda sample: hashlib.sha256(f"{seed}\0{sample.id}".encode()).digest())


def check_flight(asked: Asked) -> None:
    """Says before the heavy part what cannot be used, and raises RunError when too little is left."""
    for remark in asked.flight.remarks:
        log.warning("%s: %s", asked.data.name, remark)
    usable, skipped = len(asked.flight.usable), asked.flight.skipped
    for item in skipped:
        log.warning("skipped %s: %s", item.id, item.reason)
    if skipped:
        log.warning("%s: %d of %d samples remain", asked.data.name, usable, len(asked.data.samples))
    if usable < asked.loaded.recipe.calibrate.samples:
        raise _too_few(asked, usable, len(skipped))


def _too_few(asked: Asked, usable: int, skipped: int) -> RunError:
    left = f"{usable} usable samples of {len(asked.data.samples)}, {skipped} skipped"
    wanted = asked.loaded.recipe.calibrate.samples
    return RunError(f"{asked.data.name}: {left}; calibrate.samples asks for {wanted}", "lower calibrate.samples or give more samples")


def _batches(pictures: Iterator[Picture], size: int) -> Iterator[Batch]:
    """Up to `size` pictures of one grid together; what is left over at the end goes by grid in order of first appearance."""
    waiting: dict[tuple[int, int], list[torch.Tensor]] = {}
    for picture in pictures:
        group = waiting.setdefault(picture.grid, [])
        group.append(picture.pixel_values)
        if len(group) == size:
            yield torch.stack(waiting.pop(picture.grid)), picture.grid
    for grid, group in waiting.items():
        yield torch.stack(group), grid
