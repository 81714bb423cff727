"""The language model's graph: transformers' logits for every shape, buffers that stay in place, rows that are asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLTextConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextRotaryEmbedding

from qvlopt.graphs import names
from qvlopt.graphs.check import check_decoder
from qvlopt.graphs.decoder import rotary_matrix
from qvlopt.graphs.session import open_session
from qvlopt.graphs.weights import weights_of
from tests.tiny import tiny_config
from tests.tiny_graphs import tiny_source, write_graphs

SHAPES: dict[str, dict[str, Any]] = {
    "tied": {},
    "untied": {"tied": False},
    "one layer, which is the last and tapped": {"text": {"num_hidden_layers": 1}},
    "more layers than taps": {"text": {"num_hidden_layers": 4}},
    "no taps": {"vision": {"deepstack_visual_indexes": []}},
    "biases and gelu": {"text": {"attention_bias": True, "hidden_act": "gelu"}},
    "tanh gelu, one key head": {"text": {"hidden_act": "gelu_pytorch_tanh", "num_key_value_heads": 1}},
    "as many key heads, odd head size": {"text": {"num_key_value_heads": 4, "head_dim": 48}},
    "float8": {"dtype": "float8"},
}
ROPES = [
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256},
]


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_logits_of_every_position_are_those_of_transformers(tmp_path: Path, shape: dict[str, Any]) -> None:
    source = tiny_source(tmp_path / "tiny", **shape)
    folder = write_graphs(tmp_path / "graphs", source)
    stages = dict(check_decoder(folder, source.settings, weights_of(source), threads=1))
    assert stages["embed_tokens"] == 0
    assert stages["logits"] < 2e-5


@pytest.mark.parametrize("rope", ROPES, ids=lambda rope: str(rope["rope_type"]))
def test_one_product_gives_the_interleaved_angles(rope: dict[str, Any]) -> None:
    """Against transformers' own rotary embedding, up to the longest position that a float32 angle can carry."""
    scaling = {"mrope_interleaved": True, "mrope_section": [6, 5, 5], "rope_theta": 5000000.0, **rope}
    settings = {key: value for key, value in tiny_config()["text_config"].items() if key not in ("rope_theta", "rope_scaling", "dtype")}
    settings["rope_parameters"] = scaling
    generator = torch.Generator().manual_seed(0)
    positions = torch.randint(0, 200_000, (3, 1, 50), generator=generator)
    cos, sin = Qwen3VLTextRotaryEmbedding(Qwen3VLTextConfig(**{**settings, "rope_parameters": dict(scaling)}))(torch.zeros(1), positions)
    matrix, factor = rotary_matrix(settings)
    angles = positions[:, 0].T.numpy().astype(np.float32) @ matrix
    assert np.abs(np.cos(angles) * factor - cos[0, :, : angles.shape[1]].numpy()).max() < 1e-6
    assert np.abs(np.sin(angles) * factor - sin[0, :, : angles.shape[1]].numpy()).max() < 1e-6


class Buffers:
    """A decoder over buffers that are bound once, as past and as present."""

    def __init__(self, folder: Path, settings: dict[str, Any], capacity: int) -> None:
        self.session = open_session(folder / names.DECODER_GRAPH, threads=1)
        self.binding = self.session.io_binding()
        shape = (1, settings["num_key_value_heads"], capacity, settings["head_dim"])
        self.buffers: dict[str, onnxruntime.OrtValue] = {}
        for layer in range(settings["num_hidden_layers"]):
            for past, present in ((names.past_key, names.present_key), (names.past_value, names.present_value)):
                value = onnxruntime.OrtValue.ortvalue_from_numpy(np.zeros(shape, dtype=np.float32))
                self.buffers[present(layer)] = value
                self.binding.bind_ortvalue_input(past(layer), value)
                self.binding.bind_ortvalue_output(present(layer), value)

    def run(self, embeds: np.ndarray, start: int, rows: list[int]) -> np.ndarray:
        count, stop = embeds.shape[1], start + embeds.shape[1]
        inputs = {
            names.INPUTS_EMBEDS: embeds,
            names.POSITION_IDS: np.broadcast_to(np.arange(start, stop), (3, 1, count)).copy(),
            names.DEEPSTACK_EMBEDS: np.zeros((2, *embeds.shape), dtype=np.float32),
            names.LOGIT_INDICES: np.array(rows, dtype=np.int64),
            names.SEQLENS_K: np.array([stop - 1], dtype=np.int32),
            names.TOTAL_LENGTH: np.array(stop, dtype=np.int32),
        }
        for name, value in inputs.items():
            self.binding.bind_cpu_input(name, value)
        self.binding.bind_output(names.LOGITS)
        self.session.run_with_iobinding(self.binding)
        *presents, last = self.binding.get_outputs()  # in the order of binding
        assert [value.data_ptr() for value in presents] == [buffer.data_ptr() for buffer in self.buffers.values()]
        logits: np.ndarray = last.numpy()
        return logits


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("decoder")
    source = tiny_source(folder / "tiny")
    return write_graphs(folder / "graphs", source), source.settings.text


def test_chunks_over_shared_buffers_are_one_run(decoder: tuple[Path, dict[str, Any]]) -> None:
    folder, settings = decoder
    embeds = np.random.default_rng(0).standard_normal((1, 20, settings["hidden_size"])).astype(np.float32)
    whole = Buffers(folder, settings, 32).run(embeds, 0, list(range(20)))[0]
    cut = Buffers(folder, settings, 64)
    parts = [cut.run(embeds[:, a:b], a, list(range(b - a)))[0] for a, b in ((0, 7), (7, 16), (16, 17), (17, 18), (18, 20))]
    assert np.abs(np.concatenate(parts) - whole).max() < 1e-5 * np.abs(whole).max()


def test_only_the_rows_asked_for_have_logits(decoder: tuple[Path, dict[str, Any]]) -> None:
    folder, settings = decoder
    embeds = np.random.default_rng(1).standard_normal((1, 9, settings["hidden_size"])).astype(np.float32)
    whole = Buffers(folder, settings, 16).run(embeds, 0, list(range(9)))
    some = Buffers(folder, settings, 16).run(embeds, 0, [8, 2])
    assert some.shape == (1, 2, settings["vocab_size"])
    assert np.abs(some[0] - whole[0, [8, 2]]).max() < 1e-5 * np.abs(whole).max()
    chunked = Buffers(folder, settings, 16)
    assert chunked.run(embeds[:, :5], 0, []).shape == (1, 0, settings["vocab_size"])
    assert np.abs(chunked.run(embeds[:, 5:], 5, [3])[0] - whole[0, [8]]).max() < 1e-5 * np.abs(whole).max()
