"""The model card of an ONNX artifact: what is in the folder, how it was checked, and how it is run."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from qvlopt.report.card import SCORES_BEGIN, SCORES_END

WORST = 10
"""Layers that are shown at once; the others come behind a fold."""
_COLUMNS = ("| layer | plain | chosen | by |", "|---|---|---|---|")
_FILES = {
    "vision.onnx": "the vision tower, one picture of any size a run, with its DeepStack features",
    "decoder.onnx": "the language model: prefill, chunks and single steps over key-value buffers that stay in place",
    "decode.onnx": "a faster twin of decoder.onnx for single steps, over the same buffers",
    "tables.safetensors": "embedding and position tables, which the host looks up",
}


def graphs_card(manifest: Mapping[str, Any], files: Sequence[str], command: str) -> str:
    """README.md of an export or quantize-int8 artifact from its manifest's plain values, its files' names and the command that makes it."""
    is_export = manifest["kind"] == "export"
    section = "float32" if is_export else f"layout {manifest['recipe']['quantize_int8']['layout']}"
    source, name = manifest["source"], manifest["recipe"]["name"]
    listed = "\n".join(f"| `{file}` | {text} |" for file, text in _FILES.items() if file in files)
    parts = [
        _front_matter(source["path"], "fp32" if is_export else "int8", quantised=not is_export),
        f"# {name}: ONNX, {section}\n",
        f"`{source['path']}` as graphs for onnxruntime on a CPU. DeepStack and M-RoPE are kept. The graphs are built from the weights by "
        "name, not traced: no picture size and no prompt length is built in.\n",
        f"| file | what it is |\n|---|---|\n{listed}\n\nA graph's weights lie in the `.data` file beside it.\n",
        f"## Check\n\n{manifest['check']['detail']}.\n",
        f"## Scores\n\n{SCORES_BEGIN}\nNot evaluated yet: run `qvlopt evaluate` on this folder.\n{SCORES_END}\n",
        "" if is_export else _errors(manifest["layers"]),
        "## Running it\n\n    qvlopt evaluate <this folder>\n    qvlopt bench <this folder>\n\nIn Python: `qvlopt.runtime.open_engine`. "
        "transformers, vLLM, llama.cpp and onnxruntime-genai do not read this folder.\n",
        f"## Made by\n\nqvlopt {manifest['version']}, recipe `{name}` (in full under `recipe` in `qvlopt.json`):\n\n    {command}\n\n"
        f"Source digest `{source['digest']}`{', revision `' + source['revision'] + '`' if source['revision'] else ''}.\n",
    ]
    return "\n".join(part for part in parts if part)


def _front_matter(base: str, tag: str, *, quantised: bool) -> str:
    """YAML; a JSON string is one too, whatever a path holds."""
    lines = ["---", "library_name: onnx", "pipeline_tag: image-text-to-text", f"base_model: {json.dumps(base)}"]
    lines += ["base_model_relation: quantized"] if quantised else []
    return "\n".join([*lines, f"tags: [qwen3_vl, onnx, {tag}]", "---", ""])


def _errors(layers: Sequence[Mapping[str, Any]]) -> str:
    """Every layer, those whose output is off most first and again in order of computation behind a fold."""
    worst = sorted(layers, key=lambda layer: -float(layer["loss"]))[:WORST]
    lead = (
        "## Error per layer\n\n||error|| / ||output|| on calibration inputs, without and with what was chosen. "
        f"The {len(worst)} worst of {len(layers)}:\n"
    )
    fold = [f"<details><summary>All {len(layers)} layers</summary>", "", *_COLUMNS, *map(_row, layers), "", "</details>", ""]
    return "\n".join([lead, *_COLUMNS, *map(_row, worst), "", *fold])


def _row(layer: Mapping[str, Any]) -> str:
    return f"| `{layer['name']}` | {layer['rounding_loss']:.5f} | {layer['loss']:.5f} | {layer['method']} |"
