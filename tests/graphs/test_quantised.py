"""Integer linears in a graph give what their rounding says they give, whatever the tokens look like."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from qvlopt.graphs.layer_errors import Inputs, Recorder, Wanted, choose, rounded_output
from qvlopt.graphs.quantised import QuantisedLinear, Scheme
from qvlopt.graphs.saturation import largest_weight
from qvlopt.graphs.session import open_session
from qvlopt.graphs.smooth import Divided, Group
from qvlopt.graphs.writer import FLOAT, GraphWriter

K, SIZES = 96, {"a": 64, "b": 40}


def parameters() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    found = {f"{name}.weight": torch.randn(rows, K, generator=generator) / 10 for name, rows in SIZES.items()}
    return found | {"a.bias": torch.randn(SIZES["a"], generator=generator)}


def tokens(count: int = 12) -> torch.Tensor:
    """One massive token, one of zeros, one of the smallest numbers, and one channel that is large everywhere."""
    x = torch.randn(count, K, generator=torch.Generator().manual_seed(1))
    x[:, 5] *= 30
    x[3] *= 1e4
    x[4] = 0
    x[6] *= 1e-30
    return x


def graph_outputs(folder: Path, schemes: dict[str, Scheme], x: torch.Tensor) -> list[torch.Tensor]:
    with GraphWriter(folder / "g.onnx") as graph:
        linear = QuantisedLinear(parameters().__getitem__, {"a"}, schemes, largest=largest_weight())  # as quantize-int8 writes it here
        outputs = linear(graph, ["a", "b"], graph.input("x", FLOAT, ("tokens", K)))
        for name, width in zip(outputs, SIZES.values(), strict=True):
            graph.output(name, FLOAT, ("tokens", width))
    session = open_session(folder / "g.onnx", threads=1)
    return [torch.from_numpy(value) for value in session.run(list(outputs), {"x": x.numpy()})]


@pytest.mark.parametrize("scheme", ["w8a8", "blocks8", "blocks4", "float32"])
def test_the_graph_computes_what_the_errors_are_measured_on(tmp_path: Path, scheme: Scheme) -> None:
    x, found = tokens(), parameters()
    got = graph_outputs(tmp_path, {"a": scheme, "b": scheme}, x)
    for name, y in zip(SIZES, got, strict=True):
        expected = rounded_output(x, found[f"{name}.weight"], scheme, largest=largest_weight()) + (found["a.bias"] if name == "a" else 0)
        off = (y - expected).norm(dim=1) / expected.norm(dim=1).clamp(min=1e-30)
        assert off.max() < (5e-3 if scheme.startswith("blocks") else 1e-5)  # MatMulNBits rounds activations in its own blocks
    assert torch.equal(got[0][4], found["a.bias"])
    assert got[1][4].abs().max() == 0


def test_no_tokens_give_no_rows(tmp_path: Path) -> None:
    assert [tuple(y.shape) for y in graph_outputs(tmp_path, {"a": "w8a8", "b": "blocks4"}, tokens()[:0])] == [(0, 64), (0, 40)]


def test_linears_that_read_the_same_share_its_integers(tmp_path: Path) -> None:
    with GraphWriter(tmp_path / "g.onnx") as graph:
        QuantisedLinear(parameters().__getitem__, set(), {"a": "w8a8", "b": "w8a8"})(graph, ["a", "b"], graph.input("x", FLOAT, ("t", K)))
        assert sum(node.op_type == "QuantizeLinear" for node in graph._nodes) == 1


def inputs_of(x: torch.Tensor) -> Inputs:
    recorder = Recorder(1)
    recorder("a", x)
    return recorder.inputs("a")


def test_smoothing_is_chosen_where_it_helps_and_only_there() -> None:
    group = Group(("a",), (Divided("norm.weight"),), torch.arange(K))
    even = torch.randn(200, K, generator=torch.Generator().manual_seed(3)).sign()
    assert choose(group, inputs_of(even), parameters().__getitem__, Wanted("w8a8", 0.05)).scale is None
    spiky = even.clone()
    spiky[:, 5] *= 300
    choice = choose(group, inputs_of(spiky), parameters().__getitem__, Wanted("w8a8", 0.5))
    layer = choice.layers[0]
    assert choice.scale is not None
    assert layer.error < 0.5 * layer.plain
    assert "smoothed" in layer.method
    off = choose(group, inputs_of(spiky), parameters().__getitem__, Wanted("w8a8", 0.5, smooth=False))
    assert (off.scale, off.layers[0].error) == (None, layer.plain)


@pytest.mark.parametrize("scheme", ["w8a8", "blocks8", "blocks4"])
def test_a_large_weight_is_measured_in_pieces_as_in_one(monkeypatch: pytest.MonkeyPatch, scheme: Scheme) -> None:
    group, x = Group(("a",), (Divided("norm.weight"),), torch.arange(K)), tokens(100)
    x[:, 5] *= 300
    whole = choose(group, inputs_of(x), parameters().__getitem__, Wanted(scheme, 0.5))
    monkeypatch.setattr("qvlopt.graphs.layer_errors.AT_ONCE", 3 * K)
    pieces = choose(group, inputs_of(x), parameters().__getitem__, Wanted(scheme, 0.5))
    assert whole.scale is not None
    assert pieces.scale is not None
    assert torch.equal(pieces.scale, whole.scale)
    assert pieces.layers[0].method == whole.layers[0].method
    assert pieces.layers[0].error == pytest.approx(whole.layers[0].error, rel=1e-3)


def test_a_layer_over_the_limit_stays_float32_and_says_so() -> None:
    group, x = Group(("a", "b")), tokens(100)
    fine = choose(group, inputs_of(x), parameters().__getitem__, Wanted("w8a8", 1.0)).layers
    limit = (fine[0].error + fine[1].error) / 2
    layers = choose(group, inputs_of(x), parameters().__getitem__, Wanted("w8a8", limit, keep=frozenset())).layers
    assert sorted(layer.scheme for layer in layers) == ["float32", "w8a8"]
    worse = next(layer for layer in layers if layer.scheme == "float32")
    assert (worse.plain, worse.error) == (max(layer.error for layer in fine), 0.0)
    assert f"more than {limit:g}" in worse.method


def test_four_bits_give_way_to_eight_before_float32() -> None:
    layers = choose(Group(("a",)), inputs_of(torch.randn(50, K)), parameters().__getitem__, Wanted("blocks4", 0.012)).layers
    assert layers[0].scheme == "blocks8"
    assert layers[0].error < 0.012 < layers[0].plain


def test_kept_layers_are_not_measured() -> None:
    choice = choose(Group(("a", "b")), inputs_of(tokens()), parameters().__getitem__, Wanted("w8a8", 1.0, keep=frozenset({"a"})))
    assert {layer.name: layer.scheme for layer in choice.layers} == {"a": "float32", "b": "w8a8"}


def test_a_recorder_keeps_few_rows_and_the_first_of_each_prompt() -> None:
    recorder = Recorder(3, rows=30)
    prompts = [torch.randn(length, 4, generator=torch.Generator().manual_seed(length)) for length in (7, 500, 90)]
    for prompt in prompts:
        recorder("a", prompt)
    found = recorder.inputs("a")
    assert len(found.rows) <= 30
    for prompt in prompts:
        assert bool((found.rows == prompt[0]).all(1).any())
    assert torch.equal(found.largest, torch.cat(prompts).abs().amax(0))
    assert torch.allclose(found.mean_square, torch.cat(prompts).pow(2).mean(0), rtol=1e-5)
    assert np.isfinite(found.mean_square.numpy()).all()
