"""The checkpoints of tests/tiny.py are what they say, with transformers as the judge."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer, Qwen3VLForConditionalGeneration

from tests.tiny import SPECIAL, build_tiny, tiny_config, tiny_tensors, tiny_tokenizer


def load(folder: Path) -> tuple[Qwen3VLForConditionalGeneration, dict[str, set[str]]]:
    loaded: Any = Qwen3VLForConditionalGeneration.from_pretrained(folder, dtype="auto", output_loading_info=True)
    model, info = loaded
    return model, info


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("tied", [True, False])
def test_transformers_loads_every_tensor_and_misses_none(tmp_path: Path, tied: bool, shards: int) -> None:
    model, info = load(build_tiny(tmp_path, tied=tied, shards=shards))
    assert not any(info.values()), info
    state = model.state_dict()
    for name, tensor in tiny_tensors(tiny_config(tied=tied)).items():
        assert torch.equal(state[name].float(), tensor), name
    assert torch.equal(state["lm_head.weight"], state["model.language_model.embed_tokens.weight"]) is tied


def test_odd_widths_and_other_depths_load(tmp_path: Path) -> None:
    vision = {"hidden_size": 144, "intermediate_size": 268, "depth": 3, "deepstack_visual_indexes": [0, 2], "num_position_embeddings": 36}
    text = {"hidden_size": 64, "head_dim": 16, "num_hidden_layers": 3, "intermediate_size": 96}
    model, info = load(build_tiny(tmp_path, vision=vision, text=text))
    assert not any(info.values()), info
    config: Any = model.config
    assert config.vision_config.out_hidden_size == 64
    assert sum(config.text_config.rope_parameters["mrope_section"]) == 8


def test_float32_and_bfloat16_saves_are_the_same_values(tmp_path: Path) -> None:
    single = load_file(build_tiny(tmp_path / "f", dtype="float32") / "model.safetensors")
    half = load_file(build_tiny(tmp_path / "b", dtype="bfloat16") / "model.safetensors")
    assert {name: tensor.dtype for name, tensor in single.items()} == dict.fromkeys(half, torch.float32)
    assert all(torch.equal(single[name], half[name].float()) for name in half)


def test_the_seed_changes_every_tensor_and_nothing_else_does(tmp_path: Path) -> None:
    first, again, other = (load_file(build_tiny(tmp_path / str(i), seed=seed) / "model.safetensors") for i, seed in enumerate([1, 1, 2]))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in first)


def test_old_prefixes_hold_the_same_tensors_by_their_old_names(tmp_path: Path) -> None:
    new = load_file(build_tiny(tmp_path / "new", tied=False) / "model.safetensors")
    old = load_file(build_tiny(tmp_path / "old", tied=False, old_prefix=True) / "model.safetensors")
    assert {name.split(".")[0] for name in old} == {"visual", "model", "lm_head"}
    assert torch.equal(old["visual.blocks.0.attn.qkv.weight"], new["model.visual.blocks.0.attn.qkv.weight"])
    assert torch.equal(old["model.layers.1.mlp.up_proj.weight"], new["model.language_model.layers.1.mlp.up_proj.weight"])
    assert len(old) == len(new)


@pytest.mark.parametrize(("dtype", "quantised"), [("float8", 14), ("float8_vision", 14 + 8 + 6)])
def test_float8_times_its_block_scales_is_near_the_weights(tmp_path: Path, dtype: str, quantised: int) -> None:
    folder = build_tiny(tmp_path, dtype=dtype, text={"intermediate_size": 200})  # type: ignore[arg-type]
    stored = load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    weights = tiny_tensors(config)
    scales = [name for name in stored if name.endswith("_scale_inv")]
    for name in scales:
        weight = stored[name.removesuffix("_scale_inv")].float()
        spread = stored[name].float().repeat_interleave(128, 0)[: weight.shape[0]].repeat_interleave(128, 1)[:, : weight.shape[1]]
        exact = weights[name.removesuffix("_scale_inv")]
        assert (weight * spread - exact).norm() < 0.05 * exact.norm(), name
    assert len(scales) == quantised
    kept = config["quantization_config"]["modules_to_not_convert"]
    assert ("model.visual.blocks.0.attn.qkv" in kept) is (dtype == "float8")


def test_transformers_reads_the_tokenizer_as_it_was_built(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(build_tiny(tmp_path))
    text = "<|im_start|>user\nWhat is the colour? 12 e\u0301 <|im_end|>\n"
    ids = tokenizer.encode(text)
    assert ids == tiny_tokenizer().encode(text).ids
    assert tokenizer.decode(ids) == text.replace("e\u0301", "\u00e9")
    assert tokenizer.convert_tokens_to_ids(list(SPECIAL)) == list(range(len(tokenizer) - len(SPECIAL), len(tokenizer)))


def test_ids_in_the_configs_are_those_of_the_tokenizer(tmp_path: Path) -> None:
    folder = build_tiny(tmp_path)
    config, generation = (json.loads((folder / name).read_text()) for name in ("config.json", "generation_config.json"))
    tokenizer = tiny_tokenizer()
    assert config["image_token_id"] == tokenizer.token_to_id("<|image_pad|>")
    assert generation["eos_token_id"] == [tokenizer.token_to_id("<|im_end|>"), tokenizer.token_to_id("<|endoftext|>")]
    assert config["text_config"]["vocab_size"] >= tokenizer.get_vocab_size()
