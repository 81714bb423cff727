"""Which linears two engines would treat as quantised, by their own matching rules written anew from their sources."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from compressed_tensors.utils.match import match_named_modules
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration
from transformers.quantizers.quantizers_utils import should_convert_module

from qvlopt.model.names import vision_linears
from qvlopt.model.quantization_config import awq_config, compressed_config
from qvlopt.model.vision import VisionConfig
from qvlopt.quant.rounding import QuantSpec
from tests.tiny import tiny_config

SPEC = QuantSpec(4, 32)
SETTINGS = tiny_config(
    vision={"depth": 12, "hidden_size": 64, "num_heads": 2, "intermediate_size": 64, "deepstack_visual_indexes": list(range(12))},
    text={"num_hidden_layers": 12},
)
TOWER = vision_linears(VisionConfig.from_dict(SETTINGS["vision_config"]))
BLOCKS = tuple(name for name in TOWER if ".blocks." in name)
MERGERS = tuple(name for name in TOWER if name not in BLOCKS)
TEXT = tuple(
    f"model.language_model.layers.{index}.{linear}"
    for index in range(12)
    for linear in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
)
LINEARS = (*TOWER, *TEXT, "lm_head")
NO_LINEARS = ("model.visual.pos_embed", "model.visual.patch_embed.proj", "model.visual.merger.norm", "model.language_model.embed_tokens")

KEPT: dict[str, tuple[str, ...]] = {
    "scope vision": (),
    "scope vision.blocks": MERGERS,
    "one linear of block 1": ("model.visual.blocks.1.attn.proj",),
    "one linear of block 11": ("model.visual.blocks.11.mlp.linear_fc1",),
    "all of block 1": tuple(name for name in BLOCKS if ".blocks.1." in name),
    "deepstack merger 1": tuple(name for name in MERGERS if ".deepstack_merger_list.1." in name),
    "the last merger": tuple(name for name in MERGERS if ".visual.merger." in name),
    "half a merger": ("model.visual.merger.linear_fc2", "model.visual.deepstack_merger_list.1.linear_fc1"),
    "blocks but one linear, no merger": tuple(name for name in TOWER if name != "model.visual.blocks.10.attn.qkv"),
}
VLLM_PREFIXES = (("model.visual.", "visual."), ("lm_head.", "language_model.lm_head."), ("model.language_model.", "language_model.model."))
VLLM_FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj"), "qkv": ("qkv",)}


def transformers_awq(config: dict[str, Any]) -> set[str]:
    """transformers 5.24, quantizers_utils.py: a regex from the start up to a module boundary, or a suffix; lm_head is added."""

    def skipped(name: str, entry: str) -> bool:
        return re.match(rf"(?:{entry})(?:(?<=\.)|(?=\.|$))", name) is not None or name.endswith(entry)

    entries = [*config["modules_to_not_convert"], "lm_head"]
    return {name for name in LINEARS if not any(skipped(name, entry) for entry in entries)}


def vllm_name(name: str) -> str:
    """vLLM 0.33, qwen3_vl.py: hf_to_vllm_mapper; a prefix counts only with its dot."""
    return next((new + name.removeprefix(old) for old, new in VLLM_PREFIXES if name.startswith(old)), name)


def vllm_awq(config: dict[str, Any]) -> set[str]:
    """vLLM 0.33, auto_awq.py and quant_utils.py: an entry, mapped, as a substring; fused layers must agree in all parts."""
    entries = [vllm_name(entry) for entry in config["modules_to_not_convert"]]
    quantised = {name for name in LINEARS if not any(entry in vllm_name(name) for entry in entries)}
    for fused, parts in VLLM_FUSED.items():
        for name in (n for n in LINEARS if n.endswith(f".{parts[0]}")):
            siblings = {name.removesuffix(parts[0]) + part for part in parts}
            assert siblings <= quantised or not siblings & quantised, f"{fused} would be half quantised"
    return quantised


def vllm_compressed(config: dict[str, Any]) -> set[str]:
    """vLLM 0.33, compressed_tensors/utils.py: `re:` matched from the start of vLLM's name, other entries mapped and equal."""

    def matches(name: str, entries: Sequence[str]) -> bool:
        return any(re.match(e[3:], vllm_name(name)) if e.startswith("re:") else vllm_name(e) == vllm_name(name) for e in entries)

    (group,) = config["config_groups"].values()
    return {name for name in (*LINEARS, *NO_LINEARS) if matches(name, group["targets"]) and not matches(name, config["ignore"])}


@pytest.fixture(scope="module")
def skeleton() -> torch.nn.Module:
    with torch.device("meta"):
        model: torch.nn.Module = Qwen3VLForConditionalGeneration(Qwen3VLConfig(**SETTINGS))
    return model


def test_the_names_here_are_those_of_transformers(skeleton: torch.nn.Module) -> None:
    assert {name for name, module in skeleton.named_modules() if isinstance(module, torch.nn.Linear)} == set(LINEARS)
    assert set(NO_LINEARS) <= {name for name, _ in skeleton.named_modules()}


@pytest.mark.parametrize("case", sorted(KEPT))
def test_awq_selects_the_intended_linears_in_transformers_and_vllm(case: str) -> None:
    config = awq_config(SPEC, KEPT[case])
    intended = set(TOWER) - set(KEPT[case])
    assert transformers_awq(config) == intended
    assert vllm_awq(config) == intended


@pytest.mark.parametrize("case", sorted(KEPT))
def test_transformers_own_rule_selects_the_same(case: str) -> None:
    config = awq_config(SPEC, KEPT[case])
    assert {name for name in LINEARS if should_convert_module(name, config["modules_to_not_convert"])} == transformers_awq(config)


@pytest.mark.parametrize("case", sorted(KEPT))
def test_compressed_tensors_selects_the_intended_linears(case: str, skeleton: torch.nn.Module) -> None:
    config = compressed_config(SPEC, KEPT[case])
    intended = set(TOWER) - set(KEPT[case])
    assert vllm_compressed(config) == intended
    # the rule of the package itself, on transformers' names, which transformers uses
    (group,) = config["config_groups"].values()
    assert {name for name, _ in match_named_modules(skeleton, group["targets"], config["ignore"])} == intended


KEPT_LANGUAGE: dict[str, tuple[str, ...]] = {
    "all quantised": (),
    "one linear of layer 1": ("model.language_model.layers.1.self_attn.o_proj",),
    "fused ones of layer 11": tuple(name for name in TEXT if ".layers.11.self_attn." in name and not name.endswith("o_proj")),
    "all of layer 0": tuple(name for name in TEXT if ".layers.0." in name),
    "every down_proj": tuple(name for name in TEXT if name.endswith("down_proj")),
}


@pytest.mark.parametrize("tower", ["scope vision", "one linear of block 1", "half a merger"])
@pytest.mark.parametrize("case", sorted(KEPT_LANGUAGE))
def test_with_the_language_model_in_scope_its_linears_are_selected_and_the_head_is_not(case: str, tower: str, skeleton: torch.nn.Module) -> None:
    intended = set(TOWER) - set(KEPT[tower]) | set(TEXT) - set(KEPT_LANGUAGE[case])
    config = awq_config(SPEC, KEPT[tower], KEPT_LANGUAGE[case])
    assert transformers_awq(config) == intended
    assert {name for name in LINEARS if should_convert_module(name, config["modules_to_not_convert"])} == intended
    assert vllm_awq(config) == intended
    compressed = compressed_config(SPEC, KEPT[tower], KEPT_LANGUAGE[case])
    assert vllm_compressed(compressed) == intended
    (group,) = compressed["config_groups"].values()
    assert {name for name, _ in match_named_modules(skeleton, group["targets"], compressed["ignore"])} == intended


def test_vllm_without_its_mapping_of_names_keeps_the_same_linears() -> None:
    """Releases differ in whether entries are mapped to runtime names before they are looked for."""
    kept = KEPT_LANGUAGE["fused ones of layer 11"]
    entries = awq_config(SPEC, (), kept)["modules_to_not_convert"]
    assert {name for name in LINEARS if any(entry in vllm_name(name) for entry in entries)} == {*kept, "lm_head"}


def test_every_kept_linear_is_listed_in_both_spellings() -> None:
    for case in ("one linear of block 1", "half a merger", "scope vision.blocks"):
        listed = awq_config(SPEC, KEPT[case])["modules_to_not_convert"]
        assert {spelling for name in KEPT[case] for spelling in (name, name.removeprefix("model."))} <= set(listed)


def test_the_awq_config_is_autoawqs_gemm() -> None:
    assert awq_config(QuantSpec(4, 128), ()) == {
        "quant_method": "awq",
        "version": "gemm",
        "bits": 4,
        "group_size": 128,
        "zero_point": True,
        "modules_to_not_convert": ["model.language_model", "language_model", "lm_head"],
    }


@pytest.mark.parametrize(("bits", "symmetric"), [*itertools.product((4, 8), (False, True))])
def test_the_compressed_config_says_what_the_tensors_are(bits: int, symmetric: bool) -> None:
    config = compressed_config(QuantSpec(bits, 64, symmetric=symmetric), ())
    assert (config["quant_method"], config["format"], config["quantization_status"]) == ("compressed-tensors", "pack-quantized", "compressed")
    (group,) = config["config_groups"].values()
    assert group["weights"] == {
        "num_bits": bits,
        "type": "int",
        "symmetric": symmetric,
        "strategy": "group",
        "group_size": 64,
        "dynamic": False,
    }
    assert group["input_activations"] is None
    assert group["output_activations"] is None


def test_configs_are_plain_json() -> None:
    for config in (awq_config(SPEC, MERGERS), compressed_config(SPEC, MERGERS)):
        assert json.loads(json.dumps(config)) == config
