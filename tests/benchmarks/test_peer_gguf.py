"""A checkpoint as llama.cpp's files: every parameter has its place, under the names and with the facts that llama.cpp reads."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.peer_gguf import (
    CONTROL,
    NORMAL,
    USER_DEFINED,
    Part,
    describe_text,
    describe_vision,
    stored_tensors,
    text_name,
    values,
    vision_parts,
    vocabulary,
)  # fmt: skip
from benchmarks.random_checkpoint import PICTURES, TEXT, VISION
from benchmarks.runtime import TOKENIZER
from qvlopt.model.shapes import text_shapes, vision_shapes
from qvlopt.model.vision import VisionConfig
from tests.tiny import build_tiny

TAPS = (5, 11, 17)
CONFIG: dict[str, Any] = {"text_config": TEXT | {"num_hidden_layers": 2}, "vision_config": VISION}
LAYER = ("attn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "attn_q_norm", "attn_k_norm", "ffn_norm", "ffn_gate", "ffn_up", "ffn_down")
BLOCK = ("ln1", "ln2", "attn_qkv", "attn_out", "ffn_up", "ffn_down")


class Told:
    """A writer that remembers what it was told."""

    def __init__(self) -> None:
        self.facts: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        return lambda value: self.facts.__setitem__(name.removeprefix("add_"), value)


def vision_names() -> list[str]:
    shapes = vision_shapes(VisionConfig.from_dict(VISION))
    return [part.name for name, shape in shapes.items() for part in vision_parts(name, shape, TAPS)]


def test_every_parameter_of_the_language_model_has_a_name_of_its_own() -> None:
    names = [text_name(name) for name in text_shapes(CONFIG["text_config"])]
    assert len(set(names)) == len(names)
    assert set(names) == {"token_embd.weight", "output_norm.weight"} | {f"blk.{index}.{name}.weight" for index in (0, 1) for name in LAYER}
    with pytest.raises(KeyError):
        text_name("layers.0.self_attn.unheard_of.weight")


def test_every_parameter_of_the_tower_has_a_name_of_its_own() -> None:
    names = vision_names()
    assert len(set(names)) == len(names)
    pairs = [f"v.blk.{index}.{name}" for index in range(24) for name in BLOCK] + ["v.post_ln", "mm.0", "mm.2", "v.patch_embd"]
    pairs += [f"v.deepstack.{tap}.{name}" for tap in TAPS for name in ("norm", "fc1", "fc2")]
    both = {f"{name}.{kind}" for name in pairs for kind in ("weight", "bias")}
    assert set(names) == both | {"v.patch_embd.weight.1", "v.position_embd.weight"}


def test_the_patch_embedding_becomes_a_kernel_of_each_frame() -> None:
    parts = vision_parts("patch_embed.proj.weight", (8, 3, 2, 16, 16), TAPS)
    assert [(part.shape, part.frame) for part in parts] == [((8, 3, 16, 16), 0), ((8, 3, 16, 16), 1)]


def test_vectors_positions_and_patches_stay_float32() -> None:
    kept = [Part("v.position_embd.weight", (4, 4)), Part("v.patch_embd.weight.1", (4, 3, 2, 2)), Part("blk.0.attn_norm.weight", (4,))]
    assert all(part.is_float32 for part in kept)
    assert not any(Part(name, (4, 4)).is_float32 for name in ("token_embd.weight", "mm.0.weight", "blk.0.attn_q.weight"))


def test_the_language_model_is_described() -> None:
    told = Told()
    describe_text(told, CONFIG)
    assert told.facts["rope_dimension_sections"] == [24, 20, 20, 0]
    assert told.facts["num_deepstack_layers"] == 3
    assert (told.facts["block_count"], told.facts["head_count_kv"], told.facts["key_length"], told.facts["rope_freq_base"]) == (2, 8, 128, 5e6)


def test_both_spellings_of_the_rotary_settings_are_read() -> None:
    text = {name: value for name, value in CONFIG["text_config"].items() if name not in ("rope_scaling", "rope_theta")}
    text["rope_parameters"] = {"rope_type": "default", "rope_theta": 10_000, "mrope_section": [2, 1, 1]}
    told = Told()
    describe_text(told, CONFIG | {"text_config": text})
    assert (told.facts["rope_dimension_sections"], told.facts["rope_freq_base"]) == ([2, 1, 1, 0], 10_000)


def test_the_tower_is_described() -> None:
    told = Told()
    describe_vision(told, CONFIG, PICTURES)
    assert (told.facts["clip_projector_type"], told.facts["vision_image_size"]) == ("qwen3vl_merger", 768)
    assert [index for index, is_tap in enumerate(told.facts["vision_is_deepstack_layers"]) if is_tap] == list(TAPS)
    assert (told.facts["vision_projection_dim"], told.facts["vision_image_mean"]) == (2048, [0.5] * 3)


def test_tokens_that_the_tokenizer_does_not_know_have_a_text() -> None:
    added = [{"id": 2, "content": "<|end|>", "special": True}, {"id": 3, "content": "<think>", "special": False}]
    texts, kinds = vocabulary({"model": {"vocab": {"a": 0, "b": 1}}, "added_tokens": added}, 6)
    assert texts == ["a", "b", "<|end|>", "<think>", "[4]", "[5]"]
    assert kinds == [NORMAL, NORMAL, CONTROL, USER_DEFINED, NORMAL, NORMAL]


def test_the_files_hold_the_checkpoints_numbers(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf", reason="the package gguf is not installed")
    model = build_tiny(tmp_path / "model")
    assert all((model / name).exists() for name in TOKENIZER)
    script = Path(__file__).parents[2] / "benchmarks" / "peer_gguf.py"
    files = [tmp_path / "text.gguf", tmp_path / "mmproj.gguf"]
    subprocess.run([sys.executable, str(script), str(model), *map(str, files)], check=True)
    text, vision = ({tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors} for path in files)
    stored = stored_tensors(model)
    query = text["blk.0.attn_q.weight"]
    found = gguf.quants.dequantize(query.data, query.tensor_type)
    assert np.array_equal(found, values(stored["model.language_model.layers.0.self_attn.q_proj.weight"]))
    kernels = np.stack([vision["v.patch_embd.weight"].data, vision["v.patch_embd.weight.1"].data], axis=2)
    assert np.array_equal(kernels, values(stored["model.visual.patch_embed.proj.weight"]))
    assert vision["mm.0.weight"].data.dtype == np.float16
