"""Integers of weights and activations: within half a step, on the grid of the operators, and packed as onnxruntime reads them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qvlopt.graphs.rounding import block_size, round_blocks, round_rows, round_tokens


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("largest", [127, 63])
def test_every_weight_is_within_half_a_step_of_its_row(largest: int) -> None:
    weight = random(7, 300) * torch.logspace(-6, 6, 7)[:, None]
    rounded = round_rows(weight, largest=largest)
    assert rounded.q.dtype == torch.int8
    assert rounded.q.abs().amax(1).tolist() == [largest] * 7
    assert bool(((rounded.value() - weight).abs() <= rounded.scale[:, None] * 0.5001).all())


def test_rows_of_zeros_stay_zero() -> None:
    assert round_rows(torch.zeros(3, 16)).value().abs().max() == 0
    assert round_tokens(torch.zeros(3, 16)).abs().max() == 0
    for bits in (4, 8):
        assert round_blocks(torch.zeros(3, 32), bits=bits, block=16).value().abs().max() == 0


def test_large_weights_are_rounded_in_pieces_as_in_one(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = random(50, 64)
    rows, blocks = round_rows(weight), round_blocks(weight, bits=4, block=32, importance=random(64).abs())
    monkeypatch.setattr("qvlopt.graphs.rounding.AT_ONCE", 64 * 7)
    assert torch.equal(round_rows(weight).q, rows.q)
    again = round_blocks(weight, bits=4, block=32, importance=random(64).abs())
    assert torch.equal(again.q, blocks.q)
    assert torch.equal(again.scale, blocks.scale)


@given(st.floats(1e-20, 1e20))
def test_a_massive_token_coarsens_no_other(massive: float) -> None:
    x = random(9, 128)
    alone = round_tokens(x[1:])
    x[0] *= massive
    assert torch.equal(round_tokens(x)[1:], alone)
    step = x.abs().amax(1, keepdim=True) / 127
    assert bool(((round_tokens(x) - x).abs() <= step * 0.5001).all())


@pytest.mark.parametrize(("bits", "low", "high"), [(8, 1, 255), (4, 0, 15)])
def test_blocks_use_their_range_and_round_within_half_a_step(bits: int, low: int, high: int) -> None:
    weight = random(11, 96)
    blocks = round_blocks(weight, bits=bits, block=32)
    assert (int(blocks.q.min()), int(blocks.q.max())) == (low, high) or bits == 4
    assert blocks.block == 32
    error = (blocks.value() - weight).abs().unflatten(1, (-1, 32))
    # 4 bits have one value less on one side: what lies beyond it is off by up to one step
    assert bool((error <= blocks.scale.abs()[..., None] * (0.5001 if bits == 8 else 1.0001)).all())


def test_importance_moves_the_error_to_where_it_matters_less() -> None:
    weight, importance = random(64, 64), torch.ones(64)
    importance[:8] = 1000
    plain, weighed = (round_blocks(weight, bits=4, block=32, importance=i) for i in (None, importance))
    off = [((blocks.value() - weight) ** 2 * importance).sum() for blocks in (plain, weighed)]
    assert off[1] < 0.9 * off[0]


def test_two_inputs_share_a_byte_the_earlier_in_its_lower_half() -> None:
    blocks = round_blocks(random(3, 32), bits=4, block=16)
    packed = blocks.packed()
    assert packed.shape == (3, 2, 8)
    assert torch.equal(packed[:, 0, 0] & 15, blocks.q[:, 0])
    assert torch.equal(packed[:, 1, 7] >> 4, blocks.q[:, 31])
    assert round_blocks(random(3, 32), bits=8, block=16).packed().shape == (3, 2, 16)


@pytest.mark.parametrize(("width", "wanted", "found"), [(2048, 128, 128), (96, 128, 32), (48, 32, 16), (40, 128, None)])
def test_a_block_divides_the_width(width: int, wanted: int, found: int | None) -> None:
    assert block_size(width, wanted) == found
