"""INT8 artifacts: three layouts of one checkpoint, each layer's error measured, checked before they get their name."""

from __future__ import annotations

import io
import json
import logging
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from rich.console import Console

from qvlopt.artifact.manifest import Manifest, read_manifest, verify_files
from qvlopt.artifact.tensors import TensorFiles
from qvlopt.commands.calibration_data import Asked, in_seeded_order
from qvlopt.commands.graphs_result import GraphsResult
from qvlopt.commands.inspect import inspect
from qvlopt.commands.int8_prompts import held_out_prompts
from qvlopt.commands.plan import Plan
from qvlopt.commands.quantize_int8 import quantize_int8
from qvlopt.errors import RunError, UsageError
from qvlopt.graphs import names, saturation
from qvlopt.graphs.rounding import Rows, round_blocks, round_rows
from qvlopt.graphs.saturation import saturates, saturating_product
from qvlopt.graphs.tables import EmbeddingRows
from qvlopt.graphs.weights import weights_of
from qvlopt.graphs.writer import GraphWriter
from qvlopt.model.names import vision_linears
from qvlopt.model.prompt import Prompter
from qvlopt.model.shapes import EMBEDDING
from qvlopt.model.source import open_source
from tests.documents import check_document, document_of
from tests.tiny import build_tiny
from tests.tiny_run import SMALL, build_set, listing, row, tiny_recipe, with_first_value

LOOSE = {"max_layer_error": 0.2}


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory: pytest.TempPathFactory, model: Path, data: Path) -> dict[str, GraphsResult]:
    root = tmp_path_factory.mktemp("artifacts")
    return {layout: quantised(model, data, root / layout, layout=layout, **LOOSE) for layout in ("int8", "fast", "small")}


def quantised(model: Path, data: Path, output: Path, **section: Any) -> GraphsResult:
    result = quantize_int8(tiny_recipe(model, data, output, quantize_int8=section, calibrate={"samples": 4}))
    assert isinstance(result, GraphsResult)
    return result


def test_room_for_the_hidden_states_is_asked_for_too(model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def full(_output: Path, size: int) -> None:
        asked.append(size)
        raise RunError("the disk is full")

    monkeypatch.setattr("qvlopt.commands.quantize_int8.require_space", full)
    monkeypatch.setattr("qvlopt.commands.quantize_int8.hidden_bytes", lambda *_: 10**12)
    for smooth in (True, False):
        with pytest.raises(RunError, match="the disk is full"):
            quantised(model, data, tmp_path / "out", smooth=smooth)
    assert asked[0] == 10**12
    assert 0 < asked[1] < 10**9


def operators(folder: Path, graph: str) -> dict[str, int]:
    nodes = onnx.load(str(folder / graph), load_external_data=False).graph.node
    kinds = ("MatMulIntegerToFloat", "MatMulNBits", "Gemm")
    return {kind: sum(node.op_type == kind for node in nodes) for kind in kinds}


def test_every_layout_is_checked_and_says_what_each_layer_costs(model: Path, artifacts: dict[str, GraphsResult]) -> None:
    vision = open_source(str(model), folder=model).settings.vision
    for layout, result in artifacts.items():
        assert verify_files(result.output) == []
        assert result.check.passed
        assert "top-1 agreement" in result.check.detail
        assert "deepstack.0" in result.check.detail
        found = [layer.name for layer in result.layers]
        assert len(found) == len(vision_linears(vision)) + 8 * (2 if layout == "fast" else 1)
        assert all(0 < layer.loss < 0.2 for layer in result.layers)
        for joined in ("q_proj k_proj v_proj", "gate_proj up_proj", *{layer.name.rpartition(".")[2] for layer in result.layers}):
            own = [layer for layer in result.layers if layer.name.rpartition(".")[2] in joined.split() and "shares its buffers" not in layer.method]
            if joined not in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"):  # layers that share an input win or lose together
                assert sum(layer.loss**2 for layer in own) <= sum(layer.rounding_loss**2 for layer in own) * 1.0001
        card = (result.output / "README.md").read_text(encoding="utf-8")
        assert f"layout {layout}" in card
        _, _, table = card.partition("<details>")
        assert [line.split("`")[1] for line in table.splitlines() if line.startswith("| `")] == found
        check_document(document_of("quantize-int8", result.to_json()))


def test_people_see_the_worst_layers_and_where_the_others_are(artifacts: dict[str, GraphsResult]) -> None:
    result = artifacts["int8"]
    console = Console(file=io.StringIO(), width=200)
    result.render(console)
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    worst = sorted(result.layers, key=lambda layer: -layer.loss)
    shown = [next(i for i, line in enumerate(lines) if f" {layer.name} " in line) for layer in worst[:5]]
    assert shown == sorted(shown)
    assert all(f"{layer.loss:.4f}" in lines[place] for layer, place in zip(worst, shown, strict=False))
    assert f"{len(result.layers)} layers in integers, 0 in float32; every one is in README.md and qvlopt.json" in lines


def test_held_out_samples_without_a_picture_alone_are_no_check(model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [row(0), row(1), row(2), row(6, images=[])]
    asked = Asked.by(tiny_recipe(model, build_set(tmp_path / "set", rows=rows), tmp_path / "out", calibrate={"samples": 3}))
    assert not in_seeded_order(asked.flight.usable, 0)[-1].images, "the text is what is held out"
    prompts = held_out_prompts(asked, Prompter.from_folder(model))
    assert [len(prompt.pictures) for prompt in prompts] == [1, 1, 1, 0]
    assert "has no pictures besides those calibrated on" in caplog.text


def test_the_layouts_are_made_of_the_operators_they_promise(artifacts: dict[str, GraphsResult]) -> None:
    for result in artifacts.values():
        assert operators(result.output, names.VISION_GRAPH) == {"MatMulIntegerToFloat": 16, "MatMulNBits": 0, "Gemm": 1}
    for layout, graph, rows in (("int8", names.DECODER_GRAPH, 7), ("fast", names.DECODER_GRAPH, 7), ("fast", names.DECODE_GRAPH, 0)):
        assert operators(artifacts[layout].output, graph) == {"MatMulIntegerToFloat": rows, "MatMulNBits": 8 - rows, "Gemm": 0}
    assert operators(artifacts["small"].output, names.DECODER_GRAPH) == {"MatMulIntegerToFloat": 0, "MatMulNBits": 8, "Gemm": 0}
    assert not (artifacts["int8"].output / names.DECODE_GRAPH).exists()


def test_sizes_are_counted_and_the_head_costs_nothing_beside_the_embedding(artifacts: dict[str, GraphsResult]) -> None:
    sizes = {layout: result.to_json()["bytes_after"] for layout, result in artifacts.items()}
    assert sizes["small"] < sizes["int8"] < sizes["fast"]
    for result in artifacts.values():
        stored = sum(path.stat().st_size for path in result.output.iterdir() if path.name.endswith((".data", ".safetensors")))
        assert 0.85 * stored < result.to_json()["bytes_after"] <= stored
        records = {record.name: record for record in result.modules}
        assert (records["lm_head"].dtype_after, records["lm_head"].bytes_after) == ("INT8 g64", 0)
        assert records["model.language_model.embed_tokens"].dtype_after == "INT8 g64"
        assert "model.visual.patch_embed.proj" not in result.to_json()["modules_quantized"]
        assert records["model.visual.patch_embed.proj"].dtype_after == "F32"
    twin = {record.name: record.dtype_after for record in artifacts["fast"].modules}
    assert twin["model.language_model.layers.0.mlp.up_proj"] == "INT8 channel and INT4 g64"


def test_head_and_embedding_are_the_same_bytes(model: Path, artifacts: dict[str, GraphsResult]) -> None:
    embedding = weights_of(open_source(str(model), folder=model))(EMBEDDING).float()
    for result in artifacts.values():
        rows = EmbeddingRows(result.output).rows(range(len(embedding)))
        expected = round_blocks(embedding, bits=8, block=64).value().numpy()
        assert np.abs(rows - expected).max() < 1e-6
        entry = TensorFiles.open(result.output, weights=names.TABLES).entry(names.EMBED_TABLE)
        for graph in result.output.glob("deco*.onnx"):
            tensors = {tensor.name: tensor for tensor in onnx.load(str(graph), load_external_data=False).graph.initializer}
            place = {item.key: item.value for item in tensors["lm_head.weight"].external_data}
            assert place == {"location": names.TABLES, "offset": str(entry.start), "length": str(entry.nbytes)}


def test_inspect_lists_every_layer_as_it_is_stored(model: Path, artifacts: dict[str, GraphsResult]) -> None:
    shapes = {row.name: row.shape for row in inspect(model).modules}
    for layout, result in artifacts.items():
        shown = inspect(result.output)
        rows = {row.name: row for row in shown.modules}
        assert {name: (row.dtype, row.bytes) for name, row in rows.items()} == {m.name: (m.dtype_after, m.bytes_after) for m in result.modules}
        assert {name: row.shape for name, row in rows.items() if name != "lm_head"} == shapes
        assert rows["lm_head"].shape == shapes["model.language_model.embed_tokens"]
        assert all(row.sha256 for row in rows.values() if row.bytes)
        scheme = {"int8": "INT8 channel", "fast": "INT8 channel and INT4 g64", "small": "INT4 g64"}[layout]
        assert rows["model.language_model.layers.0.mlp.down_proj"].dtype == scheme
        assert rows["model.visual.blocks.0.attn.qkv"][1:4] == ("INT8 channel", (192, 64), 192 * 64 + 4 * 192 + 4 * 192)
        check_document(document_of("inspect", shown.to_json()))
        assert shown.totals["bytes"] == result.to_json()["bytes_after"]
        assert shown.totals["vision_bytes"] == result.to_json()["vision_bytes_after"]


def test_inspect_tells_layers_apart_by_their_bytes(artifacts: dict[str, GraphsResult], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(artifacts["fast"].output, tmp_path / "copy"))
    before = {row.name: row.sha256 for row in inspect(folder).modules}
    layer = "model.language_model.layers.0.mlp.up_proj"
    tensors = {t.name: t for t in onnx.load(str(folder / names.DECODE_GRAPH), load_external_data=False).graph.initializer}
    offset = next(int(item.value) for item in tensors[f"{layer}.weight"].external_data if item.key == "offset")
    with open(folder / names.data_file(names.DECODE_GRAPH), "r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 1]))
    after = {row.name: row.sha256 for row in inspect(folder).modules}
    assert {name for name in before if before[name] != after[name]} == {layer}
    (folder / names.DECODE_GRAPH).write_bytes(b"no graph")
    with pytest.raises(RunError, match=r"decode\.onnx is not an ONNX graph"):
        inspect(folder)


def test_an_untied_head_is_stored_once_for_both_graphs(data: Path, tmp_path: Path) -> None:
    model = build_tiny(tmp_path / "tiny", tied=False, **SMALL)
    result = quantised(model, data, tmp_path / "out", layout="fast", **LOOSE)
    tensors = {t.name: t for t in onnx.load(str(result.output / names.DECODE_GRAPH), load_external_data=False).graph.initializer}
    place = {item.key: item.value for item in tensors["lm_head.weight"].external_data}
    assert place["location"] == names.data_file(names.DECODER_GRAPH)
    records = {record.name: record.dtype_after for record in result.modules}
    assert records["model.language_model.embed_tokens"] == "BF16"
    assert result.check.passed


def test_a_layer_over_the_limit_stays_float32_and_is_named(
    model: Path, data: Path, tmp_path: Path, artifacts: dict[str, GraphsResult], caplog: pytest.LogCaptureFixture
) -> None:
    losses = sorted(layer.loss for layer in artifacts["int8"].layers)
    limit = (losses[-1] + losses[-2]) / 2
    worst = max(artifacts["int8"].layers, key=lambda layer: layer.loss).name
    with caplog.at_level(logging.WARNING):
        result = quantised(model, data, tmp_path / "out", max_layer_error=limit)
    floats = [layer.name for layer in result.layers if layer.method.startswith("float32")]
    assert floats == [worst]
    assert worst in caplog.text
    assert worst not in result.to_json()["modules_quantized"]
    assert next(record.dtype_after for record in result.modules if record.name == worst) == "F32"


def test_kept_layers_are_float32_and_a_pattern_must_match(model: Path, data: Path, tmp_path: Path) -> None:
    result = quantised(model, data, tmp_path / "out", keep=["merger*", "lm_head"], **LOOSE)
    kept = [layer.name for layer in result.layers if layer.method == "float32, kept"]
    assert kept
    assert all("merger" in name or name == "lm_head" for name in kept)
    assert "lm_head" in kept
    with pytest.raises(UsageError, match=r"keep: nothing\.\* matches no linear layer"):
        quantised(model, data, tmp_path / "other", keep=["nothing.*"])


def test_smoothing_is_off_when_it_is_not_wanted(model: Path, data: Path, tmp_path: Path, artifacts: dict[str, GraphsResult]) -> None:
    assert any("smoothed" in layer.method for layer in artifacts["int8"].layers)
    result = quantised(model, data, tmp_path / "out", smooth=False, **LOOSE)
    assert not any("smoothed" in layer.method for layer in result.layers)
    plain = {layer.name: layer.rounding_loss for layer in artifacts["int8"].layers}
    assert all(layer.loss == layer.rounding_loss == pytest.approx(plain[layer.name], rel=1e-6) for layer in result.layers)


def test_no_float32_copy_is_ever_written(model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, torch.dtype, int]] = []
    weight = GraphWriter.weight

    def watched(self: Any, name: str, tensor: torch.Tensor) -> str:
        seen.append((name, tensor.dtype, tensor.ndim))
        return str(weight(self, name, tensor))

    monkeypatch.setattr("qvlopt.graphs.writer.GraphWriter.weight", watched)
    quantised(model, data, tmp_path / "out", **LOOSE)
    matrices = {name: dtype for name, dtype, rank in seen if rank > 1 and name.endswith(".weight")}
    assert {name for name, dtype in matrices.items() if dtype.is_floating_point} == {"model.visual.patch_embed.proj.weight"}


def test_a_processor_that_saturates_gets_seven_bits(
    model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    saturates.cache_clear()
    monkeypatch.setattr(saturation, "_product", saturating_product)
    try:
        with caplog.at_level(logging.WARNING):
            result = quantised(model, data, tmp_path / "out", **LOOSE)
    finally:
        saturates.cache_clear()
    assert "keep 7 bits" in caplog.text
    rows = [layer for layer in result.layers if layer.method.startswith("W8A8")]
    assert rows
    assert all(layer.method.startswith("W8A8 of 7 bits") for layer in rows)
    weights = onnx.load(str(result.output / names.VISION_GRAPH)).graph.initializer
    integers = [onnx.numpy_helper.to_array(tensor) for tensor in weights if tensor.data_type == onnx.TensorProto.INT8]
    assert max(int(np.abs(value.astype(int)).max()) for value in integers) == 63


def test_broken_graphs_get_no_name(model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qvlopt.graphs.quantised.round_rows", lambda weight, *, largest: _upside_down(weight, largest))
    with pytest.raises(RunError, match="self-check failed: the tower's"):
        quantised(model, data, tmp_path / "out", **LOOSE)
    assert list(tmp_path.iterdir()) == []


def _upside_down(weight: torch.Tensor, largest: int) -> Rows:
    rounded = round_rows(weight, largest=largest)
    return rounded._replace(q=-rounded.q.flip(0))


def test_the_same_again_is_nothing_to_do_and_gives_the_same_bytes(
    model: Path, data: Path, tmp_path: Path, artifacts: dict[str, GraphsResult]
) -> None:
    first = quantised(model, data, tmp_path / "out", **LOOSE)
    before = listing(first.output)
    assert quantised(model, data, tmp_path / "out", **LOOSE).existed
    assert listing(first.output) == before
    ours, theirs = (read_manifest(folder).files for folder in (first.output, artifacts["int8"].output))
    assert {name: record for name, record in ours.items() if name != "README.md"} == {k: v for k, v in theirs.items() if k != "README.md"}
    with pytest.raises(UsageError, match="holds another result"):
        quantised(model, data, tmp_path / "out", layout="small", **LOOSE)


def test_statistics_of_another_model_are_refused(model: Path, data: Path, tmp_path: Path) -> None:
    other = tmp_path / "statistics"
    other.mkdir()
    manifest = Manifest(kind="statistics", digest="0", recipe={})
    (other / "qvlopt.json").write_text(manifest.model_dump_json(), encoding="utf-8")
    with pytest.raises(RunError, match="was not calibrated on this source"):
        quantised(model, data, tmp_path / "out", statistics=str(other))
    with pytest.raises(RunError, match="there is no folder"):
        quantised(model, data, tmp_path / "out", statistics="nowhere")


def test_a_damaged_weight_is_named_and_nothing_is_left(data: Path, tmp_path: Path) -> None:
    model = with_first_value(build_tiny(tmp_path / "tiny", **SMALL), {"model.language_model.layers.0.mlp.up_proj.weight": float("inf")})
    with pytest.raises(RunError, match=r"up_proj\.weight holds NaN or infinity"):
        quantised(model, data, tmp_path / "out" / "deep")
    assert not (tmp_path / "out").exists()


def test_the_plan_knows_the_size(model: Path, data: Path, tmp_path: Path, artifacts: dict[str, GraphsResult]) -> None:
    for layout, result in artifacts.items():
        plan = quantize_int8(tiny_recipe(model, data, tmp_path / "out", quantize_int8={"layout": layout}), dry_run=True)
        assert isinstance(plan, Plan)
        said = int(re.search(r"about ([\d,]+) bytes", dict(plan.rows)["writes"])[1].replace(",", ""))  # type: ignore[index]
        assert said == pytest.approx(result.to_json()["bytes_after"], rel=0.1)


def test_a_dry_run_plans_and_writes_nothing(model: Path, data: Path, tmp_path: Path) -> None:
    plan = quantize_int8(tiny_recipe(model, data, tmp_path / "out"), dry_run=True)
    assert isinstance(plan, Plan)
    rows = dict(plan.rows)
    assert rows["quantises"].startswith("20 linears into layout int8")
    assert list(tmp_path.iterdir()) == []
    check_document(document_of("quantize-int8", json.loads(json.dumps(plan.to_json()))))
