"""The tower's structure as data, against transformers' own module tree and the tower's own forward."""

from __future__ import annotations

import pytest
import torch
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

from qvlopt.model.names import VISION, Scope, matching, unclipped_rows, vision_linears, vision_stages
from qvlopt.model.shapes import vision_shapes
from qvlopt.model.vision import VisionConfig, VisionTower
from tests.tiny import tiny_config, tiny_tensors

SETTINGS = tiny_config(vision={"depth": 12, "hidden_size": 64, "num_heads": 2, "intermediate_size": 64, "deepstack_visual_indexes": [1, 4, 10]})
CONFIG = VisionConfig.from_dict(SETTINGS["vision_config"])


def test_the_linears_are_those_of_transformers() -> None:
    with torch.device("meta"):
        theirs = Qwen3VLVisionModel(Qwen3VLVisionConfig(**SETTINGS["vision_config"]))
    expected = {f"{VISION}.{name}" for name, module in theirs.named_modules() if isinstance(module, torch.nn.Linear)}
    assert set(vision_linears(CONFIG)) == expected
    assert len(vision_linears(CONFIG)) == len(expected)


def test_scope_blocks_leaves_out_the_mergers_only() -> None:
    everything, blocks = vision_linears(CONFIG), vision_linears(CONFIG, "vision.blocks")
    assert set(everything) - set(blocks) == {name for name in everything if "merger" in name}
    assert len(blocks) == 12 * 4


def test_stages_come_in_the_order_of_computation() -> None:
    tensors = tiny_tensors(SETTINGS)
    weights = {name.removeprefix(f"{VISION}."): tensor for name, tensor in tensors.items() if name.startswith(VISION)}
    computed = [name for name, _ in VisionTower(CONFIG, weights).stages(torch.zeros(1, 4, CONFIG.patch_dim), (2, 2))]
    assert [stage.name for stage in vision_stages(CONFIG)] == computed[1:]


def test_every_parameter_of_a_block_or_merger_belongs_to_one_stage() -> None:
    owners = {name: [s.name for s in vision_stages(CONFIG) if name.startswith(f"{s.name}.")] for name in vision_shapes(CONFIG)}
    assert {name for name, stages in owners.items() if not stages} == {"patch_embed.proj.weight", "patch_embed.proj.bias", "pos_embed.weight"}
    assert all(len(stages) <= 1 for stages in owners.values())


def test_a_folds_widths_fit_and_its_producer_is_searched_after_its_consumer() -> None:
    shapes = vision_shapes(CONFIG)
    for stage in vision_stages(CONFIG):
        for fold in stage.folds:
            (consumer,) = fold.consumers
            rows, width = shapes[f"{fold.producer}.weight"][0], shapes[f"{consumer}.weight"][1]
            assert rows * fold.repeats == width if fold.kind == "norm" else rows == 3 * width
            order = [*stage.linears, fold.producer]
            assert order.index(consumer) < order.index(fold.producer)


def test_nothing_folds_through_a_gelu() -> None:
    consumers = {name.rpartition(".")[2] for stage in vision_stages(CONFIG) for fold in stage.folds for name in fold.consumers}
    assert consumers == {"qkv", "proj", "linear_fc1"}


NAMES = (
    "model.visual.patch_embed.proj", "model.visual.blocks.1.attn.qkv", "model.visual.blocks.1.attn.proj", "model.visual.blocks.10.attn.proj",
    "model.visual.merger.linear_fc1", "model.language_model.layers.1.mlp.up_proj", "lm_head",
)  # fmt: skip


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("lm_head", {"lm_head"}),
        ("model.visual.blocks.1.attn.proj", {NAMES[2]}),
        ("visual.blocks.1.*", {NAMES[1], NAMES[2]}),
        ("blocks.1.*", {NAMES[1], NAMES[2]}),
        ("blocks.1*", {NAMES[1], NAMES[2], NAMES[3]}),
        ("attn.proj", {NAMES[2], NAMES[3]}),
        ("blocks.[02468].*", set()),
        ("*merger*", {NAMES[4]}),
        ("blocks.1", set()),
        ("ttn.proj", set()),
        ("VISUAL.*", set()),
        ("*", set(NAMES)),
    ],
)
def test_a_pattern_matches_whole_names_or_their_last_parts(pattern: str, expected: set[str]) -> None:
    assert set(matching((pattern,), NAMES)[pattern]) == expected


def test_every_pattern_is_answered_by_itself() -> None:
    assert matching(("lm_head", "nothing"), NAMES) == {"lm_head": ("lm_head",), "nothing": ()}


@pytest.mark.parametrize("scope", ["vision", "vision.blocks"])
def test_names_are_canonical_and_without_repetition(scope: Scope) -> None:
    names = vision_linears(CONFIG, scope)
    assert len(set(names)) == len(names)
    assert all(name.startswith("model.visual.") and not name.endswith(".weight") for name in names)


def test_queries_and_keys_of_the_fused_qkv_are_never_clipped() -> None:
    assert unclipped_rows("model.visual.blocks.3.attn.qkv", 384) == 256
    assert unclipped_rows("model.visual.blocks.3.attn.proj", 128) == 0
