"""quantize-awq: the linears of the vision tower become 4-bit integers; everything else keeps its bytes, and that is proven."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import safetensors
import torch
import transformers

import qvlopt
from qvlopt.artifact.digest import digest_of
from qvlopt.artifact.folder import is_done, require_space, write_folder
from qvlopt.artifact.manifest import (
    CheckRecord,
    LayerRecord,
    Manifest,
    ModuleRecord,
    ParentRecord,
    SourceRecord,
    read_intact,
    read_manifest,
    write_manifest,
)
from qvlopt.artifact.modules import module_rows
from qvlopt.artifact.process import peak_rss_bytes
from qvlopt.artifact.tensors import TensorFiles
from qvlopt.commands import calibrate as calibration
from qvlopt.commands.hardware import prepare
from qvlopt.commands.output import is_very_folder, output_folder
from qvlopt.commands.plan import Plan, PlanRow
from qvlopt.commands.self_check import self_check
from qvlopt.errors import RunError
from qvlopt.model.awq_choice import Choice, choose
from qvlopt.model.names import VISION
from qvlopt.model.quantize import LayerReport
from qvlopt.model.quantize_tower import QuantizedTower, quantize_tower
from qvlopt.model.rewrite import other_files, write_rewritten
from qvlopt.model.shapes import canonical_name
from qvlopt.model.source import Source
from qvlopt.model.statistics import StatisticsFiles
from qvlopt.quant.objective import Gram
from qvlopt.recipe.load import LoadedRecipe
from qvlopt.recipe.paths import resolve_path
from qvlopt.recipe.schema import QuantizeAwqSection
from qvlopt.report.card import awq_card
from qvlopt.report.plain import safe
from qvlopt.report.progress import Progress, SilentProgress

if TYPE_CHECKING:
    from rich.console import Console

log = logging.getLogger(__name__)

KIND = "awq"
ALGORITHM = 1
"""Part of the digest: raised whenever the same inputs give other integers."""


class Statistics(NamedTuple):
    """Input statistics by layer name, what they cover, and their digest."""

    read: Callable[[str], Gram]
    coverage: dict[str, Any]
    digest: str


@dataclass(frozen=True)
class QuantizeResult:
    """The artifact, what was touched and what it cost; bytes are of stored tensors."""

    output: Path
    format: str
    modules_quantized: tuple[str, ...]
    modules_kept: tuple[str, ...]
    bytes_before: int
    bytes_after: int
    vision_bytes_before: int
    vision_bytes_after: int
    layers: tuple[LayerRecord, ...]
    check: CheckRecord
    existed: bool
    exit_code: int = 0

    def to_json(self) -> dict[str, Any]:
        return {
            "output": str(self.output),
            "artifact": str(self.output),
            "kind": KIND,
            "format": self.format,
            "modules_quantized": list(self.modules_quantized),
            "modules_kept": list(self.modules_kept),
            "bytes_before": self.bytes_before,
            "bytes_after": self.bytes_after,
            "vision_bytes_before": self.vision_bytes_before,
            "vision_bytes_after": self.vision_bytes_after,
            "layers": [layer.model_dump() for layer in self.layers],
            "check": self.check.model_dump(),
        }

    def render(self, console: Console) -> None:
        from rich.table import Table

        rounding, chosen = sum(r.rounding_loss for r in self.layers), sum(r.loss for r in self.layers)
        table = Table("", "before", "after", title="quantize-awq" + (" (already there)" if self.existed else ""), title_justify="left")
        table.add_row("vision tower, bytes", f"{self.vision_bytes_before:,}", f"{self.vision_bytes_after:,}")
        table.add_row("whole checkpoint, bytes", f"{self.bytes_before:,}", f"{self.bytes_after:,}")
        table.add_row("loss, sum over layers", f"{rounding:.5f} (rounding)", f"{chosen:.5f} ({chosen / rounding - 1:+.0%})" if rounding else "0")
        console.print(table)
        console.print(f"{len(self.modules_quantized)} linears quantised, {len(self.modules_kept)} modules kept; {self.check.detail}", highlight=False)
        console.print(safe(f"artifact: {self.output}"), markup=False, highlight=False, soft_wrap=True)


def quantize_awq(
    loaded: LoadedRecipe, *, overwrite: bool = False, resume: bool = False, dry_run: bool = False, progress: Progress | None = None
) -> QuantizeResult | Plan:
    """Writes `<output>/awq`, self-checked. Does nothing when the same artifact is there; `resume` reuses finished statistics.

    Raises UsageError for a recipe that does not fit the source, RunError for what breaks on the way.
    """
    del resume  # statistics that are finished are always reused
    began, progress = time.monotonic(), progress or SilentProgress()
    asked = calibration.Asked.by(loaded)
    section, source = loaded.recipe.quantize_awq, asked.source
    choice = choose(source, section)
    other_files(source.folder)  # what cannot be copied is refused before the work
    output, named = output_folder(loaded, KIND), _named_statistics(asked)
    digest = _digest(section, source, named.digest if named else asked.digest)
    if dry_run:
        return Plan(loaded, _plan_rows(source, section, choice, output))
    if is_done(output, digest, overwrite=overwrite):
        return _result(output, read_manifest(output), existed=True)
    require_space(output, sum(entry.nbytes for entry in source.tensors.entries.values()))
    with write_folder(output, digest=digest, overwrite=overwrite) as folder:
        statistics = named or _own_statistics(asked, progress, overwrite=overwrite)
        rewrite, reports = _quantise(asked, choice, statistics, progress)
        write_rewritten(folder, source, rewrite)
        check = self_check(folder, asked, rewrite, expected=choice.quantised, found=[report.name for report in reports])
        manifest = _manifest(asked, statistics, reports, digest=digest).model_copy(
            update={"modules": _modules(source, folder), "check": check, "peak_rss_bytes": peak_rss_bytes()}
        )
        (folder / "README.md").write_text(awq_card(manifest.model_dump(mode="json")), encoding="utf-8")
        write_manifest(folder, manifest.model_copy(update={"seconds": time.monotonic() - began}))
    return _result(output, read_manifest(output), existed=False)


def _digest(section: QuantizeAwqSection, source: Source, statistics: str) -> str:
    asked = section.model_dump(mode="json", exclude={"statistics"})
    return digest_of({"kind": KIND, "algorithm": ALGORITHM, "source": source.digest, "statistics": statistics, "section": asked})


def _own_statistics(asked: calibration.Asked, progress: Progress, *, overwrite: bool) -> Statistics:
    """From `<output>/calibrate`, where they are put if they are not there yet; not kept where --output names the artifact."""
    loaded = asked.loaded
    if is_very_folder(loaded):
        taken = calibration.take_statistics(asked, progress)
        tokens = {name: gram.count for name, gram in taken.grams.items()}
        coverage = {"samples": taken.coverage.samples, "images": taken.coverage.images, "tokens": taken.coverage.tokens, "tokens_per_layer": tokens}
        return Statistics(taken.grams.__getitem__, coverage, asked.digest)
    folder = output_folder(loaded, "calibrate")
    if not is_done(folder, asked.digest, overwrite=overwrite):
        calibration.calibrate(loaded, overwrite=overwrite, progress=progress)
    return Statistics(StatisticsFiles(folder).read, read_manifest(folder).coverage or {}, asked.digest)


def _named_statistics(asked: calibration.Asked) -> Statistics | None:
    """The recipe's `statistics`; None where it names none. Raises RunError when they are missing or of another model."""
    named = asked.loaded.recipe.quantize_awq.statistics
    if named is None:
        return None
    folder = resolve_path(named, asked.loaded.folder)
    if folder is None:
        raise RunError(f"quantize_awq.statistics: there is no folder {named}", "give the output of qvlopt calibrate, or null")
    manifest = read_intact(folder)
    if manifest.kind != calibration.KIND or manifest.source is None or manifest.source.digest != asked.source.digest:
        raise RunError(f"quantize_awq.statistics: {folder} was not calibrated on this source", "run qvlopt calibrate with this model.path")
    return Statistics(StatisticsFiles(folder).read, manifest.coverage or {}, manifest.digest)


def _quantise(asked: calibration.Asked, choice: Choice, statistics: Statistics, progress: Progress) -> QuantizedTower:
    """What becomes of the source, and what it costs per layer."""
    device = prepare(asked.loaded)
    for name, reason in choice.skipped.items():
        log.warning("%s stays as it is: %s", name, reason)
    progress.start(len(choice.quantised), "quantise")
    try:
        return quantize_tower(asked.source, asked.loaded.recipe.quantize_awq, choice, read=statistics.read, device=device, seen=progress.advance)
    finally:
        progress.finish()


def _modules(source: Source, folder: Path) -> tuple[ModuleRecord, ...]:
    """Every module before and after, with the digest of its bytes."""
    before = {_canonical_module(row.name): row for row in module_rows(source.tensors, digests=True)}
    after = {row.name: row for row in module_rows(TensorFiles.open(folder), digests=True)}
    return tuple(
        ModuleRecord(
            name=name,
            dtype_before=row.dtype,
            dtype_after=after[name].dtype,
            bytes_before=row.bytes,
            bytes_after=after[name].bytes,
            sha256_before=row.sha256,
            sha256_after=after[name].sha256,
        )
        for name, row in before.items()
    )


def _canonical_module(stored: str) -> str:
    return canonical_name(f"{stored}.").removesuffix(".")


def _manifest(asked: calibration.Asked, statistics: Statistics, reports: tuple[LayerReport, ...], *, digest: str) -> Manifest:
    source, recipe = asked.source, asked.loaded.recipe
    changes = {"README.md": "replaced by this artifact's model card"}
    if recipe.quantize_awq.format != "bf16" or recipe.quantize_awq.dtype != "source":
        changes["config.json"] = "quantization_config or dtype set to what the tensors are"
    return Manifest(
        kind=KIND,
        digest=digest,
        recipe=recipe.model_dump(mode="json"),
        source=SourceRecord(path=source.id, revision=source.revision, digest=source.digest),
        parents=(ParentRecord(kind=calibration.KIND, digest=statistics.digest),),
        layers=tuple(LayerRecord(**report._asdict()) for report in reports),
        coverage={key: statistics.coverage[key] for key in ("samples", "images", "tokens", "tokens_per_layer")},
        changes=changes,
        versions={
            "python": sys.version.split()[0],
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "safetensors": safetensors.__version__,
            "qvlopt": qvlopt.__version__,
        },
    )


def _result(output: Path, manifest: Manifest, *, existed: bool) -> QuantizeResult:
    assert manifest.check is not None, "an artifact of this kind is checked before it gets its name"
    quantised = tuple(layer.name for layer in manifest.layers)
    vision = [module for module in manifest.modules if module.name.startswith(f"{VISION}.")]
    return QuantizeResult(
        output=output,
        format=manifest.recipe["quantize_awq"]["format"],
        modules_quantized=quantised,
        modules_kept=tuple(module.name for module in manifest.modules if module.name not in quantised),
        bytes_before=sum(module.bytes_before for module in manifest.modules),
        bytes_after=sum(module.bytes_after for module in manifest.modules),
        vision_bytes_before=sum(module.bytes_before for module in vision),
        vision_bytes_after=sum(module.bytes_after for module in vision),
        layers=manifest.layers,
        check=manifest.check,
        existed=existed,
    )


def _plan_rows(source: Source, section: QuantizeAwqSection, choice: Choice, output: Path) -> tuple[PlanRow, ...]:
    weights = [source.tensors.entry(source.names[f"{name}.weight"]) for name in choice.quantised]
    numbers = sum(prod(entry.shape) for entry in weights)
    bits = section.bits + (16 + section.bits) / section.group_size
    whole = sum(entry.nbytes for entry in source.tensors.entries.values())
    saved = sum(entry.nbytes for entry in weights) - int(numbers * bits / 8) if section.format != "bf16" else 0
    rest = "everything outside it byte for byte" if section.dtype == "source" else f"everything outside it as {section.dtype}"
    return (
        PlanRow("source", f"{source.id}: {source.folder}, {whole:,} bytes of tensors"),
        PlanRow("quantises", f"{len(choice.quantised)} linears, {numbers:,} weights to {section.bits} bits in groups of {section.group_size}"),
        PlanRow("keeps", f"{len(choice.kept_vision)} linears of the tower, and {rest}"),
        PlanRow("writes", f"{output}: about {whole - saved:,} bytes as {section.format}"),
        PlanRow("tells", "per layer the loss of plain rounding and of what was chosen; scores need qvlopt evaluate"),
    )
