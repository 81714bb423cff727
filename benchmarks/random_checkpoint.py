"""Writes a checkpoint in the shape of Qwen3-VL-2B with seeded random weights, and pictures to calibrate on.

    python -m benchmarks.random_checkpoint FOLDER [--pictures 64] [--side 448] [--blocks 24] [--layers 28]

FOLDER gets `model` (2.13 billion parameters, 4.3 GB in bfloat16) and `pictures`. It stands in for the real checkpoint where
time, memory and files matter and quality does not. A tensor's values depend on its name and the seed alone, and at most
64 MiB of one are in memory.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Iterator
from math import prod, sqrt
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from qvlopt.artifact.tensors import FolderWriter
from qvlopt.model.config import read_config
from qvlopt.model.shapes import parameter_shapes

CHUNK = 2**24
"""Values that are drawn at once."""

TEXT = {
    "model_type": "qwen3_vl_text", "vocab_size": 151_936, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28,
    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "hidden_act": "silu", "max_position_embeddings": 262_144,
    "rms_norm_eps": 1e-6, "rope_theta": 5_000_000, "attention_bias": False, "tie_word_embeddings": True, "dtype": "bfloat16",
    "rope_scaling": {"rope_type": "default", "mrope_interleaved": True, "mrope_section": [24, 20, 20]},
    "bos_token_id": 151_643, "eos_token_id": 151_645,
}  # fmt: skip
VISION = {
    "model_type": "qwen3_vl", "depth": 24, "hidden_size": 1024, "num_heads": 16, "intermediate_size": 4096, "out_hidden_size": 2048,
    "hidden_act": "gelu_pytorch_tanh", "in_channels": 3, "patch_size": 16, "temporal_patch_size": 2, "spatial_merge_size": 2,
    "num_position_embeddings": 2304, "deepstack_visual_indexes": [5, 11, 17],
}  # fmt: skip
IDS = {"image_token_id": 151_655, "video_token_id": 151_656, "vision_start_token_id": 151_652, "vision_end_token_id": 151_653}
PICTURES = {
    "image_processor_type": "Qwen2VLImageProcessorFast", "patch_size": 16, "temporal_patch_size": 2, "merge_size": 2,
    "image_mean": [0.5] * 3, "image_std": [0.5] * 3, "size": {"shortest_edge": 65_536, "longest_edge": 16_777_216},
}  # fmt: skip


def build_checkpoint(folder: Path, *, seed: int = 0, blocks: int = 24, layers: int = 28) -> Path:
    """Writes config, picture settings and weights into the new `folder`. Fewer `blocks` or `layers` make a smaller one."""
    folder.mkdir(parents=True)
    taps = [index for index in VISION["deepstack_visual_indexes"] if index < blocks]  # type: ignore[attr-defined]
    vision = VISION | {"depth": blocks, "deepstack_visual_indexes": taps}
    config = {
        "architectures": ["Qwen3VLForConditionalGeneration"], "model_type": "qwen3_vl", "dtype": "bfloat16", "tie_word_embeddings": True,
        "vision_config": vision, "text_config": TEXT | {"num_hidden_layers": layers}, **IDS,
    }  # fmt: skip
    _write(folder / "config.json", config)
    _write(folder / "preprocessor_config.json", PICTURES)
    _write(folder / "generation_config.json", {"do_sample": True, "temperature": 0.7, "top_p": 0.8, "top_k": 20, "eos_token_id": [151_645, 151_643]})
    read = read_config(folder)
    shapes = parameter_shapes(read.vision, read.text, tied=True)
    with FolderWriter(folder, [(name, "BF16", shape) for name, shape in shapes.items()]) as writer:
        for name, shape in shapes.items():
            writer.write(name, _values(name, shape, seed))
    return folder


def build_pictures(folder: Path, *, count: int = 64, side: int = 448, seed: int = 0) -> Path:
    """Writes `count` square pictures of blurred noise over gradients, and a manifest with one question each."""
    (folder / "pictures").mkdir(parents=True)
    rows = []
    for index in range(count):
        draw = np.random.default_rng((seed, index))
        coarse = Image.fromarray(draw.integers(0, 256, (side // 14, side // 14, 3), dtype=np.uint8)).resize((side, side), Image.Resampling.BICUBIC)
        noise = draw.integers(-20, 21, (side, side, 3))
        picture = Image.fromarray((np.asarray(coarse, dtype=np.int64) + noise).clip(0, 255).astype(np.uint8))
        picture.save(folder / "pictures" / f"{index:04d}.png", compress_level=1)
        rows.append({"id": f"p{index:04d}", "images": [f"pictures/{index:04d}.png"], "question": "What is it?", "answers": ["noise"], "task": "ocr"})
    (folder / "manifest.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return folder


def _values(name: str, shape: tuple[int, ...], seed: int) -> Iterator[memoryview]:
    """bfloat16 bytes in chunks: norms about 1, weights and embeddings about 1/sqrt(inputs), biases about 0.1.

    A few input channels of norms are large.
    """
    key = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(key[:6], "big"))
    for start in range(0, prod(shape), CHUNK):
        values = torch.randn(min(CHUNK, prod(shape) - start), generator=generator)
        if name.endswith(".bias"):
            values *= 0.1
        elif len(shape) == 1:
            values = 1 + 0.2 * values.abs().pow(3)
        elif "embed_tokens" in name:
            values /= sqrt(shape[-1])  # logits about 1: larger ones would make an error of a few percent a KL of nats
        elif "embed" in name:
            values *= 0.5
        else:
            values /= sqrt(prod(shape[1:]))
        yield memoryview(values.bfloat16().view(torch.uint8).numpy())


def _write(path: Path, fields: dict[str, Any]) -> None:
    path.write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    for name, default in (("pictures", 64), ("side", 448), ("blocks", 24), ("layers", 28)):
        parser.add_argument(f"--{name}", type=int, default=default)
    asked = parser.parse_args()
    build_checkpoint(asked.folder / "model", blocks=asked.blocks, layers=asked.layers)
    build_pictures(asked.folder / "pictures", count=asked.pictures, side=asked.side)


if __name__ == "__main__":
    main()
