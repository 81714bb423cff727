"""What calibrate and quantize-awq need in tests: a handful of pictures with a manifest, and recipes over tiny checkpoints."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from qvlopt.recipe.load import LoadedRecipe, load_recipe

SMALL: dict[str, Any] = {
    "vision": {"depth": 2, "hidden_size": 64, "num_heads": 2, "intermediate_size": 128, "deepstack_visual_indexes": [1]},
    "text": {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1},
}
"""Sub-configs of `build_tiny` for a checkpoint that is quantised in a second: every width is a multiple of 64."""

PLAIN = {"scale": False, "clip": False, "bias": False}
"""`quantize_awq.search` without any search: the fastest where a test does not look at losses."""

SIZES = ((64, 64), (96, 64), (64, 96), (64, 64), (96, 64), (64, 64))
"""Width and height of the pictures of `build_set`: three grids, some of them repeated so that batches have company."""


def build_set(folder: Path, *, rows: Sequence[Mapping[str, Any]] | None = None) -> Path:
    """Writes one picture of noise over a gradient per entry of SIZES, and a manifest of one question each, or of `rows`."""
    (folder / "pictures").mkdir(parents=True)
    for index, (width, height) in enumerate(SIZES):
        noise = np.random.default_rng(index).integers(0, 96, (height, width, 3))
        gradient = np.linspace(0, 159, width)[None, :, None] * np.array([1.0, 0.5, 0.25])
        Image.fromarray((noise + gradient).astype(np.uint8)).save(folder / "pictures" / f"{index}.png")
    return write_manifest(folder, rows if rows is not None else [row(index) for index in range(len(SIZES))])


def row(index: int, **values: Any) -> dict[str, Any]:
    """The manifest's row of picture `index`."""
    return {"id": f"p{index}", "images": [f"pictures/{index}.png"], "question": "What is it?", "answers": ["noise"], "task": "ocr"} | values


def write_manifest(folder: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    """Writes `manifest.jsonl` and returns the folder."""
    (folder / "manifest.jsonl").write_text("".join(json.dumps(values) + "\n" for values in rows), encoding="utf-8")
    return folder


def tiny_recipe(
    model: Path,
    data: Path,
    output: Path,
    *,
    calibrate: Mapping[str, Any] | None = None,
    quantize_awq: Mapping[str, Any] | None = None,
    flags: Mapping[str, object] | None = None,
    **more: Any,
) -> LoadedRecipe:
    """A recipe over all pictures of `build_set`; a search of few steps, since no claim of a test needs more."""
    return load_recipe(
        {
            "name": "tiny",
            "model": {"path": str(model)},
            "output": str(output),
            "hardware": {"device": "cpu", "threads": 1},
            "calibrate": {"data": str(data), "split": None, "samples": len(SIZES), **(calibrate or {})},
            "quantize_awq": {"group_size": 64, "search": {"grid": 2}, **(quantize_awq or {})},
            **more,
        },
        flags=flags,
    )


def stored(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint folder, by safetensors' own reader."""
    return {name: tensor for path in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(path).items()}


def same_bits(got: torch.Tensor, expected: torch.Tensor) -> bool:
    """Equal in dtype, shape and every byte."""
    return got.dtype == expected.dtype and got.shape == expected.shape and torch.equal(got.view(torch.uint8), expected.view(torch.uint8))


def with_first_value(folder: Path, values: Mapping[str, float]) -> Path:
    """The one-file checkpoint, with the first value of the named tensors replaced."""
    tensors = load_file(folder / "model.safetensors")
    for name, value in values.items():
        tensors[name].view(-1)[0] = value
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def listing(folder: Path) -> dict[str, tuple[int, int]]:
    """Every path under a folder, hidden ones too, with inode and time of its last change."""
    return {str(path.relative_to(folder)): (path.stat().st_ino, path.stat().st_mtime_ns) for path in folder.rglob("*")}
