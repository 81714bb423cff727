"""calibrate: the statistics of every layer in scope over a set of pictures, in a folder of their own."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import qvlopt
from qvlopt.artifact.folder import is_done, require_space, write_folder
from qvlopt.artifact.manifest import Manifest, SourceRecord, read_manifest, write_manifest
from qvlopt.artifact.process import kept_memory, peak_rss_bytes, release_memory
from qvlopt.artifact.unfinished import Parts, unfinished
from qvlopt.commands.calibration_data import KIND, Asked, Coverage, captured, coverage_of, pictures
from qvlopt.commands.calibration_prompts import captured_language
from qvlopt.commands.forecast import calibrate_cost, takes
from qvlopt.commands.hardware import prepare
from qvlopt.commands.output import output_folder
from qvlopt.commands.plan import Plan, PlanRow, planned
from qvlopt.data.preflight import Skipped
from qvlopt.model.input_sums import GramSum
from qvlopt.model.names import Scope, Stage, language_linears, language_stages, vision_linears, vision_stages
from qvlopt.model.shapes import parameter_shapes
from qvlopt.model.source import Source
from qvlopt.model.statistics import gather_statistics, save_statistics
from qvlopt.model.token_draw import HELD_OUT
from qvlopt.quant.objective import Gram
from qvlopt.recipe.load import LoadedRecipe
from qvlopt.report.plain import safe, short
from qvlopt.report.progress import Progress, SilentProgress

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["KIND", "Asked", "CalibrateResult", "Coverage", "Skipped", "calibrate", "pictures"]

log = logging.getLogger(__name__)


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


def calibrate(
    loaded: LoadedRecipe, *, overwrite: bool = False, resume: bool = False, dry_run: bool = False, progress: Progress | None = None
) -> CalibrateResult | Plan:
    """Writes `<output>/calibrate`. Does nothing when the same statistics are there; finished stages of a killed run are used.

    Raises RunError when fewer usable samples remain than the recipe asks for, and UsageError for another output in place.
    """
    del resume  # finished stages of the same result are used in any case
    if dry_run:
        return planned(loaded, lambda: _plan_rows(loaded))
    began = time.monotonic()
    asked, output = Asked.by(loaded), output_folder(loaded, "calibrate")
    if is_done(output, asked.digest, overwrite=overwrite):
        return _existing(output, asked.digest)
    device = prepare(loaded)
    require_space(output, calibrate_cost(asked, device).disk_bytes)
    with (
        write_folder(output, digest=asked.digest, overwrite=overwrite) as folder,
        unfinished(output, digest=asked.digest, conditions=asked.conditions(device), overwrite=overwrite) as parts,
    ):
        tokens, coverage = _write_statistics(folder, asked, parts, device, progress or SilentProgress())
        write_manifest(folder, _manifest(asked, tokens, coverage, time.monotonic() - began))
    parts.remove()
    return CalibrateResult(
        output, coverage.samples, coverage.images, coverage.tokens, len(tokens), tuple(coverage.skipped), asked.digest, existed=False
    )


def layer_widths(source: Source, *, scope: Scope = "vision") -> dict[str, int]:
    """Input width of every linear in the scope by canonical name."""
    vision, text = source.settings.vision, source.settings.text
    shapes = parameter_shapes(vision, text, tied=source.tied)
    names = (*vision_linears(vision), *(language_linears(text) if scope == "vision+language" else ()))
    return {name: shapes[f"{name}.weight"][1] for name in names}


def statistics_bytes(source: Source, *, scope: Scope = "vision", held_out: bool = False) -> int:
    """Bytes of the statistics: for every linear one float32 [K, K] and vectors, twice where some pictures are held out."""
    return (1 + held_out) * sum(4 * width * width + 20 * width + 8 for width in layer_widths(source, scope=scope).values())


def _bytes(asked: Asked) -> int:
    return statistics_bytes(asked.source, scope=asked.loaded.recipe.calibrate.scope, held_out=asked.held_out)


def captured_stages(
    asked: Asked, parts: Parts, device: torch.device, progress: Progress, *, done: Collection[str] = (), sums: type[GramSum] = GramSum
) -> Iterator[tuple[Stage, dict[str, Gram]]]:
    """Every stage of `calibrate.scope` that is not `done` with its linears' statistics, in order of computation."""
    yield from captured(asked, parts, device, progress, done=done, sums=sums)
    if asked.loaded.recipe.calibrate.scope == "vision+language":
        yield from captured_language(asked, parts, device, progress, done=done, sums=sums)


def _stages(asked: Asked) -> tuple[Stage, ...]:
    """In order of computation."""
    settings = asked.source.settings
    language = language_stages(settings.text) if asked.loaded.recipe.calibrate.scope == "vision+language" else ()
    return (*vision_stages(settings.vision), *language)


@kept_memory()
def _write_statistics(folder: Path, asked: Asked, parts: Parts, device: torch.device, progress: Progress) -> tuple[dict[str, int], Coverage]:
    """Writes the statistics stage by stage, one stage's in memory. Returns the tokens that entered each layer's, and the coverage.

    A stage's file is among `parts` as soon as the stage is finished, and gets a second name in `folder` when all are.
    """
    stages = _stages(asked)
    done = {stage.name: kept["tokens"] for stage in stages if (kept := parts.record(_part(stage))) is not None}
    progress.start((1 + asked.held_out) * sum(len(stage.linears) for stage in stages), "calibrate")
    try:
        if done:
            log.info("going on after %d finished stages of %d", len(done), len(stages))
            progress.advance((1 + asked.held_out) * sum(map(len, done.values())))
        for stage, grams in captured_stages(asked, parts, device, progress, done={*done}):
            done[stage.name] = _keep(parts, stage, grams)
            del grams
            release_memory()
            progress.advance(len(done[stage.name]), f"calibrate {stage.name}")
    finally:
        progress.finish()
    gather_statistics(folder, [parts.path(_file(stage)) for stage in stages])
    return {name: count for stage in stages for name, count in done[stage.name].items()}, coverage_of(parts)


def _keep(parts: Parts, stage: Stage, grams: Mapping[str, Gram]) -> dict[str, int]:
    """Keeps a finished stage's statistics, and returns how many tokens they are of."""
    path, tokens = parts.path(_file(stage)), dict[str, int]()
    path.unlink(missing_ok=True)
    save_statistics(path, grams)
    for name, gram in grams.items():
        layer = name.removesuffix(HELD_OUT)
        tokens[layer] = tokens.get(layer, 0) + gram.count
    parts.keep(_part(stage), {"tokens": tokens}, [path.name])
    return tokens


def _part(stage: Stage) -> str:
    return f"stage-{stage.name}"


def _file(stage: Stage) -> str:
    return f"{stage.name}.safetensors"


def _plan_rows(loaded: LoadedRecipe) -> Iterator[PlanRow]:
    asked, section = Asked.by(loaded, cached=True), loaded.recipe.calibrate
    yield PlanRow("source", f"{asked.source.id}: {asked.source.folder}")
    yield PlanRow("data", f"{section.data}: {len(asked.data.samples)} samples, {section.samples} used")
    yield PlanRow("layers", f"{len(layer_widths(asked.source, scope=section.scope))} linears, scope {section.scope}")
    yield PlanRow("writes", f"{output_folder(loaded, 'calibrate')}: {_bytes(asked):,} bytes")
    yield takes(calibrate_cost(asked, prepare(loaded)))


def _existing(output: Path, digest: str) -> CalibrateResult:
    found = read_manifest(output).coverage or {}
    skipped = tuple(Skipped(**item) for item in found["skipped"])
    return CalibrateResult(output, found["samples"], found["images"], found["tokens"], found["layers"], skipped, digest, existed=True)


def _manifest(asked: Asked, tokens: dict[str, int], coverage: Coverage, seconds: float) -> Manifest:
    source = asked.source
    return Manifest(
        kind=KIND,
        digest=asked.digest,
        recipe=asked.loaded.recipe.model_dump(mode="json"),
        source=SourceRecord(path=source.id, revision=source.revision, digest=source.digest),
        coverage={
            "samples": coverage.samples,
            "images": coverage.images,
            "tokens": coverage.tokens,
            "layers": len(tokens),
            "tokens_per_layer": tokens,
            "skipped": [item._asdict() for item in coverage.skipped],
        },
        versions={"python": sys.version.split()[0], "torch": torch.__version__, "qvlopt": qvlopt.__version__},
        seconds=seconds,
        peak_rss_bytes=peak_rss_bytes(),
    )
