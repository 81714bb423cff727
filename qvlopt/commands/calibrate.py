"""calibrate: the statistics of every layer in scope over a set of pictures, in a folder of their own."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

import qvlopt
from qvlopt.artifact.digest import digest_of
from qvlopt.artifact.folder import is_done, require_space, write_folder
from qvlopt.artifact.manifest import Manifest, SourceRecord, read_manifest, write_manifest
from qvlopt.artifact.process import peak_rss_bytes
from qvlopt.commands.hardware import prepare
from qvlopt.commands.output import output_folder
from qvlopt.commands.plan import Plan, PlanRow
from qvlopt.data.preflight import Preflight, Skipped, check_pictures
from qvlopt.data.samples import SampleSet, read_samples
from qvlopt.errors import ItemError, RunError, UsageError
from qvlopt.model.capture import Batch, capture_vision
from qvlopt.model.load import load_vision
from qvlopt.model.names import VISION, vision_linears
from qvlopt.model.preprocess import Picture, PictureProcessor
from qvlopt.model.shapes import vision_shapes
from qvlopt.model.source import Source, open_source
from qvlopt.model.statistics import save_statistics
from qvlopt.quant.objective import Gram
from qvlopt.recipe.load import LoadedRecipe
from qvlopt.recipe.paths import resolve_path
from qvlopt.report.plain import safe, short
from qvlopt.report.progress import Progress, SilentProgress

if TYPE_CHECKING:
    from rich.console import Console

log = logging.getLogger(__name__)

KIND = "statistics"


@dataclass(frozen=True)
class CalibrateResult:
    """`tokens` are patches that went through the tower; `digest` identifies model, data and preprocessing."""

    output: Path
    samples: int
    images: int
    tokens: int
    layers: int
    skipped: tuple[Skipped, ...]
    digest: str
    existed: bool
    exit_code: int = 0

    def to_json(self) -> dict[str, Any]:
        return {
            "output": str(self.output),
            "samples": self.samples,
            "images": self.images,
            "tokens": self.tokens,
            "layers": self.layers,
            "skipped": [item._asdict() for item in self.skipped],
            "digest": self.digest,
        }

    def render(self, console: Console) -> None:
        state = "already there" if self.existed else "calibrated"
        console.print(f"{state}: {self.layers} layers over {self.images} pictures ({self.tokens} patches) of {self.samples} samples")
        for item in self.skipped:
            console.print(safe(f"skipped {short(item.id)}: {short(item.reason)}"), markup=False, highlight=False, soft_wrap=True)
        console.print(safe(f"statistics: {self.output}"), markup=False, highlight=False, soft_wrap=True)


@dataclass
class Coverage:
    """The samples that were used, counted as they pass. `tokens` are patches."""

    samples: int = 0
    images: int = 0
    tokens: int = 0
    skipped: list[Skipped] = field(default_factory=list)


def calibrate(
    loaded: LoadedRecipe, *, overwrite: bool = False, resume: bool = False, dry_run: bool = False, progress: Progress | None = None
) -> CalibrateResult | Plan:
    """Writes `<output>/calibrate`. Does nothing when the same statistics are there; `resume` and `overwrite` change nothing then.

    Raises RunError when fewer usable samples remain than the recipe asks for, and UsageError for another output in place.
    """
    del resume
    began = time.monotonic()
    asked = Asked.by(loaded)
    output = output_folder(loaded, "calibrate")
    if dry_run:
        return Plan(loaded, _plan_rows(asked, output))
    if is_done(output, asked.digest, overwrite=overwrite):
        return _existing(output, asked.digest)
    require_space(output, _statistics_bytes(asked.source))
    with write_folder(output, digest=asked.digest, overwrite=overwrite) as folder:
        taken = take_statistics(asked, progress or SilentProgress())
        save_statistics(folder, taken.grams)
        write_manifest(folder, _manifest(asked, taken, time.monotonic() - began))
    coverage = taken.coverage
    return CalibrateResult(
        output, coverage.samples, coverage.images, coverage.tokens, len(taken.grams), tuple(coverage.skipped), asked.digest, existed=False
    )


class Asked(NamedTuple):
    """What a recipe asks statistics of, opened and checked; `digest` identifies model, data and preprocessing.

    `flight` says of the data's samples which can be used as far as their pictures' headers tell.
    """

    loaded: LoadedRecipe
    source: Source
    data: SampleSet
    flight: Preflight
    processor: PictureProcessor
    digest: str

    @classmethod
    def by(cls, loaded: LoadedRecipe) -> Asked:
        """Raises UsageError or RunError for a set or source that is not there or not usable."""
        source, data, processor = _inputs(loaded)
        return cls(loaded, source, data, check_pictures(data.samples), processor, _digest(loaded, source, data, processor))


class Taken(NamedTuple):
    """Statistics by canonical layer name, and what they cover."""

    grams: dict[str, Gram]
    coverage: Coverage


def take_statistics(asked: Asked, progress: Progress) -> Taken:
    """Runs the tower over the pictures. Raises RunError when too few samples are usable or none has a picture."""
    section = asked.loaded.recipe.calibrate
    _check_flight(asked)
    tower = load_vision(asked.source, dtype=torch.float32, device=prepare(asked.loaded))
    coverage = Coverage()
    progress.start(section.samples, "calibrate")
    try:
        batches = _batches(pictures(asked, coverage), section.batch)
        grams = capture_vision(asked.source.settings.vision, tower.weights, batches, seen=progress.advance)
    finally:
        progress.finish()
    for item in coverage.skipped[len(asked.flight.skipped) :]:
        log.warning("skipped %s: %s", item.id, item.reason)
    if not coverage.images:
        raise RunError(
            f"{asked.data.name}: none of the {coverage.samples} samples taken has a picture, so the vision tower was never seen",
            "calibrate with pictures",
        )
    return Taken(grams, coverage)


def _inputs(loaded: LoadedRecipe) -> tuple[Source, SampleSet, PictureProcessor]:
    recipe = loaded.recipe
    if recipe.calibrate.scope != "vision":
        raise UsageError(f"calibrate.scope: {recipe.calibrate.scope} is not in this version", "use vision")
    source = open_source(recipe.model.path, revision=recipe.model.revision, folder=loaded.folder)
    place = resolve_path(recipe.calibrate.data, loaded.folder, kind="calib")
    if place is None:
        raise RunError(f"calibrate.data: there is no set {recipe.calibrate.data}", "give a folder with manifest.jsonl, or builtin:nano")
    data = read_samples(place, split=recipe.calibrate.split, seed=recipe.seed)
    return source, data, PictureProcessor.for_tower(source.folder, source.settings.vision, recipe.pixels)


def _digest(loaded: LoadedRecipe, source: Source, data: SampleSet, processor: PictureProcessor) -> str:
    recipe = loaded.recipe
    asked = {"samples": recipe.calibrate.samples, "batch": recipe.calibrate.batch, "scope": recipe.calibrate.scope, "seed": recipe.seed}
    return digest_of({"kind": KIND, "source": source.digest, "data": data.digest, "pictures": dataclasses.asdict(processor), **asked})


def pictures(asked: Asked, coverage: Coverage) -> Iterator[Picture]:
    """The pictures of the first usable samples by seeded hash of their ids, whatever the order of the file."""
    recipe = asked.loaded.recipe
    coverage.skipped.extend(asked.flight.skipped)
    for sample in sorted(asked.flight.usable, key=lambda s: hashlib.sha256(f"{recipe.seed}\0{s.id}".encode()).digest()):
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


def _check_flight(asked: Asked) -> None:
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


def _statistics_bytes(source: Source) -> int:
    """Bytes of the statistics: for every linear one float32 [K, K] and vectors."""
    shapes = vision_shapes(source.settings.vision)
    widths = [shapes[f"{name.removeprefix(VISION + '.')}.weight"][1] for name in vision_linears(source.settings.vision)]
    return sum(4 * width * width + 24 * width for width in widths)


def _plan_rows(asked: Asked, output: Path) -> tuple[PlanRow, ...]:
    section = asked.loaded.recipe.calibrate
    return (
        PlanRow("source", f"{asked.source.id}: {asked.source.folder}"),
        PlanRow("data", f"{section.data}: {len(asked.data.samples)} samples, {section.samples} used"),
        PlanRow("layers", f"{len(vision_linears(asked.source.settings.vision))} linears of the vision tower"),
        PlanRow("writes", f"{output}: {_statistics_bytes(asked.source)} bytes"),
    )


def _existing(output: Path, digest: str) -> CalibrateResult:
    found = read_manifest(output).coverage or {}
    skipped = tuple(Skipped(**item) for item in found["skipped"])
    return CalibrateResult(output, found["samples"], found["images"], found["tokens"], found["layers"], skipped, digest, existed=True)


def _manifest(asked: Asked, taken: Taken, seconds: float) -> Manifest:
    source, coverage = asked.source, taken.coverage
    return Manifest(
        kind=KIND,
        digest=asked.digest,
        recipe=asked.loaded.recipe.model_dump(mode="json"),
        source=SourceRecord(path=source.id, revision=source.revision, digest=source.digest),
        coverage={
            "samples": coverage.samples,
            "images": coverage.images,
            "tokens": coverage.tokens,
            "layers": len(taken.grams),
            "tokens_per_layer": {name: gram.count for name, gram in taken.grams.items()},
            "skipped": [item._asdict() for item in coverage.skipped],
        },
        versions={"python": sys.version.split()[0], "torch": torch.__version__, "qvlopt": qvlopt.__version__},
        seconds=seconds,
        peak_rss_bytes=peak_rss_bytes(),
    )
