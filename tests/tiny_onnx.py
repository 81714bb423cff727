"""An exported artifact of a tiny checkpoint, as `qvlopt export` writes it, and the twin graph that layout `fast` adds."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from qvlopt.artifact.digest import sha256_file
from qvlopt.commands.export import export
from qvlopt.graphs import names
from qvlopt.recipe.load import load_recipe


def build_onnx(checkpoint: str | Path, output: Path) -> Path:
    """Exports a checkpoint, unchecked, and returns the folder."""
    section = {"check": False}
    export(
        load_recipe(
            {"name": "tiny", "model": {"path": str(checkpoint)}, "hardware": {"threads": 1}, "export": section}, flags={"output": str(output)}
        )
    )
    return output


def with_twin(artifact: Path, copy: Path) -> Path:
    """A copy whose `decode.onnx` is the decoder itself, listed in the manifest."""
    shutil.copytree(artifact, copy)
    shutil.copy(copy / names.DECODER_GRAPH, copy / names.DECODE_GRAPH)
    path = copy / "qvlopt.json"
    manifest = json.loads(path.read_text())
    manifest["files"][names.DECODE_GRAPH] = {"sha256": sha256_file(copy / names.DECODE_GRAPH), "bytes": (copy / names.DECODE_GRAPH).stat().st_size}
    path.write_text(json.dumps(manifest))
    return copy
