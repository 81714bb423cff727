"""The model card says what was done, what it cost, how to run it and where not."""

from __future__ import annotations

from typing import Any

import pytest
from ruamel.yaml import YAML

from qvlopt.report.card import WORST, Score, awq_card, with_scores

COMMAND = "qvlopt quantize-awq --recipe my-recipe --set quantize_awq.bits=4"
FORMS = ("awq", "compressed-tensors", "bf16")


def manifest(*, path: str = "Qwen/Qwen3-VL-2B-Instruct", revision: str | None = "abc123", **section: Any) -> dict[str, Any]:
    layers = [
        {"name": f"model.visual.blocks.{i}.attn.qkv", "rounding_loss": 0.01 * (i + 1), "loss": 0.002 * (i + 1), "method": "scale+clip+bias"}
        for i in range(12)
    ]
    modules = [{"name": layer["name"], "bytes_before": 2_000_000, "bytes_after": 530_000} for layer in layers]
    modules.append({"name": "model.language_model.embed_tokens", "bytes_before": 9_000_000, "bytes_after": 9_000_000})
    defaults = {
        "bits": 4,
        "group_size": 128,
        "zero_point": True,
        "format": "awq",
        "dtype": "source",
        "scope": "vision",
        "search": {"compensate": False},
    }
    return {
        "version": "0.1.0",
        "recipe": {"name": "my-recipe", "quantize_awq": {**defaults, **section}},
        "source": {"path": path, "revision": revision, "digest": "d1gest"},
        "layers": layers,
        "modules": modules,
        "coverage": {"images": 128, "tokens": 20480},
    }


def front_matter(card: str) -> dict[str, Any]:
    assert card.startswith("---\n")
    found: dict[str, Any] = YAML(typ="safe", pure=True).load(card.split("---\n")[1])
    return found


@pytest.mark.parametrize("form", FORMS)
def test_every_card_says_what_was_done_and_how_to_do_it_again(form: str) -> None:
    card = awq_card(manifest(format=form), COMMAND)
    for part in (
        "# my-recipe: vision tower in INT4",
        "12 linear layers of the vision tower of `Qwen/Qwen3-VL-2B-Instruct`",
        "groups of 128 (with zero points)",
        "byte for byte those of the source",
        "    vllm serve <this folder>",
        f"    {COMMAND}\n",
        "Source digest `d1gest`, revision `abc123`.",
        "128 pictures (20,480 patches)",
    ):
        assert part in card
    assert front_matter(card)["tags"] == ["qwen3_vl", "vision-tower-int4", form]
    assert front_matter(card)["base_model"] == "Qwen/Qwen3-VL-2B-Instruct"


def test_only_packed_formats_warn_of_sglang() -> None:
    warned = {form: "**Not SGLang**" in awq_card(manifest(format=form), COMMAND) for form in FORMS}
    assert warned == {"awq": True, "compressed-tensors": True, "bf16": False}
    assert "for SGLang" in awq_card(manifest(format="bf16"), COMMAND)


def test_each_format_names_what_transformers_needs() -> None:
    assert 'AwqConfig(backend="torch_awq")' in awq_card(manifest(format="awq"), COMMAND)
    assert "CompressedTensorsConfig(dequantize=True)" in awq_card(manifest(format="compressed-tensors"), COMMAND)


def test_the_settings_are_those_of_the_recipe() -> None:
    card = awq_card(manifest(format="bf16", bits=3, group_size=64, zero_point=False, dtype="float16"), COMMAND)
    assert "rounded to 3 bits in groups of 64 (symmetric)" in card
    assert "cast to float16" in card
    assert "byte for byte" not in card
    assert "vision-tower-int3" in front_matter(card)["tags"]


def test_the_language_model_is_not_said_to_be_untouched_when_it_is_quantised() -> None:
    card = awq_card(manifest(scope="vision+language"), COMMAND)
    assert "linear layers of the vision tower and decoder layers of" in card
    assert "Embeddings and lm_head are byte for byte those of the source" in card
    assert "language model and" not in card


def test_compensation_is_told_layer_by_layer_with_what_it_gained() -> None:
    made = manifest(search={"compensate": True})
    made["layers"][0] |= {"method": "scale+clip+compensate+bias", "held_out_loss": 0.003, "held_out_uncompensated": 0.004}
    made["layers"][1] |= {"held_out_loss": 0.005, "held_out_uncompensated": 0.005}
    for layer in made["layers"][2:]:
        layer |= {"held_out_loss": None, "held_out_uncompensated": None}
    card = awq_card(made, COMMAND)
    assert "1 of 2 layers are rounded so that each column makes up for the errors of those before it" in card
    assert "held out: 0.0090 without, 0.0080 as chosen" in card
    assert "| `model.visual.blocks.0.attn.qkv` | yes | 0.00400 | 0.00300 | -25% |" in card
    assert "| `model.visual.blocks.1.attn.qkv` | no | 0.00500 | 0.00500 | +0% |" in card
    assert "## Compensation" not in awq_card(manifest(), COMMAND)


def test_bytes_are_of_the_tower_and_of_the_whole() -> None:
    card = awq_card(manifest(), COMMAND)
    assert "| vision tower | 24,000,000 | 6,360,000 |" in card
    assert "| whole | 33,000,000 | 15,360,000 |" in card


def test_the_worst_layers_are_listed_and_all_are_summed() -> None:
    card = awq_card(manifest(), COMMAND)
    rows = [line for line in card.splitlines() if line.startswith("| `model.visual.")]
    assert len(rows) == WORST
    assert rows[0] == "| `model.visual.blocks.11.attn.qkv` | 0.12000 | 0.02400 | scale+clip+bias |"
    assert "Sum over layers: 0.7800 by plain rounding, 0.1560 as chosen" in card


@pytest.mark.parametrize("path", ["builtin:nano", "/data/a: b #c", "models/[tiny]", '"quoted"', "モデル"])
def test_any_path_leaves_the_front_matter_valid(path: str) -> None:
    assert front_matter(awq_card(manifest(path=path, revision=None), COMMAND))["base_model"] == path


def test_a_source_without_a_revision_claims_none() -> None:
    assert "revision" not in awq_card(manifest(revision=None), COMMAND)


OCR = Score("ocr", "exact_match", 300, 0.95, 0.94, -0.031, 0.012, "pass")
VQA = Score("vqa", "vqa_exact", 200, 0.9, 0.92, -0.004, 0.05, "pass")


@pytest.mark.parametrize("form", FORMS)
def test_scores_take_the_place_kept_for_them_and_replace_each_other(form: str) -> None:
    card = awq_card(manifest(format=form), COMMAND)
    assert "Not evaluated yet" in card
    first = with_scores(card, [OCR])
    assert "Not evaluated yet" not in first
    assert "| ocr | exact_match | 300 | 95.00% | 94.00% | -3.10% to +1.20% | pass |" in first
    second = with_scores(first, [VQA])
    assert "ocr" not in second.split("## Scores")[1].split("## Loss")[0]
    assert "| vqa | vqa_exact | 200 | 90.00% | 92.00% | -0.40% to +5.00% | pass |" in second
    assert second == with_scores(card, [VQA])
    assert with_scores(second, [OCR, VQA]).count("| pass |") == 2
    before, after = card.split("Not evaluated yet: run `qvlopt evaluate` on this folder.")
    assert first.startswith(before)
    assert first.endswith(after)


@pytest.mark.parametrize("card", ["", "# Somebody's own card\n", "<!-- scores -->\nno end", "<!-- end of scores -->"])
def test_a_card_without_the_place_stays_as_it_is(card: str) -> None:
    assert with_scores(card, [OCR]) == card
