"""What a recipe quantises is decided, or refused with every name, before anything is computed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from qvlopt.errors import UsageError
from qvlopt.model.awq_choice import Choice, choose, module_names
from qvlopt.model.names import vision_linears
from qvlopt.model.source import Source, open_source
from qvlopt.recipe.load import load_recipe
from tests.tiny import build_tiny
from tests.tiny_run import SMALL

ODD = {"depth": 2, "hidden_size": 64, "num_heads": 2, "intermediate_size": 96, "deepstack_visual_indexes": [1]}
"""An inner width of 96, which groups of 64 do not divide."""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Source:
    return opened(build_tiny(tmp_path_factory.mktemp("choice") / "tiny", **SMALL))


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> Source:
    return opened(build_tiny(tmp_path_factory.mktemp("choice") / "odd", vision=ODD, text=SMALL["text"]))


def opened(folder: Path) -> Source:
    return open_source(str(folder), folder=folder.parent)


def chosen(source: Source, **section: Any) -> Choice:
    recipe = load_recipe({"model": {"path": "x"}, "quantize_awq": {"group_size": 64, **section}}).recipe
    return choose(source, recipe.quantize_awq)


def test_scope_vision_takes_every_linear_of_the_tower(source: Source) -> None:
    assert chosen(source) == Choice(vision_linears(source.settings.vision), (), {})


def test_scope_blocks_keeps_the_mergers(source: Source) -> None:
    choice = chosen(source, scope="vision.blocks")
    assert choice.quantised == vision_linears(source.settings.vision, "vision.blocks")
    assert choice.kept_vision == tuple(name for name in vision_linears(source.settings.vision) if "merger" in name)


def test_a_tied_head_counts_as_matched(source: Source) -> None:
    assert source.tied
    assert "lm_head" in module_names(source)
    assert chosen(source, keep=["lm_head"]).kept_vision == ()


def test_every_module_with_a_matrix_can_be_named(source: Source) -> None:
    names = module_names(source)
    assert len(set(names)) == len(names)
    assert {"model.visual.pos_embed", "model.visual.patch_embed.proj", "model.language_model.embed_tokens", "lm_head"} <= set(names)
    assert not any("norm" in name for name in names)


@pytest.mark.parametrize(
    ("pattern", "kept"),
    [
        ("model.visual.blocks.0.attn.proj", {"model.visual.blocks.0.attn.proj"}),
        ("blocks.1.mlp.*", {"model.visual.blocks.1.mlp.linear_fc1", "model.visual.blocks.1.mlp.linear_fc2"}),
        ("visual.merger.*", {"model.visual.merger.linear_fc1", "model.visual.merger.linear_fc2"}),
        ("patch_embed.*", set()),
        ("language_model.layers.*", set()),
    ],
)
def test_patterns_keep_what_they_match(source: Source, pattern: str, kept: set[str]) -> None:
    choice = chosen(source, keep=["lm_head", pattern])
    assert set(choice.kept_vision) == kept
    assert set(choice.quantised) == set(vision_linears(source.settings.vision)) - kept


@pytest.mark.parametrize(
    ("pattern", "nearest"),
    [
        ("model.visual.blocks.0.attn.pro", "model.visual.blocks.0.attn.proj"),
        ("lm_heads", "lm_head"),
        ("model.visual.blocks.2.attn.proj", r"model.visual.blocks.\d.attn.proj"),
        ("vision.merger.linear_fc1", "model.visual.merger.linear_fc1"),
    ],
)
def test_a_pattern_without_match_is_refused_with_the_nearest_name(source: Source, pattern: str, nearest: str) -> None:
    with pytest.raises(UsageError, match=rf"quantize_awq\.keep: '{pattern}' matches no module .*the nearest is {nearest}"):
        chosen(source, keep=["lm_head", pattern])


def test_a_pattern_like_no_name_is_refused_all_the_same(source: Source) -> None:
    with pytest.raises(UsageError, match=r"'§§' matches no module .*qvlopt inspect"):
        chosen(source, keep=["§§"])


def test_a_group_that_does_not_divide_is_refused_with_every_layer_and_its_width(odd: Source) -> None:
    with pytest.raises(UsageError) as refused:
        chosen(odd)
    for index in range(2):
        assert f"model.visual.blocks.{index}.mlp.linear_fc2: input width 96" in refused.value.message
    assert "group_size 64 does not fit 2 layers" in refused.value.message
    assert all(way in (refused.value.hint or "") for way in ("group size", "quantize_awq.keep", "on_indivisible: skip", "pad"))


def test_odd_layers_are_skipped_where_asked_and_said(odd: Source) -> None:
    choice = chosen(odd, on_indivisible="skip")
    assert choice.skipped == {f"model.visual.blocks.{index}.mlp.linear_fc2": "input width 96" for index in range(2)}
    assert set(choice.kept_vision) == set(choice.skipped)
    assert set(choice.quantised) | set(choice.kept_vision) == set(vision_linears(odd.settings.vision))


def test_an_odd_inner_width_is_padded_where_asked(odd: Source, source: Source) -> None:
    choice = chosen(odd, on_indivisible="pad")
    assert choice == Choice(vision_linears(odd.settings.vision), (), {}, 128)
    assert chosen(source, on_indivisible="pad").inner is None
    assert chosen(odd, on_indivisible="pad", keep=["mlp.linear_fc2"]).inner is None


def test_padding_helps_no_other_width_and_says_so(tmp_path: Path) -> None:
    vision = {**ODD, "hidden_size": 96, "intermediate_size": 100}
    folder = build_tiny(tmp_path / "tiny", vision=vision, text=SMALL["text"])
    with pytest.raises(UsageError) as refused:
        chosen(opened(folder), on_indivisible="pad")
    assert "model.visual.blocks.0.attn.qkv: input width 96" in refused.value.message
    assert "linear_fc2" not in refused.value.message.replace("merger.linear_fc2", "").replace("merger_list.0.linear_fc2", "")
    assert "pad" not in (refused.value.hint or "")


def test_odd_layers_that_are_kept_anyway_are_no_fault(odd: Source) -> None:
    assert chosen(odd, keep=["mlp.linear_fc2"]).skipped == {}
    assert chosen(odd, group_size=32).skipped == {}


def test_outputs_that_do_not_fill_a_word_are_refused(tmp_path: Path) -> None:
    folder = build_tiny(tmp_path / "tiny", vision=SMALL["vision"], text={**SMALL["text"], "hidden_size": 68})
    with pytest.raises(UsageError, match=r"merger\.linear_fc2: output width 68 is not a multiple of 8"):
        chosen(opened(folder))


@pytest.mark.parametrize("keep", [["*"], ["model.visual.*"]])
def test_a_choice_of_nothing_is_refused(source: Source, keep: list[str]) -> None:
    with pytest.raises(UsageError, match="leaves no layer to quantise"):
        chosen(source, keep=keep)


@pytest.mark.parametrize(
    ("section", "named"),
    [
        ({"scope": "vision+language"}, r"scope: vision\+language"),
        ({"search": {"compensate": True}}, "search.compensate: true"),
        ({"on_indivisible": "pad"}, "on_indivisible: pad"),
    ],
)
def test_what_autoawq_has_no_notion_of_is_refused_by_name(source: Source, section: dict[str, Any], named: str) -> None:
    with pytest.raises(UsageError, match=rf"quantize_awq\.{named} does not fit engine: autoawq"):
        chosen(source, engine="autoawq", **section)
    assert chosen(source, engine="autoawq") == chosen(source)


def test_a_checkpoint_that_is_quantised_already_is_refused(tmp_path: Path) -> None:
    folder = build_tiny(tmp_path / "tiny", dtype="float8")
    assert json.loads((folder / "config.json").read_text())["quantization_config"]["quant_method"] == "fp8"
    with pytest.raises(UsageError, match=r"is quantised already \(fp8\)"):
        chosen(opened(folder))
