"""`inspect PATH`: every module of a checkpoint or artifact with its dtype, shape, bytes and digest."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qvlopt.artifact.header import TensorEntry, read_header
from qvlopt.artifact.manifest import MANIFEST, read_manifest
from qvlopt.artifact.modules import ModuleRow, module_rows
from qvlopt.artifact.tensors import WEIGHTS, TensorFiles
from qvlopt.errors import RunError, UsageError
from qvlopt.graphs.names import TABLES
from qvlopt.report.plain import safe

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["InspectResult", "ModuleRow", "inspect"]

VISION_PREFIXES = ("model.visual.", "visual.")
"""Names of the vision tower's modules in today's checkpoints and in those of Qwen2-VL's time."""


@dataclass(frozen=True)
class InspectResult:
    """The modules of one folder or file, in natural order of names, and sums over them.

    `totals` has `modules`, `tensors`, `bytes`, `vision_bytes`, and `bytes DTYPE` for every dtype.
    """

    path: Path
    modules: tuple[ModuleRow, ...]
    totals: dict[str, int]
    exit_code: int = 0

    def to_json(self) -> dict[str, Any]:
        """The keys of `inspect` in the contract, section 7; `sha256` of each module besides."""
        rows = [{**row._asdict(), "shape": list(row.shape)} for row in self.modules]
        return {"output": None, "path": str(self.path), "modules": rows, "totals": self.totals}

    def render(self, console: Console) -> None:
        """A table of the modules, then one of the totals."""
        from rich.table import Table
        from rich.text import Text

        table = Table(title=Text(safe(str(self.path))), title_justify="left")
        table.add_column("module", overflow="fold")
        for heading in ("dtype", "shape", "bytes", "sha256"):
            table.add_column(heading, justify="right" if heading == "bytes" else "left", no_wrap=True)
        for row in self.modules:
            digest = (row.sha256 or "")[:12]
            table.add_row(Text(safe(row.name)), row.dtype, " x ".join(map(str, row.shape)), f"{row.bytes:,}", digest)
        totals = Table(show_header=False)
        for name, value in self.totals.items():
            totals.add_row(name, f"{value:,}")
        console.print(table)
        console.print(totals)


def inspect(path: Path, *, digests: bool = True) -> InspectResult:
    """Lists what is stored in a checkpoint folder, in an artifact of qvlopt, or in one safetensors file.

    Reads headers, and all bytes once for `digests`. Raises UsageError when there is no such path and
    RunError when a file is missing or broken.
    """
    path = Path(path)
    if (path / TABLES).is_file() and (path / MANIFEST).is_file():
        from qvlopt.commands.inspect_graphs import graph_files, graph_rows  # needs onnx and torch, which other folders do not

        manifest = read_manifest(path)
        files = graph_files(path, manifest)
        rows = graph_rows(path, files, manifest, digests=digests)
    else:
        files = _open(path)
        rows = module_rows(files, digests=digests)
    return InspectResult(path, rows, _totals(rows, len(files.entries)))


def _open(path: Path) -> TensorFiles:
    if not path.exists():
        raise UsageError(f"there is no file or folder {path}", hint="Name a checkpoint folder, an artifact of qvlopt, or a safetensors file.")
    if path.is_file():
        return TensorFiles(path.parent, read_header(path))
    others = [] if (path / WEIGHTS).exists() or (path / f"{WEIGHTS}.index.json").exists() else _listed_weights(path)
    if not others:
        return TensorFiles.open(path)
    entries: dict[str, TensorEntry] = {}
    for name in others:
        for tensor, entry in TensorFiles.open(path, weights=name).entries.items():
            if tensor in entries:
                raise RunError(f"{path} has tensor {tensor!r} in two files, {entries[tensor].file.name} and {name}")
            entries[tensor] = entry
    return TensorFiles(path, entries)


def _listed_weights(folder: Path) -> list[str]:
    """Safetensors files of an artifact that is no checkpoint, such as statistics; none without a manifest."""
    if not (folder / MANIFEST).exists():
        return []
    return sorted(name for name in read_manifest(folder).files if name.endswith(".safetensors"))


def _totals(rows: tuple[ModuleRow, ...], tensors: int) -> dict[str, int]:
    totals = {
        "modules": len(rows),
        "tensors": tensors,
        "bytes": sum(row.bytes for row in rows),
        "vision_bytes": sum(row.bytes for row in rows if row.name.startswith(VISION_PREFIXES)),
    }
    for row in rows:
        key = f"bytes {row.dtype}"
        totals[key] = totals.get(key, 0) + row.bytes
    return totals
