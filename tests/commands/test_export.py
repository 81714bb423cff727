"""An ONNX folder is the checkpoint it was made from: proven against torch before it gets its name, or not there."""

from __future__ import annotations

import io
import json
import logging
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from rich.console import Console

from qvlopt.artifact.manifest import read_manifest, verify_files
from qvlopt.commands.export import export
from qvlopt.commands.graphs_result import GraphsResult
from qvlopt.commands.inspect import inspect
from qvlopt.commands.plan import Plan
from qvlopt.commands.quantize_awq import quantize_awq
from qvlopt.errors import RunError, UsageError
from qvlopt.graphs import decoder as decoder_module
from qvlopt.graphs import names
from qvlopt.graphs.tables import EmbeddingRows, position_table
from qvlopt.graphs.weights import weights_of
from qvlopt.graphs.writer import GraphWriter
from qvlopt.model.shapes import EMBEDDING
from qvlopt.model.source import open_source
from tests.documents import check_document, document_of
from tests.tiny import build_tiny
from tests.tiny_run import PLAIN, SMALL, build_set, listing, same_bits, tiny_recipe, with_first_value

GRAPHS = {names.VISION_GRAPH, names.DECODER_GRAPH}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny(tmp_path_factory.mktemp("model") / "tiny", **SMALL)


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory, model: Path) -> GraphsResult:
    return exported(model, tmp_path_factory.mktemp("artifact") / "out")


def exported(model: Path, output: Path, **section: Any) -> GraphsResult:
    result = export(tiny_recipe(model, output, output, export=section))
    assert isinstance(result, GraphsResult)
    return result


def test_the_folder_holds_what_an_engine_needs_and_says_what_it_is(model: Path, artifact: GraphsResult) -> None:
    folder = artifact.output
    assert verify_files(folder) == []
    for path in model.iterdir():
        if "safetensors" not in path.name:
            assert (folder / path.name).read_bytes() == path.read_bytes()
    found = {path.name for path in folder.iterdir()} - {path.name for path in model.iterdir()}
    assert found == GRAPHS | {names.data_file(graph) for graph in GRAPHS} | {names.TABLES, "README.md", "qvlopt.json"}
    manifest = read_manifest(folder)
    assert manifest.kind == "export"
    assert manifest.source is not None
    assert manifest.source.digest == open_source(str(model), folder=model).digest
    assert artifact.check.passed
    assert artifact.check.worst is not None
    assert artifact.check.worst < 1e-5
    for stage in ("embed", "deepstack.0", "merger", "logits"):
        assert stage in artifact.check.detail
    check_document(document_of("export", artifact.to_json()))


def test_bytes_are_counted_by_module(model: Path, artifact: GraphsResult) -> None:
    document = artifact.to_json()
    source = open_source(str(model), folder=model)
    assert document["modules_quantized"] == []
    assert "lm_head" in document["modules_kept"]
    assert document["bytes_before"] == sum(entry.nbytes for entry in source.tensors.entries.values())
    stored = sum((artifact.output / names.data_file(graph)).stat().st_size for graph in GRAPHS) + (artifact.output / names.TABLES).stat().st_size
    assert 0.9 * stored < document["bytes_after"] <= stored
    numbers = sum(weight.numel() for weight in map(weights_of(source), source.storages))
    embedding = weights_of(source)(EMBEDDING)
    assert document["bytes_after"] == 4 * numbers + embedding.nbytes


def test_inspect_lists_the_modules_of_the_source(model: Path, artifact: GraphsResult) -> None:
    rows = {row.name: row for row in inspect(artifact.output).modules}
    before = {row.name: row.shape for row in inspect(model).modules}
    assert {name: row.shape for name, row in rows.items() if name != "lm_head"} == before
    assert {row.dtype for name, row in rows.items() if name != "model.language_model.embed_tokens"} == {"F32"}
    assert sum(row.bytes for row in rows.values()) == artifact.to_json()["bytes_after"]
    assert len({row.sha256 for row in rows.values()}) == len(rows)


def test_weights_lie_beside_the_graph_and_inside_the_folder(artifact: GraphsResult) -> None:
    for graph in GRAPHS:
        path = artifact.output / graph
        assert path.stat().st_size < 200_000
        tensors = onnx.load(str(path), load_external_data=False).graph.initializer
        places = [{entry.key: entry.value for entry in tensor.external_data} for tensor in tensors if tensor.external_data]
        assert {place["location"] for place in places} == {names.data_file(graph)}
        assert all(int(place["offset"]) % (4096 if int(place["length"]) >= 4096 else 64) == 0 for place in places)


def test_the_host_looks_rows_up_without_loading_the_table(model: Path, artifact: GraphsResult) -> None:
    weights = weights_of(open_source(str(model), folder=model))
    ids = [3, 0, 3, 319]
    rows = EmbeddingRows(artifact.output).rows(ids)
    assert same_bits(torch.from_numpy(rows), weights(EMBEDDING)[ids].float())
    assert same_bits(position_table(artifact.output), weights("model.visual.pos_embed.weight").float())


def test_one_part_alone(model: Path, tmp_path: Path) -> None:
    result = exported(model, tmp_path / "out", parts=["vision"])
    assert {path.name for path in result.output.glob("*.onnx")} == {names.VISION_GRAPH}
    assert all(module.name.startswith("model.visual.") for module in result.modules)
    assert "logits" not in result.check.detail
    with pytest.raises(RunError, match="no tensor"):
        EmbeddingRows(result.output)


def test_a_quantised_source_is_widened(model: Path, tmp_path: Path) -> None:
    data = build_set(tmp_path / "set")
    awq = quantize_awq(tiny_recipe(model, data, tmp_path / "awq", quantize_awq={"search": PLAIN}))
    result = exported(awq.output, tmp_path / "out")
    assert result.check.passed
    record = next(module for module in result.modules if module.name.endswith("blocks.0.mlp.linear_fc2"))
    assert (record.dtype_before, record.dtype_after) == ("INT4 g64", "F32")


def without_deepstack(monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    """A builder that forgets what most ONNX exports of this model forget."""
    if part == "decoder":
        own = decoder_module._Decoder._deepstack

        def zeros(self: Any) -> tuple[str, ...]:
            return tuple(self.graph.one("Mul", feature, self.graph.scalar(0.0)) for feature in own(self))

        monkeypatch.setattr(decoder_module._Decoder, "_deepstack", zeros)
        return
    one = GraphWriter.one

    def concat_of_zeros(self: GraphWriter, op: str, *inputs: str, name: str = "", **attributes: Any) -> str:
        if op == "Concat" and name == names.DEEPSTACK:
            inputs = tuple(one(self, "Mul", x, self.scalar(0.0)) for x in inputs)
        return one(self, op, *inputs, name=name, **attributes)

    monkeypatch.setattr(GraphWriter, "one", concat_of_zeros)


@pytest.mark.parametrize(("part", "stage"), [("decoder", "logits"), ("vision", "deepstack.0")])
def test_without_deepstack_there_is_no_artifact(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str, stage: str) -> None:
    without_deepstack(monkeypatch, part)
    with pytest.raises(RunError, match=f"self-check failed: {stage} is off"):
        exported(model, tmp_path / "out", parts=[part])
    assert list(tmp_path.iterdir()) == []


def test_the_check_can_be_left_out_and_that_is_said(model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        result = exported(model, tmp_path / "out", check=False)
    assert "export.check is false" in caplog.text
    assert not result.check.passed
    assert "not checked" in (result.output / "README.md").read_text(encoding="utf-8")
    check_document(document_of("export", result.to_json()))


def test_the_same_again_is_nothing_to_do_and_another_is_refused(model: Path, tmp_path: Path) -> None:
    first = exported(model, tmp_path / "out", check=False, parts=["vision"])
    before = listing(first.output)
    again = exported(model, tmp_path / "out", check=False, parts=["vision"])
    assert again.existed
    assert listing(first.output) == before
    with pytest.raises(UsageError, match="holds another result"):
        exported(model, tmp_path / "out", check=False, parts=["decoder"])


def test_the_same_source_gives_the_same_bytes(model: Path, tmp_path: Path, artifact: GraphsResult) -> None:
    again = exported(model, tmp_path / "out")
    assert read_manifest(again.output).files | {"README.md": None} == read_manifest(artifact.output).files | {"README.md": None}


def test_a_damaged_weight_is_named_and_nothing_is_left(tmp_path: Path) -> None:
    model = with_first_value(build_tiny(tmp_path / "tiny", **SMALL), {"model.visual.blocks.1.norm2.weight": float("nan")})
    with pytest.raises(RunError, match=r"blocks\.1\.norm2\.weight holds NaN"):
        exported(model, tmp_path / "out" / "deep")
    assert not (tmp_path / "out").exists()


def test_a_dry_run_plans_and_writes_nothing(model: Path, tmp_path: Path) -> None:
    plan = export(tiny_recipe(model, tmp_path, tmp_path / "out", export={"parts": ["vision"]}), dry_run=True)
    assert isinstance(plan, Plan)
    rows = dict(plan.rows)
    assert rows["exports"] == "vision: 12 linears in float32"
    assert list(tmp_path.iterdir()) == []
    check_document(document_of("export", json.loads(json.dumps(plan.to_json()))))


def test_people_see_sizes_and_the_check(artifact: GraphsResult) -> None:
    console = Console(file=io.StringIO(), width=200)
    artifact.render(console)
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert "export" in text
    assert "logits" in text
    assert str(artifact.output) in text
