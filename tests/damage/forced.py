"""Tiny checkpoints with one fault, and items to follow through them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from qvlopt.damage.streams import Forced
from qvlopt.data.samples import ImageRef, Sample
from qvlopt.model.source import Source, open_source
from qvlopt.runtime.torch_engine import TorchEngine
from tests.tiny import build_tiny

SHAPE = {
    "vision": {"depth": 3, "hidden_size": 32, "num_heads": 2, "intermediate_size": 64, "deepstack_visual_indexes": [0, 1]},
    "text": {"num_hidden_layers": 3},
}


def build(folder: Path) -> Path:
    """A checkpoint with three blocks, two taps and three layers; larger than random weights are, so that a fault reaches the logits."""
    build_tiny(folder, dtype="float32", **SHAPE)
    return change(folder, "layers.", lambda weight: weight * 2 if weight.ndim == 2 else weight)


def change(folder: Path, part: str, how: Callable[[torch.Tensor], torch.Tensor]) -> Path:
    """Changes every tensor whose name contains `part`."""
    tensors = load_file(folder / "model.safetensors")
    chosen = [name for name in tensors if part in name]
    assert chosen, part
    save_file(tensors | {name: how(tensors[name]).contiguous() for name in chosen}, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def faulty(base: Path, folder: Path, part: str, how: Callable[[torch.Tensor], torch.Tensor]) -> Path:
    """A copy of the checkpoint with a fault."""
    return change(Path(shutil.copytree(base, folder)), part, how)


def configured(base: Path, folder: Path, file: str, **values: object) -> Path:
    """A copy of the checkpoint with other settings."""
    path = Path(shutil.copytree(base, folder)) / file
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
    return folder


def noisy(weight: torch.Tensor) -> torch.Tensor:
    return weight + 0.5 * weight.std() * torch.randn(weight.shape, generator=torch.Generator().manual_seed(weight.numel()))


def source_of(folder: Path) -> Source:
    return open_source(str(folder), folder=folder)


def engine_of(folder: Path) -> TorchEngine:
    return TorchEngine.open(source_of(folder), dtype=torch.float32, device="cpu")


def samples(folder: Path) -> list[Sample]:
    """One item with a picture, one with two, one without."""
    refs = []
    for number, size in enumerate([(64, 64), (96, 64), (64, 96)]):
        pixels = np.random.default_rng(number).integers(0, 255, (size[1], size[0], 3)).astype(np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png")
        refs.append(ImageRef(f"{number}.png", folder))
    pictures = [(refs[0],), (refs[1], refs[2]), ()]
    return [Sample(f"i{n}", shown, "What is it?", ("x",), "ocr", f"i{n}", f"x:{n}") for n, shown in enumerate(pictures)]


def forced(engine: TorchEngine, sample: Sample, answer: tuple[int, ...] = (5, 9, 3)) -> Forced:
    item = engine.prepare(sample)
    return Forced(sample.id, item.token_ids, answer, item.pictures, item.positions, item.delta)
