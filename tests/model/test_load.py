"""Every storage of the same weights loads as the same model: transformers', spelled and sharded and quantised as may be."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3VLForConditionalGeneration

from qvlopt.errors import RunError
from qvlopt.model.load import LoadedModel, load_model
from qvlopt.model.parameters import checkpoint_dtype, read_parameter
from qvlopt.model.source import open_source
from qvlopt.quant import pack_awq, pack_compressed
from qvlopt.quant.rounding import QuantSpec, dequantize, qparams, quantize
from tests.tiny import build_tiny

LAYER = "model.visual.blocks.0.mlp.linear_fc1"


def loaded(folder: Path, dtype: torch.dtype = torch.float32) -> LoadedModel:
    return load_model(open_source(str(folder), folder=folder.parent), dtype=dtype, device="cpu")


def change_config(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))


def hidden(model: LoadedModel) -> torch.Tensor:
    """Hidden states over three-axis positions that differ, so that the rotary settings show."""
    embeds = torch.randn(2, 9, 128, generator=torch.Generator().manual_seed(0)).to(model.dtype)
    positions = torch.stack([torch.arange(9) * step for step in (1, 2, 3)])[:, None].expand(3, 2, 9)
    with torch.inference_mode():
        output: torch.Tensor = model.text(inputs_embeds=embeds, position_ids=positions).last_hidden_state
    return output


@pytest.mark.parametrize("tied", [True, False])
def test_every_weight_is_the_one_transformers_loads(tmp_path: Path, tied: bool) -> None:
    folder = build_tiny(tmp_path / "tiny", tied=tied)
    ours = loaded(folder)
    theirs = Qwen3VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
    expected = dict(theirs.model.visual.named_parameters())
    assert set(ours.vision.weights) == set(expected)
    assert all(torch.equal(ours.vision.weights[name], weight) for name, weight in expected.items())
    text = theirs.model.language_model.state_dict()
    assert set(ours.text.state_dict()) == set(text)
    assert all(torch.equal(ours.text.state_dict()[name], weight) for name, weight in text.items())
    assert torch.equal(ours.head, theirs.lm_head.weight)
    assert (ours.head is ours.text.embed_tokens.weight) is tied
    assert torch.equal(ours.text.rotary_emb.inv_freq, theirs.model.language_model.rotary_emb.inv_freq)


@pytest.mark.parametrize(
    "changes", [{"shards": 3}, {"old_prefix": True}, {"dtype": "float32"}, {"shards": 2, "old_prefix": True, "tied": False}], ids=str
)
def test_shards_prefixes_and_dtypes_of_the_same_values_are_the_same_model(tmp_path: Path, changes: dict[str, Any]) -> None:
    expected, got = loaded(build_tiny(tmp_path / "plain", tied=changes.get("tied", True))), loaded(build_tiny(tmp_path / "other", **changes))
    assert torch.equal(hidden(got), hidden(expected))
    assert torch.equal(got.head, expected.head)
    assert all(torch.equal(got.vision.weights[name], weight) for name, weight in expected.vision.weights.items())


def respelled(text: dict[str, Any], spelling: str) -> None:
    scaling, theta = text.pop("rope_scaling"), text.pop("rope_theta")
    if spelling == "4.57":
        text.update(rope_scaling=scaling, rope_theta=theta)
    elif spelling == "4.57 with type":
        text.update(rope_scaling={**{k: v for k, v in scaling.items() if k != "rope_type"}, "type": "mrope"}, rope_theta=theta)
    elif spelling == "5 nested":
        text.update(rope_parameters={**scaling, "rope_theta": theta})
    elif spelling == "5 with theta beside":
        text.update(rope_parameters=scaling, rope_theta=theta)
    elif spelling == "both":
        text.update(rope_parameters={**scaling, "rope_theta": theta}, rope_scaling=scaling, rope_theta=theta)


@pytest.mark.parametrize("theta", [5000000, 250000])
def test_all_spellings_of_the_rotary_settings_give_equal_hidden_states(tmp_path: Path, theta: int) -> None:
    states = []
    for number, spelling in enumerate(["4.57", "4.57 with type", "5 nested", "5 with theta beside", "both"]):
        folder = build_tiny(tmp_path / str(number), text={"rope_theta": theta})
        change_config(folder, lambda c, s=spelling: respelled(c["text_config"], s))
        states.append(hidden(loaded(folder)))
    assert all(torch.equal(state, states[0]) for state in states)
    theirs = Qwen3VLForConditionalGeneration.from_pretrained(tmp_path / "0", dtype=torch.float32).model.language_model
    inverse = 1.0 / (theta ** (torch.arange(0, 32, 2, dtype=torch.float) / 32))
    assert torch.equal(theirs.rotary_emb.inv_freq, inverse)
    assert torch.equal(loaded(tmp_path / "2").text.rotary_emb.inv_freq, inverse)


@pytest.mark.parametrize(("change", "why"), [
    (lambda t: t.pop("rope_theta"), "no rope_theta"),
    (lambda t: (t.update(rope_parameters=t["rope_scaling"]), t.pop("rope_scaling"), t.pop("rope_theta")), "no rope_theta"),
    (lambda t: t.update(rope_parameters={**t["rope_scaling"], "rope_theta": 10000}), "rope_theta is given twice, 10000 and 5000000"),
    (lambda t: t["rope_scaling"].pop("mrope_section"), "mrope_section is None"),
    (lambda t: t["rope_scaling"].update(mrope_section=[4, 4, 4]), r"mrope_section is \[4, 4, 4\], .* = 16"),
    (lambda t: t["rope_scaling"].update(rope_type="dynamic", factor=2.0), "rope_type is 'dynamic'"),
    (lambda t: t["rope_scaling"].update(mrope_interleaved=False), "mrope_interleaved is False"),
])  # fmt: skip
def test_rotary_settings_are_never_guessed(tmp_path: Path, change: Callable[[dict[str, Any]], object], why: str) -> None:
    folder = build_tiny(tmp_path / "tiny")
    change_config(folder, lambda c: change(c["text_config"]))
    with pytest.raises(RunError, match=why):
        open_source(str(folder), folder=tmp_path)


def test_scaled_rotary_settings_reach_the_model(tmp_path: Path) -> None:
    folder = build_tiny(tmp_path / "tiny")
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
    change_config(folder, lambda c: c["text_config"]["rope_scaling"].update(scaling))
    theirs = Qwen3VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).model.language_model
    ours = loaded(folder).text
    assert torch.equal(ours.rotary_emb.inv_freq, theirs.rotary_emb.inv_freq)
    assert ours.rotary_emb.attention_scaling == theirs.rotary_emb.attention_scaling != 1.0


def quantised(folder: Path, method: str, *, bits: int = 4, symmetric: bool = False) -> tuple[Path, torch.Tensor]:
    """Stores LAYER of a tiny checkpoint in a quantised layout; also the weight that its integers mean."""
    spec = QuantSpec(bits, 64, symmetric)
    tensors = load_file(folder / "model.safetensors")
    weight = tensors.pop(f"{LAYER}.weight").float()
    params = qparams(weight, spec)
    q = quantize(weight, params, spec)
    if method == "awq":
        tensors |= {f"{LAYER}.{k}": v for k, v in pack_awq.pack(q, params.zero_point, params.scale)._asdict().items()}
    else:
        packed = pack_compressed.pack(q, params.zero_point, params.scale, bits=bits, symmetric=symmetric)._asdict()
        tensors |= {f"{LAYER}.{k}": v for k, v in packed.items() if v is not None}
    save_file(tensors, folder / "model.safetensors")
    change_config(folder, lambda c: c.update(quantization_config={"quant_method": method}))
    return folder, dequantize(q, params, spec)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    ("method", "options"),
    [("awq", {}), ("compressed-tensors", {}), ("compressed-tensors", {"bits": 8}), ("compressed-tensors", {"symmetric": True})],
    ids=str,
)
def test_quantised_layers_are_the_dequantised_twin_in_the_checkpoints_dtype(tmp_path: Path, method: str, options: dict[str, Any], dtype: Any) -> None:
    folder, meant = quantised(build_tiny(tmp_path / "tiny", dtype=dtype), method, **options)
    source = open_source(str(folder), folder=tmp_path)
    twin = meant.to(getattr(torch, dtype))
    assert read_parameter(source, f"{LAYER}.weight").dtype == twin.dtype
    assert torch.equal(read_parameter(source, f"{LAYER}.weight"), twin)
    for compute in (torch.float32, torch.bfloat16):
        name = LAYER.removeprefix("model.visual.") + ".weight"
        assert torch.equal(loaded(folder, compute).vision.weights[name], twin.to(compute))


def test_a_layer_whose_tensors_do_not_belong_together_is_named(tmp_path: Path) -> None:
    folder, _ = quantised(build_tiny(tmp_path / "tiny"), "awq")
    tensors = load_file(folder / "model.safetensors")
    tensors[f"{LAYER}.qzeros"] = tensors[f"{LAYER}.qzeros"][:, :-1].contiguous()
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(RunError, match=rf"{LAYER}.weight cannot be unpacked"):
        loaded(folder)


@pytest.mark.parametrize("dtype", ["float8", "float8_vision"])
def test_float8_blocks_are_widened(tmp_path: Path, dtype: Any) -> None:
    shape = {"hidden_size": 192, "intermediate_size": 320, "num_heads": 2}  # widths that blocks of 128 do not divide
    exact, coarse = build_tiny(tmp_path / "exact", vision=shape), build_tiny(tmp_path / "coarse", vision=shape, dtype=dtype)
    expected, got = loaded(exact).vision.weights, loaded(coarse).vision.weights
    assert all(torch.allclose(got[name], weight, rtol=0.07, atol=0.002) for name, weight in expected.items())
    assert torch.nn.functional.cosine_similarity(hidden(loaded(coarse)), hidden(loaded(exact)), dim=-1).min() > 0.99
    stored = load_file(coarse / "model.safetensors")
    name = "model.language_model.layers.0.mlp.up_proj.weight"
    source = open_source(str(coarse), folder=tmp_path)
    scale = stored[f"{name}_scale_inv"].float().repeat_interleave(128, 0)  # [256, 1]: one block across
    assert torch.equal(read_parameter(source, name), (stored[name].float() * scale).bfloat16())


def test_float8_without_scales_is_refused(tmp_path: Path) -> None:
    folder = build_tiny(tmp_path / "tiny")
    tensors = load_file(folder / "model.safetensors")
    tensors[f"{LAYER}.weight"] = tensors[f"{LAYER}.weight"].to(torch.float8_e4m3fn)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(RunError, match=r"linear_fc1.weight is F8_E4M3 without scales"):
        loaded(folder)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_named(tmp_path: Path, value: float) -> None:
    folder = build_tiny(tmp_path / "tiny")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.visual.merger.linear_fc1.bias"][3] = value
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(RunError, match=r"model.visual.merger.linear_fc1.bias holds NaN or infinity"):
        loaded(folder)


def test_the_checkpoints_dtype_is_the_configs_or_else_the_embeddings(tmp_path: Path) -> None:
    folder = build_tiny(tmp_path / "tiny", dtype="float16")
    assert checkpoint_dtype(open_source(str(folder), folder=tmp_path)) == torch.float16
    change_config(folder, lambda c: c["text_config"].pop("dtype"))
    assert checkpoint_dtype(open_source(str(folder), folder=tmp_path)) == torch.float16
    change_config(folder, lambda c: c.update(torch_dtype="bfloat16"))
    assert checkpoint_dtype(open_source(str(folder), folder=tmp_path)) == torch.bfloat16


def test_loading_leaves_the_config_as_it_was(tmp_path: Path) -> None:
    source = open_source(str(build_tiny(tmp_path / "tiny")), folder=tmp_path)
    before = copy.deepcopy(source.settings.text), copy.deepcopy(source.config)
    load_model(source, dtype=torch.float32, device="cpu")
    assert (source.settings.text, source.config) == before
