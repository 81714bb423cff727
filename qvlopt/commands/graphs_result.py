"""What export and quantize-int8 return: the ONNX artifact, what was touched and what it cost."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qvlopt.artifact.manifest import CheckRecord, LayerRecord, Manifest, ModuleRecord
from qvlopt.model.names import VISION
from qvlopt.report.plain import safe

if TYPE_CHECKING:
    from rich.console import Console

FORMAT = "onnx"
SHOWN = 5
"""Layers of the table of errors on a terminal."""


@dataclass(frozen=True)
class GraphsResult:
    """`kind` is export or int8; bytes are of stored tensors. `quantised` holds the names of the modules that are integers now."""

    output: Path
    kind: str
    modules: tuple[ModuleRecord, ...]
    quantised: tuple[str, ...]
    layers: tuple[LayerRecord, ...]
    check: CheckRecord
    existed: bool
    exit_code: int = 0

    @classmethod
    def of(cls, output: Path, manifest: Manifest, *, existed: bool) -> GraphsResult:
        """From the artifact's own manifest."""
        assert manifest.check is not None, "an artifact of this kind says whether it was checked"
        quantised = tuple(module.name for module in manifest.modules if module.dtype_after.startswith("INT"))
        return cls(output, manifest.kind, manifest.modules, quantised, manifest.layers, manifest.check, existed)

    def to_json(self) -> dict[str, Any]:
        before, after = self._bytes("")
        vision_before, vision_after = self._bytes(f"{VISION}.")
        return {
            "output": str(self.output),
            "artifact": str(self.output),
            "kind": self.kind,
            "format": FORMAT,
            "modules_quantized": list(self.quantised),
            "modules_kept": [module.name for module in self.modules if module.name not in self.quantised],
            "bytes_before": before,
            "bytes_after": after,
            "vision_bytes_before": vision_before,
            "vision_bytes_after": vision_after,
            "layers": [layer.model_dump() for layer in self.layers],
            "check": self.check.model_dump(),
        }

    def render(self, console: Console) -> None:
        from rich.table import Table

        command = "export" if self.kind == "export" else "quantize-int8"
        table = Table("", "before", "after", title=command + (" (already there)" if self.existed else ""), title_justify="left")
        for name, prefix in (("vision tower, bytes", f"{VISION}."), ("whole, bytes", "")):
            before, after = self._bytes(prefix)
            table.add_row(name, f"{before:,}", f"{after:,}")
        console.print(table)
        if self.layers:
            self._render_layers(console)
        console.print(safe(self.check.detail), highlight=False, markup=False)
        console.print(safe(f"artifact: {self.output}"), markup=False, highlight=False, soft_wrap=True)

    def _render_layers(self, console: Console) -> None:
        """The layers that are off most; all of them are in the model card."""
        from rich.table import Table

        worst = sorted(self.layers, key=lambda layer: -layer.loss)[:SHOWN]
        table = Table("layer", "plain", "chosen", "by", title=f"||error|| / ||output||, the {len(worst)} worst of {len(self.layers)} layers")
        for layer in worst:
            table.add_row(safe(layer.name), f"{layer.rounding_loss:.4f}", f"{layer.loss:.4f}", safe(layer.method))
        console.print(table)
        floats = sum(layer.method.startswith("float32") for layer in self.layers)
        console.print(f"{len(self.layers) - floats} layers in integers, {floats} in float32; every one is in README.md and qvlopt.json")

    def _bytes(self, prefix: str) -> tuple[int, int]:
        wanted = [module for module in self.modules if module.name.startswith(prefix)]
        return sum(module.bytes_before for module in wanted), sum(module.bytes_after for module in wanted)
