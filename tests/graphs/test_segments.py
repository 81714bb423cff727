"""A decoder in parts gives what the whole graph gives, and no part has more weights than it may."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch

from qvlopt.graphs import names
from qvlopt.graphs.check import run_decoder
from qvlopt.graphs.segments import layer_runs, logits_by_segment
from qvlopt.graphs.session import open_session
from qvlopt.graphs.torch_layers import TextInputs
from tests.tiny_graphs import tiny_source, write_graphs


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("segments")
    return write_graphs(place / "graphs", tiny_source(place / "tiny", text={"num_hidden_layers": 5}))


def test_the_parts_are_the_whole(folder: Path, tmp_path: Path) -> None:
    source = tiny_source(tmp_path / "tiny", text={"num_hidden_layers": 5})
    generator = torch.Generator().manual_seed(0)
    deepstack = torch.randn(2, 17, 128, generator=generator)
    prompt = TextInputs(torch.randn(17, 128, generator=generator), torch.arange(17).expand(3, -1), deepstack)
    cuts = [0, 9, 15, 16, 17]
    path = folder / names.DECODER_GRAPH
    session = open_session(path, threads=1)
    whole = np.concatenate(list(run_decoder([session] * 4, source.settings.text, prompt, cuts)))
    before = {entry.name for entry in folder.iterdir()}
    for most_bytes in (1, 10**6, 10**12):
        parts = logits_by_segment(path, source.settings.text, prompt, cuts, threads=1, most_bytes=most_bytes)
        assert np.abs(parts - whole).max() < 1e-5 * np.abs(whole).max()
    assert {entry.name for entry in folder.iterdir()} == before


def test_runs_of_layers_keep_to_the_limit(folder: Path) -> None:
    model = onnx.load(str(folder / names.DECODER_GRAPH), load_external_data=False)
    assert list(layer_runs(model, 5, 1)) == [(layer, layer) for layer in range(5)]
    assert list(layer_runs(model, 5, 10**12)) == [(0, 4)]
    lengths = {tensor.name: int(item.value) for tensor in model.graph.initializer for item in tensor.external_data if item.key == "length"}
    layer = sum(length for name, length in lengths.items() if ".layers.0." in name)
    assert list(layer_runs(model, 5, 2 * layer)) == [(0, 1), (2, 3), (4, 4)]
