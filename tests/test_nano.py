"""The built-in checkpoint is what it says: the true architecture, small, trained, and it reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from qvlopt import api
from qvlopt.artifact.tensors import TensorFiles
from qvlopt.model.names import vision_linears
from qvlopt.model.prompt import Prompter
from qvlopt.model.source import open_source
from qvlopt.recipe.shipped import builtin

FOLDER = builtin("builtin:nano", "assets")
SPECIAL = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>", "<|box_end|>",
    "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>",
)  # fmt: skip
"""Qwen's special tokens in the order of its vocabulary."""
READS = {"ocr": 0.80, "vqa": 0.80, "doc": 0.80}
"""Well below its scores on all of nano-eval (docs/nano.md): what a broken path would miss by far."""


def config() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((FOLDER / "config.json").read_text(encoding="utf-8"))
    return loaded


def test_it_has_every_organ_of_the_2b() -> None:
    vision, text = config()["vision_config"], config()["text_config"]
    assert (vision["patch_size"], vision["temporal_patch_size"], vision["spatial_merge_size"]) == (16, 2, 2)
    assert vision["depth"] >= 6
    assert len(vision["deepstack_visual_indexes"]) == 3
    assert max(vision["deepstack_visual_indexes"]) < vision["depth"]
    assert text["num_attention_heads"] > text["num_key_value_heads"]
    assert text["rope_scaling"]["mrope_interleaved"]
    assert len(text["rope_scaling"]["mrope_section"]) == 3
    assert config()["tie_word_embeddings"]
    assert {text["head_dim"], vision["hidden_size"] // vision["num_heads"]} == {64}


def test_every_width_of_a_linear_is_a_multiple_of_128() -> None:
    source = open_source("builtin:nano", folder=Path.cwd())
    shapes = [source.tensors.entry(source.names[f"{name}.weight"]).shape for name in vision_linears(source.settings.vision)]
    assert {size % 128 for shape in shapes for size in shape} == {0}


def test_it_is_small_and_in_bf16() -> None:
    entries = TensorFiles.open(FOLDER).entries.values()
    assert {entry.dtype for entry in entries} == {"BF16"}
    assert 4e6 <= sum(entry.nbytes // 2 for entry in entries) <= 8e6
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) < 16e6


def test_its_tokenizer_has_qwens_special_tokens_and_one_token_a_letter() -> None:
    prompter = Prompter.from_folder(FOLDER)
    tokenizer = json.loads((FOLDER / "tokenizer.json").read_text(encoding="utf-8"))
    special = [token["content"] for token in sorted(tokenizer["added_tokens"], key=lambda token: token["id"]) if token["special"]]
    assert tuple(special) == SPECIAL
    plain, longer = len(prompter.encode("TOTAL 12.50", [])), len(prompter.encode("TOTALX 12.504", []))
    assert longer == plain + 2


def test_its_card_says_that_these_are_not_qwens_weights() -> None:
    card = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert "not Qwen's weights" in card
    assert "license: apache-2.0" in card


@pytest.mark.slow
def test_it_reads_pictures_that_it_was_not_trained_on(tmp_path: Path) -> None:
    evaluate = {"limit": 40, "batch": 20}
    report = api.evaluate("demo", ["model"], output=str(tmp_path / "reads"), evaluate=evaluate).to_json()
    scores = {metric["name"]: metric["candidate"] for metric in report["results"][0]["metrics"] if metric["primary"]}
    assert scores.keys() == READS.keys()
    assert {name for name, score in scores.items() if score < READS[name]} == set()


@pytest.mark.slow
def test_the_demo_quantises_it_and_compares(tmp_path: Path) -> None:
    evaluate = {"limit": 12, "gate.on_inconclusive": "pass"}
    bench = {"images": ["64x64"], "prompt_tokens": 16, "new_tokens": 2, "repeats": 1, "warmup": 0}
    result = api.run("demo", output=str(tmp_path / "demo"), evaluate=evaluate, bench=bench)
    document = result.to_json()
    assert [step["command"] for step in document["steps"]] == ["calibrate", "quantize-awq", "evaluate", "bench"]
    assert result.exit_code == 0
    again = api.run("demo", output=str(tmp_path / "demo"), evaluate=evaluate, bench=bench).to_json()
    assert [step["status"] for step in again["steps"]][:2] == ["existed", "existed"]
    assert "| ocr | exact_match | 12 |" in (tmp_path / "demo" / "awq" / "README.md").read_text(encoding="utf-8")
