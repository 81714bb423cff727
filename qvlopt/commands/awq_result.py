"""What quantize-awq returns and what its manifest records: layers, modules before and after, sizes, the self-check."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import safetensors
import torch
import transformers

import qvlopt
from qvlopt.artifact.manifest import CheckRecord, LayerRecord, Manifest, ModuleRecord, ParentRecord, SourceRecord
from qvlopt.artifact.modules import module_rows
from qvlopt.artifact.tensors import TensorFiles
from qvlopt.commands import calibration_data
from qvlopt.commands.awq_parts import Part, parts_of
from qvlopt.model.names import VISION
from qvlopt.model.quantize import LayerReport
from qvlopt.model.shapes import canonical_name
from qvlopt.model.source import Source
from qvlopt.report.plain import safe

if TYPE_CHECKING:
    from rich.console import Console

KIND = "awq"


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
    parts: tuple[Part, ...] = ()
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
            "parts": [part.to_json() for part in self.parts],
        }

    def render(self, console: Console) -> None:
        from rich.table import Table

        rounding, chosen = sum(r.rounding_loss for r in self.layers), sum(r.loss for r in self.layers)
        table = Table("", "before", "after", title="quantize-awq" + (" (already there)" if self.existed else ""), title_justify="left")
        table.add_row("vision tower, bytes", f"{self.vision_bytes_before:,}", f"{self.vision_bytes_after:,}")
        table.add_row("whole checkpoint, bytes", f"{self.bytes_before:,}", f"{self.bytes_after:,}")
        table.add_row("loss, sum over layers", f"{rounding:.5f} (rounding)", f"{chosen:.5f} ({chosen / rounding - 1:+.0%})" if rounding else "0")
        for part in self.parts if any(part.linears for part in self.parts[1:]) else ():
            losses = f", loss {part.rounding_loss:.5f} (rounding) to {part.loss:.5f}" if part.linears else ""
            table.add_row(f"{part.name}, {part.linears} linears{losses}", f"{part.bytes_before:,}", f"{part.bytes_after:,}")
        console.print(table)
        console.print(f"{len(self.modules_quantized)} linears quantised, {len(self.modules_kept)} modules kept; {self.check.detail}", highlight=False)
        if compared := [row for row in self.layers if row.held_out_loss is not None and row.held_out_uncompensated is not None]:
            before, after = sum(row.held_out_uncompensated or 0 for row in compared), sum(row.held_out_loss or 0 for row in compared)
            count = sum("compensate" in row.method for row in compared)
            gain = f"their layers lost {before:.5f} without and {after:.5f} with it" if before else "no loss"
            console.print(f"compensated {count} of {len(compared)} linears, chosen on held-out pictures: {gain}", highlight=False)
        console.print(safe(f"artifact: {self.output}"), markup=False, highlight=False, soft_wrap=True)


def artifact_manifest(
    asked: calibration_data.Asked, reports: Sequence[LayerReport], coverage: dict[str, Any], *, digest: str, statistics: str, inner: int | None
) -> Manifest:
    """The manifest but for what the written files tell; `statistics` is the digest of those that were used.

    `inner` is the width that the tower's MLPs were padded to, if they were.
    """
    source, recipe = asked.source, asked.loaded.recipe
    changes = {"README.md": "replaced by this artifact's model card"}
    if recipe.quantize_awq.format != "bf16" or recipe.quantize_awq.dtype != "source":
        changes["config.json"] = "quantization_config or dtype set to what the tensors are"
    if inner is not None:
        padded = f"vision_config.intermediate_size is {inner}: the MLPs are padded with zeros from {source.settings.vision.intermediate_size}"
        changes["config.json"] = "; ".join([padded, *([changes["config.json"]] if "config.json" in changes else [])])
    return Manifest(
        kind=KIND,
        digest=digest,
        recipe=recipe.model_dump(mode="json"),
        source=SourceRecord(path=source.id, revision=source.revision, digest=source.digest),
        parents=(ParentRecord(kind=calibration_data.KIND, digest=statistics),),
        layers=tuple(LayerRecord(**report._asdict()) for report in reports),
        coverage={key: coverage[key] for key in ("samples", "images", "tokens", "tokens_per_layer")},
        changes=changes,
        versions={
            "python": sys.version.split()[0],
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "safetensors": safetensors.__version__,
            "qvlopt": qvlopt.__version__,
        },
    )


def module_records(source: Source, folder: Path) -> tuple[ModuleRecord, ...]:
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


def artifact_result(output: Path, manifest: Manifest, *, existed: bool) -> QuantizeResult:
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
        parts=parts_of(manifest),
    )
