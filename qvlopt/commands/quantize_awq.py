"""quantize-awq: the linears of the vision tower become 4-bit integers; everything else keeps its bytes, and that is proven."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import safetensors
import torch
import transformers

import qvlopt
from qvlopt.artifact.digest import digest_of
from qvlopt.artifact.folder import existing_state, require_space, write_folder
from qvlopt.artifact.manifest import (
    CheckRecord,
    LayerRecord,
    Manifest,
    ModuleRecord,
    ParentRecord,
    SourceRecord,
    read_manifest,
    write_manifest,
)  # fmt: skip
from qvlopt.artifact.modules import module_rows
from qvlopt.artifact.process import peak_rss_bytes
from qvlopt.artifact.tensors import TensorFiles
from qvlopt.commands import calibrate as calibration
from qvlopt.commands.hardware import prepare
from qvlopt.commands.output import is_very_folder, output_folder
from qvlopt.commands.plan import Plan, PlanRow
from qvlopt.errors import RunError
from qvlopt.model.awq_choice import Choice, choose
from qvlopt.damage.tensors import TowerError, encode, tower_errors
from qvlopt.model.load import checkpoint_dtype, load_vision
from qvlopt.model.names import VISION, vision_stages
from qvlopt.model.pack_layer import pack_layer
from qvlopt.model.quantization_config import awq_config, compressed_config
from qvlopt.model.quantize import LayerReport, QuantizedStage, Search, quantize_stage
from qvlopt.model.rewrite import Rewrite, verify_rewritten, write_rewritten
from qvlopt.model.shapes import canonical_name
from qvlopt.model.source import Source, open_source
from qvlopt.model.statistics import StatisticsFiles
from qvlopt.quant.objective import Gram
from qvlopt.quant.rounding import QuantSpec
from qvlopt.recipe.load import LoadedRecipe
from qvlopt.recipe.paths import resolve_path
from qvlopt.recipe.schema import QuantizeAwqSection
from qvlopt.report.card import awq_card
from qvlopt.report.progress import Progress, SilentProgress

if TYPE_CHECKING:
    from rich.console import Console

log = logging.getLogger(__name__)

KIND = "awq"
ALGORITHM = 1
"""Part of the digest: raised whenever the same inputs give other integers."""
CHECK_PICTURES = 4
BROKEN = 1.0
"""A tower whose output is off by as much as it is large carries nothing of the picture."""
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}


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
        console.print(f"artifact: {self.output}", markup=False, highlight=False, soft_wrap=True)


def quantize_awq(
    loaded: LoadedRecipe, *, overwrite: bool = False, resume: bool = False, dry_run: bool = False, progress: Progress | None = None
) -> QuantizeResult | Plan:
    """Writes `<output>/awq`, self-checked. Does nothing when the same artifact is there; `resume` reuses finished statistics.

    Raises UsageError for a recipe that does not fit the source, RunError for what breaks on the way.
    """
    del resume  # statistics that are finished are always reused
    began = time.monotonic()
    asked = calibration.Asked.by(loaded)
    section, source = loaded.recipe.quantize_awq, asked.source
    choice = choose(source, section)
    output = output_folder(loaded, KIND)
    digest = _digest(section, source, asked.digest)
    if dry_run:
        return Plan(loaded, _plan_rows(source, section, choice, output))
    if not overwrite and existing_state(output, digest) == "same":
        return _result(output, read_manifest(output), existed=True)
    require_space(output, sum(entry.nbytes for entry in source.tensors.entries.values()))
    statistics = _statistics(asked, progress or SilentProgress())
    device = prepare(loaded)
    with write_folder(output, digest=digest, overwrite=overwrite) as folder:
        rewrite, reports = _quantise(source, section, choice, statistics, progress or SilentProgress(), device)
        write_rewritten(folder, source, rewrite)
        check = _verified(folder, asked, rewrite, choice, reports)
        manifest = _manifest(loaded, asked, choice, statistics, reports)
        manifest = manifest.model_copy(
            update={"modules": _modules(source, folder), "check": check, "seconds": time.monotonic() - began, "peak_rss_bytes": peak_rss_bytes()}
        )
        (folder / "README.md").write_text(awq_card(manifest.model_dump(mode="json")), encoding="utf-8")
        write_manifest(folder, manifest)
    return _result(output, read_manifest(output), existed=False)


def _digest(section: QuantizeAwqSection, source: Source, statistics: str) -> str:
    asked = section.model_dump(mode="json", exclude={"statistics"})
    return digest_of({"kind": KIND, "algorithm": ALGORITHM, "source": source.digest, "statistics": statistics, "section": asked})


def _statistics(asked: calibration.Asked, progress: Progress) -> Statistics:
    """From the recipe's own `statistics`, else from `<output>/calibrate`, where they are put if they are not there yet."""
    loaded = asked.loaded
    named = loaded.recipe.quantize_awq.statistics
    if named is not None:
        return _named_statistics(asked, named)
    if is_very_folder(loaded):
        taken = calibration.take_statistics(asked, progress)
        tokens = {name: gram.count for name, gram in taken.grams.items()}
        coverage = {"samples": taken.coverage.samples, "images": taken.coverage.images, "tokens": taken.coverage.tokens, "tokens_per_layer": tokens}
        return Statistics(taken.grams.__getitem__, coverage, asked.digest)
    folder = output_folder(loaded, "calibrate")
    if existing_state(folder, asked.digest) != "same":
        calibration.calibrate(loaded, progress=progress)
    return Statistics(StatisticsFiles(folder).read, read_manifest(folder).coverage or {}, asked.digest)


def _named_statistics(asked: calibration.Asked, named: str) -> Statistics:
    folder = resolve_path(named, asked.loaded.folder)
    if folder is None:
        raise RunError(f"quantize_awq.statistics: there is no folder {named}", "give the output of qvlopt calibrate, or null")
    manifest = read_manifest(folder)
    if manifest.kind != calibration.KIND or manifest.source is None or manifest.source.digest != asked.source.digest:
        raise RunError(f"quantize_awq.statistics: {folder} was not calibrated on this source", "run qvlopt calibrate with this model.path")
    return Statistics(StatisticsFiles(folder).read, manifest.coverage or {}, manifest.digest)


def _quantise(
    source: Source, section: QuantizeAwqSection, choice: Choice, statistics: Statistics, progress: Progress, device: torch.device
) -> tuple[Rewrite, tuple[LayerReport, ...]]:
    """Stage by stage: at most one stage's weights and statistics are in memory, and what is packed already."""
    spec = QuantSpec(section.bits, section.group_size, symmetric=not section.zero_point)
    dtype = DTYPES.get(section.dtype, checkpoint_dtype(source))
    search = Search(dtype, section.search.scale, section.search.clip, section.search.bias, section.search.grid)
    added: dict[str, torch.Tensor] = {}
    removed: set[str] = set()
    reports: list[LayerReport] = []
    chosen = frozenset(choice.quantised)
    progress.start(len(chosen), "quantise")
    try:
        for stage in vision_stages(source.settings.vision):
            wanted = [f"{VISION}.{name}" for name in stage.linears if f"{VISION}.{name}" in chosen]
            if not wanted:
                continue
            weights = {name: source.tensors.read(stored).to(device) for name, stored in source.names.items() if name.startswith(f"{VISION}.{stage.name}.")}
            grams = {name: _on(statistics.read(name), device) for name in wanted}
            done = _checked(quantize_stage(stage, weights, grams, spec, search=search, chosen=chosen))
            for name, integers in done.integers.items():
                stored = source.names[f"{name}.weight"].removesuffix("weight")
                removed.add(f"{stored}weight")
                added.update({stored + suffix: t.cpu() for suffix, t in pack_layer(integers, spec, form=section.format, dtype=dtype).items()})
            added.update({source.names[name]: tensor.to(dtype).cpu() for name, tensor in done.changed.items()})
            reports += done.reports
            progress.advance(len(wanted), f"quantise {stage.name} (loss {done.reports[-1].loss:.5f})")
    finally:
        progress.finish()
    config = {"awq": awq_config, "compressed-tensors": compressed_config}.get(section.format)
    quantization = config(spec, choice.kept_vision) if config else None
    cast = DTYPES.get(section.dtype) if section.dtype != "source" else None
    return Rewrite(frozenset(removed - set(added)), added, cast, quantization), tuple(reports)


def _on(gram: Gram, device: torch.device) -> Gram:
    return Gram(gram.count, *(t.to(device) for t in (gram.sum, gram.centred, gram.abs_sum, gram.abs_max)))


def _checked(done: QuantizedStage) -> QuantizedStage:
    for report in done.reports:
        if not report.loss <= report.rounding_loss:
            raise RunError(f"{report.name}: the loss {report.loss:g} is not at or below plain rounding's {report.rounding_loss:g}")
    for name, tensor in done.changed.items():
        if not bool(torch.isfinite(tensor).all()):
            raise RunError(f"{name}: holds NaN or infinity after folding", "set quantize_awq.search.scale: false, or dtype: source")
    return done


def _verified(folder: Path, asked: calibration.Asked, rewrite: Rewrite, choice: Choice, reports: tuple[LayerReport, ...]) -> CheckRecord:
    """The written tensors are those meant, nothing outside the scope changed, and the reloaded tower still sees.

    Raises RunError otherwise. `worst` is the largest relative error of the tower's outputs on a few calibration pictures.
    """
    source = asked.source
    written = verify_rewritten(folder, source, rewrite)
    done = {report.name for report in reports}
    if done != set(choice.quantised):
        raise RunError(f"self-check failed: {sorted(done ^ set(choice.quantised))[0]} was not treated as asked")
    outside = [name for name in rewrite.added if not canonical_name(name).startswith(f"{VISION}.")]
    if outside:
        raise RunError(f"self-check failed: {outside[0]} lies outside the scope and would change")
    same = sum(1 for name in written if name in source.tensors.entries and name not in rewrite.added)
    kept = "byte-identical to the source" if rewrite.cast is None else f"the source's values as {str(rewrite.cast).removeprefix('torch.')}"
    worst = _worst_tower_error(folder, asked)
    if not worst.relative_error < BROKEN:
        raise RunError(f"self-check failed: the reloaded tower's {worst.output} is off by {worst.relative_error:.0%}", "use more bits or smaller groups")
    detail = (
        f"read back {len(written)} tensors: {len(rewrite.added)} as meant, {same} {kept}; "
        f"reloaded tower off by at most {worst.relative_error:.2%} ({worst.output}, {CHECK_PICTURES} pictures)"
    )
    return CheckRecord(passed=True, worst=worst.relative_error, detail=detail)


def _worst_tower_error(folder: Path, asked: calibration.Asked) -> TowerError:
    """One tower at a time is in memory: the source's, then the one that the written folder gives."""
    pictures = list(islice(calibration.pictures(asked, calibration.Coverage()), CHECK_PICTURES))
    base = encode(load_vision(asked.source, dtype=torch.float32, device="cpu"), pictures)
    again = open_source(str(folder.resolve()), folder=folder)
    candidate = encode(load_vision(again, dtype=torch.float32, device="cpu"), pictures)
    return max(tower_errors(base, candidate), key=lambda row: row.relative_error)


def _modules(source: Source, folder: Path) -> tuple[ModuleRecord, ...]:
    """Every module before and after, with the digest of its bytes."""
    before = {row.name: row for row in module_rows(source.tensors, digests=True)}
    after = {row.name: row for row in module_rows(TensorFiles.open(folder), digests=True)}
    return tuple(
        ModuleRecord(
            name=canonical_name(f"{name}.weight").removesuffix(".weight"),
            dtype_before=row.dtype,
            dtype_after=after[name].dtype,
            bytes_before=row.bytes,
            bytes_after=after[name].bytes,
            sha256_before=row.sha256,
            sha256_after=after[name].sha256,
        )
        for name, row in before.items()
    )


def _manifest(
    loaded: LoadedRecipe, asked: calibration.Asked, choice: Choice, statistics: Statistics, reports: tuple[LayerReport, ...]
) -> Manifest:
    source = asked.source
    changes = {"README.md": "replaced by this artifact's model card"}
    if loaded.recipe.quantize_awq.format != "bf16" or loaded.recipe.quantize_awq.dtype != "source":
        changes["config.json"] = "quantization_config or dtype set to what the tensors are"
    for name, reason in choice.skipped.items():
        log.warning("%s stays as it is: %s", name, reason)
    return Manifest(
        kind=KIND,
        digest=_digest(loaded.recipe.quantize_awq, source, asked.digest),
        recipe=loaded.recipe.model_dump(mode="json"),
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
    bits = section.bits + (16 + section.bits) / section.group_size if section.format != "bf16" else 16
    whole = sum(entry.nbytes for entry in source.tensors.entries.values())
    saved = sum(entry.nbytes for entry in weights) - int(numbers * bits / 8)
    return (
        PlanRow("source", f"{source.id}: {source.folder}, {whole:,} bytes of tensors"),
        PlanRow("quantises", f"{len(choice.quantised)} linears, {numbers:,} weights to {section.bits} bits in groups of {section.group_size}"),
        PlanRow("keeps", f"{len(choice.kept_vision)} linears of the tower, and everything outside it byte for byte"),
        PlanRow("writes", f"{output}: about {whole - saved:,} bytes as {section.format}"),
        PlanRow("tells", "per layer the loss of plain rounding and of what was chosen; scores need qvlopt evaluate"),
    )
