"""Processors whose integer product saturates: found by computing, and 7-bit weights are exact on them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from qvlopt.artifact.manifest import LayerRecord, Manifest
from qvlopt.errors import RunError
from qvlopt.graphs import saturation
from qvlopt.graphs.layer_errors import relative
from qvlopt.graphs.rounding import LEVELS, round_rows
from qvlopt.graphs.saturation import LARGEST_EXACT, largest_weight, require_exact, saturates, saturating_product


@pytest.fixture
def without_vnni(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process computes as such a processor would."""
    saturates.cache_clear()
    monkeypatch.setattr(saturation, "_product", saturating_product)
    yield
    saturates.cache_clear()


def product(largest: int) -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng(0)
    x = draw.choice([0, 1, 128, 255], size=(8, 64)).astype(np.uint8)
    weight = draw.choice([-largest, 0, largest], size=(64, 8)).astype(np.int8)
    return saturating_product(x, weight), x.astype(np.int64) @ weight.astype(np.int64)


def test_eight_bits_saturate_there_and_seven_never() -> None:
    got, exact = product(127)
    assert not np.array_equal(got, exact)
    got, exact = product(63)
    assert np.array_equal(got, exact)
    extremes = np.full((1, 2), 255, dtype=np.uint8), np.full((2, 1), -63, dtype=np.int8)
    assert saturating_product(*extremes).item() == 2 * 255 * -63


@pytest.mark.usefixtures("without_vnni")
def test_such_a_processor_is_found_out_and_weights_keep_seven_bits() -> None:
    assert saturates()
    assert largest_weight() == 63


def manifest(method: str) -> Manifest:
    return Manifest(kind="int8", digest="0", recipe={}, layers=(LayerRecord(name="a", rounding_loss=0, loss=0, method=method),))


@pytest.mark.usefixtures("without_vnni")
def test_an_artifact_of_eight_bits_is_refused_there() -> None:
    with pytest.raises(RunError, match="no VNNI"):
        require_exact(manifest("W8A8, smoothed 0.5"))
    require_exact(manifest("W8A8 of 7 bits"))
    require_exact(manifest("4 bits"))


def test_where_products_are_exact_nothing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    saturates.cache_clear()
    monkeypatch.setattr(saturation, "_product", lambda x, weight: x.astype(np.int64) @ weight.astype(np.int64))
    assert largest_weight() == 127
    require_exact(manifest("W8A8"))
    saturates.cache_clear()


def test_seven_bits_cost_a_layer_less_there_than_saturation() -> None:
    """A whole W8A8 layer as such a processor computes it."""
    draw = torch.Generator().manual_seed(0)
    x, weight = (torch.rand(rows, 256, generator=draw) * 2 - 1 for rows in (16, 32))
    step = x.abs().amax(1, keepdim=True) / LEVELS
    integers = ((x / step).round() + LEVELS + 1).to(torch.uint8).numpy()
    errors = []
    for largest in (LEVELS, LARGEST_EXACT):
        rounded = round_rows(weight, largest=largest)
        q = rounded.q.numpy().astype(np.int8)
        sums = saturating_product(integers, q.T) - (LEVELS + 1) * q.astype(np.int64).sum(1)
        errors.append(relative(x @ weight.T, torch.from_numpy(sums) * step * rounded.scale))
    assert errors[0] > 0.1
    assert errors[1] < 0.01


@pytest.mark.parametrize("largest", [127, 63])
def test_what_is_emulated_is_what_this_processor_does(largest: int) -> None:
    """Where the kernel saturates it does so as the emulation; elsewhere it is exact. With 7 bits both are one."""
    saturates.cache_clear()
    draw = np.random.default_rng(0)
    x = draw.choice([0, 1, 128, 255], size=(8, 64)).astype(np.uint8)
    weight = draw.choice([-largest, 0, largest], size=(64, 16)).astype(np.int8)
    exact = x.astype(np.int64) @ weight.astype(np.int64)
    assert np.array_equal(saturation._product(x, weight), saturating_product(x, weight) if saturates() else exact)
    assert np.array_equal(saturating_product(x, weight), exact) == (largest == 63)
