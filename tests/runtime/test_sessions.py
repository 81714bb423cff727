"""Graphs that are not what this version runs are refused by name, and nothing is written to stdout."""

from __future__ import annotations

import shutil
from pathlib import Path

import onnx
import pytest

from qvlopt.errors import RunError
from qvlopt.graphs import names
from qvlopt.runtime.onnx_model import load_onnx_model
from qvlopt.runtime.sessions import open_session
from tests.tiny import build_tiny
from tests.tiny_onnx import build_onnx
from tests.tiny_run import SMALL


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sessions")
    return build_onnx(build_tiny(folder / "model", **SMALL), folder / "onnx")


@pytest.fixture
def artifact(made: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(made, tmp_path / "copy"))


def test_a_session_has_the_threads_it_is_told(artifact: Path) -> None:
    for spins in (True, False):
        options = open_session(artifact / names.VISION_GRAPH, threads=2, spins=spins, prepack=spins).get_session_options()
        assert (options.intra_op_num_threads, options.inter_op_num_threads) == (2, 1)


@pytest.mark.parametrize("graph", [names.VISION_GRAPH, names.DECODER_GRAPH])
def test_a_missing_or_broken_graph_is_refused_by_name(artifact: Path, graph: str, capsys: pytest.CaptureFixture[str]) -> None:
    (artifact / graph).write_bytes(b"\x0a\xff\xff\xff\xff")
    with pytest.raises(RunError, match=f"{graph} is not an ONNX graph"):
        load_onnx_model(artifact, threads=1)
    (artifact / graph).unlink()
    with pytest.raises(RunError, match=f"has no {graph}, so it cannot answer"):
        load_onnx_model(artifact, threads=1)
    assert capsys.readouterr().out == ""


def test_missing_or_cut_weights_are_refused_by_name(artifact: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = artifact / names.data_file(names.DECODER_GRAPH)
    data.write_bytes(data.read_bytes()[:1000])
    with pytest.raises(RunError, match="cannot be run by onnxruntime"):
        load_onnx_model(artifact, threads=1)
    data.unlink()
    with pytest.raises(RunError, match=f"needs {data.name}, which is missing"):
        load_onnx_model(artifact, threads=1)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("location", ["../outside.data", "/etc/hostname"])
def test_weights_outside_the_folder_are_refused(artifact: Path, location: str) -> None:
    path = artifact / names.DECODER_GRAPH
    (artifact.parent / "outside.data").write_bytes((artifact / names.data_file(names.DECODER_GRAPH)).read_bytes())
    graph = onnx.load(str(path), load_external_data=False)
    for tensor in graph.graph.initializer:
        for entry in tensor.external_data:
            entry.value = location if entry.key == "location" else entry.value
    onnx.save(graph, str(path))
    with pytest.raises(RunError, match="leaves"):
        load_onnx_model(artifact, threads=1)


def test_graphs_of_another_form_are_refused(artifact: Path) -> None:
    graph = onnx.load(str(artifact / names.VISION_GRAPH), load_external_data=False)
    for node in graph.graph.node:
        node.input[:] = ["pixels" if name == names.PIXEL_VALUES else name for name in node.input]
    for value in graph.graph.input:
        value.name = "pixels" if value.name == names.PIXEL_VALUES else value.name
    onnx.save(graph, str(artifact / names.VISION_GRAPH))
    with pytest.raises(RunError, match="inputs are not those of this version, such as pixel"):
        load_onnx_model(artifact, threads=1)


def test_tables_of_another_model_are_refused(artifact: Path, tmp_path: Path) -> None:
    other = build_onnx(build_tiny(tmp_path / "other", text={"hidden_size": 128}), tmp_path / "other-onnx")
    shutil.copy(other / names.TABLES, artifact / names.TABLES)
    with pytest.raises(RunError, match=r"embed_tokens\.weight is"):
        load_onnx_model(artifact, threads=1)
