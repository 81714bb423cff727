"""An artifact is what was asked and nothing else: checked with safetensors' and transformers' own readers."""

from __future__ import annotations

import hashlib
import io
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file
from transformers import Qwen3VLForConditionalGeneration

from qvlopt.artifact.manifest import read_manifest, verify_files
from qvlopt.commands.quantize_awq import QuantizeResult, quantize_awq
from qvlopt.model.load_tower import load_vision
from qvlopt.model.names import Scope, vision_linears
from qvlopt.model.source import open_source
from qvlopt.quant.rounding import QuantSpec, dequantize, qparams, quantize
from tests.documents import check_document, document_of
from tests.tiny import build_tiny
from tests.tiny_run import PLAIN, SMALL, same_bits, stored, tiny_recipe

PACKED = ("qweight", "qzeros", "scales", "weight_packed", "weight_scale", "weight_shape", "weight_zero_point")


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory: pytest.TempPathFactory, model: Path, data: Path) -> dict[str, QuantizeResult]:
    """The same recipe in all formats."""
    root = tmp_path_factory.mktemp("artifacts")
    return {form: quantised(model, data, root / form, format=form) for form in ("awq", "compressed-tensors", "bf16")}


def quantised(model: Path, data: Path, output: Path, **section: Any) -> QuantizeResult:
    result = quantize_awq(tiny_recipe(model, data, output, quantize_awq=section))
    assert isinstance(result, QuantizeResult)
    return result


def tower(folder: Path) -> dict[str, torch.Tensor]:
    return dict(load_vision(open_source(str(folder), folder=folder), dtype=torch.float32, device="cpu").weights)


def linears(folder: Path, scope: Scope = "vision") -> set[str]:
    return set(vision_linears(open_source(str(folder), folder=folder).settings.vision, scope))


def check_artifact(result: QuantizeResult, source: Path, intended: set[str], *, dtype: torch.dtype | None = None) -> None:
    """Claims that hold for every artifact: names, bytes outside the scope, other files, config, manifest, JSON."""
    before, after = stored(source), stored(result.output)
    assert set(result.modules_quantized) == intended
    assert {name.rpartition(".")[0] for name in after if name.endswith(PACKED)} == (intended if result.format != "bf16" else set())
    if result.format != "bf16":
        assert not any(f"{name}.weight" in after for name in intended)
    for name, tensor in before.items():
        module_name = name.rpartition(".")[0]
        if module_name not in intended and ".norm" not in name:
            assert same_bits(after[name], tensor if dtype is None else tensor.to(dtype)), name
    for path in source.iterdir():
        if path.name != "config.json" and "safetensors" not in path.name:
            assert (result.output / path.name).read_bytes() == path.read_bytes()
    manifest = read_manifest(result.output)
    assert verify_files(result.output) == []
    assert set(manifest.files) == {path.name for path in result.output.iterdir()} - {"qvlopt.json"}
    assert {module.name for module in manifest.modules} == {name.rpartition(".")[0] for name in before}
    for record in manifest.modules:
        assert (record.sha256_after, record.bytes_after) == digest_and_bytes(after, record.name)
        assert (record.sha256_before, record.bytes_before) == digest_and_bytes(before, record.name)
    assert result.check.passed
    assert all(layer.loss <= layer.rounding_loss for layer in result.layers)
    check_document(document_of("quantize-awq", result.to_json()))


def digest_and_bytes(tensors: dict[str, torch.Tensor], module_name: str) -> tuple[str, int]:
    parts = [tensors[name].contiguous().view(torch.uint8).numpy().tobytes() for name in sorted(tensors) if name.rpartition(".")[0] == module_name]
    return hashlib.sha256(b"".join(parts)).hexdigest(), sum(map(len, parts))


def config_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return found


@pytest.mark.parametrize("form", ["awq", "compressed-tensors", "bf16"])
def test_every_format_changes_the_towers_linears_and_nothing_else(model: Path, artifacts: dict[str, QuantizeResult], form: str) -> None:
    check_artifact(artifacts[form], model, linears(model))
    config = config_of(artifacts[form].output)
    assert (config.pop("quantization_config", None) is not None) == (form != "bf16")
    assert config == config_of(model)
    card = (artifacts[form].output / "README.md").read_text(encoding="utf-8")
    assert "vllm serve" in card
    assert ("Not SGLang" in card) == (form != "bf16")


def test_the_formats_are_the_same_weights(artifacts: dict[str, QuantizeResult]) -> None:
    expected = tower(artifacts["bf16"].output)
    for form in ("awq", "compressed-tensors"):
        got = tower(artifacts[form].output)
        assert all(torch.equal(got[name], weight) for name, weight in expected.items())
    losses = {form: [layer.loss for layer in result.layers] for form, result in artifacts.items()}
    assert losses["awq"] == losses["bf16"] == losses["compressed-tensors"]


def test_a_packed_tower_is_smaller_and_the_numbers_are_of_the_files(model: Path, artifacts: dict[str, QuantizeResult]) -> None:
    for result in artifacts.values():
        assert result.bytes_before == sum(tensor.nbytes for tensor in stored(model).values())
        assert result.bytes_after == sum(tensor.nbytes for tensor in stored(result.output).values())
        assert result.vision_bytes_before - result.vision_bytes_after == result.bytes_before - result.bytes_after
    assert artifacts["bf16"].bytes_after == artifacts["bf16"].bytes_before
    assert artifacts["awq"].vision_bytes_after < 0.5 * artifacts["awq"].vision_bytes_before


def test_searching_pays_and_rounding_loss_is_plain_roundings(model: Path, data: Path, artifacts: dict[str, QuantizeResult], tmp_path: Path) -> None:
    plain = quantised(model, data, tmp_path, format="bf16", search=PLAIN)
    searched = artifacts["bf16"]
    assert [layer.rounding_loss for layer in searched.layers] == [layer.loss for layer in plain.layers]
    assert sum(layer.loss for layer in searched.layers) < 0.5 * sum(layer.rounding_loss for layer in searched.layers)
    assert searched.check.worst is not None
    assert plain.check.worst is not None
    assert searched.check.worst < plain.check.worst


@pytest.mark.parametrize(("form", "bits"), [("awq", 4), ("compressed-tensors", 8), ("bf16", 3)])
def test_plain_rounding_rounds_the_sources_weights_and_leaves_norms_and_biases(model: Path, data: Path, tmp_path: Path, form: str, bits: int) -> None:
    result = quantised(model, data, tmp_path, format=form, bits=bits, search=PLAIN)
    check_artifact(result, model, linears(model))
    before, after, weights = stored(model), stored(result.output), tower(result.output)
    for name, tensor in before.items():
        if name.endswith(".bias") or "norm" in name:
            assert same_bits(after[name], tensor)
    spec = QuantSpec(bits, 64)
    for name in linears(model):
        source = before[f"{name}.weight"].float()
        qp = qparams(source, spec)
        expected = dequantize(quantize(source, qp, spec), qp, spec).bfloat16().float()
        assert torch.equal(weights[f"{name.removeprefix('model.visual.')}.weight"], expected)
    assert {layer.method for layer in result.layers} == {"rounding"}


def loaded_by_transformers(folder: Path) -> Qwen3VLForConditionalGeneration:
    loaded, info = Qwen3VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not any(info.values()), info
    return loaded


def outputs_of(loaded: Qwen3VLForConditionalGeneration, pixels: torch.Tensor, grid: tuple[int, int]) -> list[torch.Tensor]:
    with torch.inference_mode():
        output = loaded.model.visual(pixels, grid_thw=torch.tensor([[1, *grid]]))
    return [output.pooler_output, *output.deepstack_features]


def test_transformers_loads_the_bf16_twin_as_our_tower(artifacts: dict[str, QuantizeResult]) -> None:
    folder = artifacts["bf16"].output
    ours = load_vision(open_source(str(folder), folder=folder), dtype=torch.float32, device="cpu")
    pixels = torch.randn(24, ours.config.patch_dim, generator=torch.Generator().manual_seed(0))
    expected = outputs_of(loaded_by_transformers(folder), pixels, (4, 6))
    got = ours(pixels[None], (4, 6))
    for mine, theirs in zip((got.merged, *got.deepstack), expected, strict=True):
        assert float((mine[0] - theirs).norm() / theirs.norm()) < 1e-5


@pytest.mark.parametrize("form", ["awq", "bf16"])
def test_old_prefixes_become_those_of_engines(model: Path, data: Path, artifacts: dict[str, QuantizeResult], tmp_path: Path, form: str) -> None:
    old = build_tiny(tmp_path / "old", old_prefix=True, **SMALL)
    result = quantised(old, data, tmp_path / "out", format=form)
    assert set(result.modules_quantized) == linears(model)
    got, expected = stored(result.output), stored(artifacts[form].output)
    assert set(got) == set(expected)
    assert all(same_bits(got[name], tensor) for name, tensor in expected.items())
    if form == "bf16":
        loaded_by_transformers(result.output)


@pytest.mark.parametrize(("tied", "shards"), [(True, 3), (False, 1), (False, 3)])
def test_ties_and_shards_of_the_source_do_not_matter(
    data: Path, artifacts: dict[str, QuantizeResult], tmp_path: Path, tied: bool, shards: int
) -> None:
    source = build_tiny(tmp_path / "source", tied=tied, shards=shards, **SMALL)
    result = quantised(source, data, tmp_path / "out")
    check_artifact(result, source, linears(source))
    got, expected = stored(result.output), stored(artifacts["awq"].output)
    assert set(got) - set(expected) == (set() if tied else {"lm_head.weight"})
    assert all(same_bits(got[name], tensor) for name, tensor in expected.items())
    assert not (result.output / "model.safetensors.index.json").exists()


@pytest.mark.parametrize(("form", "bits"), [("awq", 4), ("compressed-tensors", 4), ("compressed-tensors", 8), ("bf16", 5)])
@pytest.mark.parametrize("dtype", ["source", "float16"])
def test_scope_blocks_leaves_the_mergers_in_16_bits(model: Path, data: Path, tmp_path: Path, form: str, bits: int, dtype: str) -> None:
    result = quantised(model, data, tmp_path, scope="vision.blocks", format=form, bits=bits, dtype=dtype)
    check_artifact(result, model, linears(model, "vision.blocks"), dtype=None if dtype == "source" else torch.float16)
    before, after = stored(model), stored(result.output)
    mergers = [name for name in before if "merger" in name]
    assert all(same_bits(after[name], before[name] if dtype == "source" else before[name].half()) for name in mergers)


def test_a_symmetric_compressed_artifact_has_no_zero_points(model: Path, data: Path, tmp_path: Path) -> None:
    result = quantised(model, data, tmp_path, format="compressed-tensors", zero_point=False, search=PLAIN)
    assert not any("zero_point" in name for name in stored(result.output))
    (group,) = config_of(result.output)["quantization_config"]["config_groups"].values()
    assert group["weights"]["symmetric"] is True


@pytest.mark.parametrize("form", ["awq", "compressed-tensors", "bf16"])
def test_a_float16_artifact_is_float16_throughout(model: Path, data: Path, tmp_path: Path, form: str) -> None:
    result = quantised(model, data, tmp_path, format=form, dtype="float16")
    check_artifact(result, model, linears(model), dtype=torch.float16)
    assert {tensor.dtype for tensor in stored(result.output).values()} <= {torch.float16, torch.int32, torch.int64}
    config = config_of(result.output)
    assert (config["dtype"], config["text_config"]["dtype"]) == ("float16", "float16")
    assert "cast to float16" in (result.output / "README.md").read_text(encoding="utf-8")
    assert "as float16" in result.check.detail


def test_float16_formats_are_the_same_weights_too(model: Path, data: Path, tmp_path: Path) -> None:
    towers = [tower(quantised(model, data, tmp_path / form, format=form, dtype="float16").output) for form in ("bf16", "awq", "compressed-tensors")]
    assert all(torch.equal(other[name], weight) for name, weight in towers[0].items() for other in towers[1:])


KEPT = "model.visual.blocks.0.attn.proj"


@pytest.mark.parametrize("form", ["awq", "compressed-tensors"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_kept_linear_keeps_its_bytes_and_is_listed_for_every_engine(data: Path, tmp_path: Path, form: str, tied: bool) -> None:
    source = build_tiny(tmp_path / "source", tied=tied, **SMALL)
    result = quantised(source, data, tmp_path / "out", format=form, keep=["lm_head", "blocks.0.attn.proj"])
    check_artifact(result, source, linears(source) - {KEPT})
    before, after = stored(source), stored(result.output)
    assert all(same_bits(after[f"{KEPT}.{part}"], before[f"{KEPT}.{part}"]) for part in ("weight", "bias"))
    config = config_of(result.output)["quantization_config"]
    if form == "awq":
        assert {KEPT, KEPT.removeprefix("model."), "lm_head"} <= set(config["modules_to_not_convert"])
    else:
        assert r"re:.*visual\.blocks\.0\.attn\.proj$" in config["ignore"]
        assert "lm_head" in config["ignore"]
    assert KEPT in result.modules_kept


def test_the_same_inputs_give_the_same_bytes_in_any_folder(model: Path, data: Path, artifacts: dict[str, QuantizeResult], tmp_path: Path) -> None:
    first, second = artifacts["awq"].output, quantised(model, data, tmp_path / "elsewhere").output
    assert {path.name for path in first.iterdir()} == {path.name for path in second.iterdir()}
    for path in first.iterdir():
        if path.name != "qvlopt.json":
            assert (second / path.name).read_bytes() == path.read_bytes(), path.name
    manifests = [read_manifest(folder) for folder in (first, second)]
    places = [{"recipe": m.recipe | {"output": ""}, "seconds": 0.0, "peak_rss_bytes": 0} for m in manifests]
    assert manifests[0].model_copy(update=places[0]) == manifests[1].model_copy(update=places[1])


def test_the_manifest_says_what_it_was_made_of(model: Path, artifacts: dict[str, QuantizeResult]) -> None:
    manifest = read_manifest(artifacts["awq"].output)
    assert manifest.source is not None
    assert manifest.source.digest == open_source(str(model), folder=model).digest
    assert [parent.kind for parent in manifest.parents] == ["statistics"]
    assert manifest.parents[0].digest == read_manifest(artifacts["bf16"].output).parents[0].digest
    assert manifest.coverage is not None
    assert set(manifest.coverage["tokens_per_layer"]) == linears(model)
    assert set(manifest.changes) == {"README.md", "config.json"}
    assert set(read_manifest(artifacts["bf16"].output).changes) == {"README.md"}
    assert {"torch", "transformers", "qvlopt"} <= set(manifest.versions)
    assert manifest.seconds > 0
    assert manifest.peak_rss_bytes > 0


def test_odd_layers_are_skipped_where_asked_and_the_artifact_loads(data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    odd = build_tiny(tmp_path / "odd", vision={**SMALL["vision"], "intermediate_size": 96}, text=SMALL["text"])
    skipped = {f"model.visual.blocks.{index}.mlp.linear_fc2" for index in range(2)}
    with caplog.at_level(logging.WARNING):
        result = quantised(odd, data, tmp_path / "out", on_indivisible="skip")
    check_artifact(result, odd, linears(odd) - skipped)
    assert {message for message in caplog.messages if "stays as it is" in message} == {f"{n} stays as it is: input width 96" for n in skipped}
    assert skipped <= set(config_of(result.output)["quantization_config"]["modules_to_not_convert"])
    assert len(tower(result.output)) == len(tower(odd))


@pytest.fixture
def dead(tmp_path: Path) -> Path:
    """A checkpoint with a constant norm channel, an input channel and a group of zero weights, and a row of them."""
    folder = build_tiny(tmp_path / "dead", **SMALL)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.visual.blocks.0.norm1.weight"][5] = 0
    tensors["model.visual.blocks.0.norm1.bias"][5] = 0
    tensors["model.visual.blocks.0.mlp.linear_fc1.weight"][:, 9] = 0
    tensors["model.visual.blocks.0.mlp.linear_fc2.weight"][:, 64:] = 0
    tensors["model.visual.blocks.1.attn.qkv.weight"][7] = 0
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("dtype", ["source", "float16"])
def test_dead_channels_groups_and_rows_stay_finite_and_zero(dead: Path, data: Path, tmp_path: Path, dtype: str) -> None:
    result = quantised(dead, data, tmp_path / "out", dtype=dtype)
    before, after = tower(dead), tower(result.output)
    for name in linears(dead):
        short = f"{name.removeprefix('model.visual.')}.weight"
        assert bool((after[short][before[short] == 0] == 0).all())
    assert all(bool(torch.isfinite(tensor.float()).all()) for tensor in stored(result.output).values())
    assert float(after["blocks.0.norm1.weight"][5]) == 0


def test_the_table_shows_sizes_losses_and_the_path(artifacts: dict[str, QuantizeResult]) -> None:
    console = Console(file=io.StringIO(), width=120)
    artifacts["awq"].render(console)
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert f"{artifacts['awq'].vision_bytes_after:,}" in text
    assert f"{len(artifacts['awq'].modules_quantized)} linears quantised" in text
    assert f"artifact: {artifacts['awq'].output}" in text
