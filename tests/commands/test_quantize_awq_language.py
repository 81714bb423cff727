"""quantize-awq with scope vision+language: both formats are the twin, the head and the embeddings stay, every engine's rules fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from qvlopt.artifact.manifest import read_manifest
from qvlopt.commands.calibrate import calibrate
from qvlopt.commands.plan import Plan
from qvlopt.commands.quantize_awq import QuantizeResult, quantize_awq
from qvlopt.errors import RunError, UsageError
from qvlopt.model.load import load_model
from qvlopt.model.names import language_linears, vision_linears
from qvlopt.model.source import open_source
from qvlopt.model.statistics import StatisticsFiles
from tests.tiny import build_tiny
from tests.tiny_run import PLAIN, SMALL, build_set, same_bits, stored, tiny_recipe

TEXT = {**SMALL["text"], "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
LAYERS = "model.language_model.layers."


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("language")
    build_tiny(folder / "tiny", vision=SMALL["vision"], text=TEXT, tied=request.param)
    build_set(folder / "set")
    return folder


def quantised(place: Path, name: str, **section: Any) -> QuantizeResult:
    loaded = tiny_recipe(place / "tiny", place / "set", place / name, quantize_awq={"scope": "vision+language", **section})
    result = quantize_awq(loaded)
    assert isinstance(result, QuantizeResult)
    return result


def text_weights(folder: Path) -> dict[str, torch.Tensor]:
    """What an engine computes with, head included."""
    model = load_model(open_source(str(folder), folder=folder.parent), dtype=torch.float32, device="cpu")
    return {**dict(model.text.named_parameters()), "head": model.head}


def test_every_format_is_the_twin_and_only_the_scope_changes(place: Path) -> None:
    twin = quantised(place, "twin", format="bf16")
    source = open_source(str(place / "tiny"), folder=place)
    asked = {*vision_linears(source.settings.vision), *language_linears(source.settings.text)}
    for form in ("awq", "compressed-tensors"):
        result = quantised(place, form, format=form)
        assert set(result.modules_quantized) == asked
        packed, plain = text_weights(result.output), text_weights(twin.output)
        assert all(torch.equal(packed[name], plain[name]) for name in plain)
        before, after = stored(place / "tiny"), stored(result.output)
        kept = {name for name in before if name in after and same_bits(after[name], before[name])}
        assert {"model.language_model.embed_tokens.weight", "model.language_model.norm.weight", "model.visual.pos_embed.weight"} <= kept
        assert {name for name in before if "q_norm" in name or "k_norm" in name} <= kept
        assert ("lm_head.weight" in after) == ("lm_head.weight" in before)
        assert not any(f"{name}.weight" in after for name in asked)
        assert "decoder layers" in json.dumps(result.to_json()["parts"])
        check = read_manifest(result.output).check
        assert check is not None
        assert "reloaded model off by" in check.detail


def test_no_layer_is_worse_than_plain_rounding_and_parts_add_up(place: Path) -> None:
    result = quantised(place, "compensated", format="awq", search={"grid": 2, "compensate": True})
    assert all(layer.loss <= layer.rounding_loss for layer in result.layers)
    assert any("compensate" in layer.method for layer in result.layers if layer.name.startswith(LAYERS))
    tower, decoder, rest = result.parts
    assert (tower.linears + decoder.linears, rest.linears) == (len(result.layers), 0)
    assert sum(part.bytes_before for part in result.parts) == result.bytes_before
    assert sum(part.bytes_after for part in result.parts) == result.bytes_after
    assert rest.bytes_before == rest.bytes_after
    assert decoder.bytes_after < 0.5 * decoder.bytes_before
    assert decoder.loss + tower.loss == pytest.approx(sum(layer.loss for layer in result.layers))


def test_layers_may_be_kept_whole_fused_ones_together_and_the_config_names_them(place: Path) -> None:
    keep = ["lm_head", "layers.0.self_attn.*", "layers.1.mlp.down_proj"]
    result = quantised(place, "kept", keep=keep, search=PLAIN)
    kept = [f"{LAYERS}0.self_attn.{part}_proj" for part in "oqkv"] + [f"{LAYERS}1.mlp.down_proj"]
    assert set(kept) <= set(result.modules_kept)
    before, after = stored(place / "tiny"), stored(result.output)
    assert all(same_bits(after[f"{name}.weight"], before[f"{name}.weight"]) for name in kept)
    listed = json.loads((result.output / "config.json").read_text())["quantization_config"]["modules_to_not_convert"]
    for name in kept:
        assert {name, name.removeprefix("model."), name.replace("language_model.", "language_model.model.").removeprefix("model.")} <= set(listed)
    assert "model.language_model" not in listed


@pytest.mark.parametrize("pattern", ["layers.0.self_attn.q_proj", "layers.1.mlp.gate_proj"])
def test_half_of_what_engines_fuse_is_refused(place: Path, pattern: str) -> None:
    with pytest.raises(UsageError, match=rf"{pattern.replace('.', '[.]')} would stay and .* not, which engines fuse"):
        quantised(place, "half", keep=["lm_head", pattern])


def test_statistics_of_the_tower_alone_do_not_do_and_those_of_both_give_the_same_artifact(place: Path) -> None:
    narrow = calibrate(tiny_recipe(place / "tiny", place / "set", place / "narrow"))
    assert not isinstance(narrow, Plan)
    with pytest.raises(RunError, match=r"has no statistics of model\.language_model\.layers\.0"):
        quantised(place, "refused", statistics=str(narrow.output))
    wide = calibrate(tiny_recipe(place / "tiny", place / "set", place / "wide", calibrate={"scope": "vision+language"}))
    assert not isinstance(wide, Plan)
    assert f"{LAYERS}1.mlp.down_proj" in StatisticsFiles(wide.output).layers
    given, own = quantised(place, "given", statistics=str(wide.output)), quantised(place, "own")
    assert all(same_bits(tensor, stored(own.output)[name]) for name, tensor in stored(given.output).items())


def test_the_plan_says_what_each_scope_is_and_saves(place: Path) -> None:
    plan = quantize_awq(tiny_recipe(place / "tiny", place / "set", place / "plan"), dry_run=True)
    assert isinstance(plan, Plan)
    rows = {row.item: row.value for row in plan.rows}
    assert list(rows).count("scope vision") == 1
    shares = [
        int(rows[f"scope {scope}"].split("% of the checkpoint")[0].rpartition(" ")[2]) for scope in ("vision.blocks", "vision", "vision+language")
    ]
    assert shares == sorted(shares)
    assert shares[0] < shares[2]
