"""AutoAWQ's layout: golden words, the layout rule one nibble at a time, and a round trip."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qvlopt.quant.pack_awq import AwqTensors, pack, unpack
from qvlopt.quant.rounding import Integers, QuantSpec, dequantize, qparams, quantize


def layer(seed: int, *, rows: int = 16, groups: int = 3, group_size: int = 8) -> Integers:
    generator = torch.Generator().manual_seed(seed)
    q = torch.randint(0, 16, (rows, groups * group_size), generator=generator, dtype=torch.int32)
    zero_point = torch.randint(0, 16, (rows, groups), generator=generator, dtype=torch.int32)
    scale = torch.rand(rows, groups, generator=generator).add(0.01).to(torch.bfloat16).float()
    return Integers(q, zero_point, scale)


def test_outputs_0_to_7_with_the_values_0_to_7_make_the_golden_word() -> None:
    values = torch.arange(8, dtype=torch.int32).view(8, 1)
    packed = pack(values, values, torch.ones(8, 1))
    assert packed.qweight.tolist() == [[0x75316420]]
    assert packed.qzeros.tolist() == [[0x75316420]]


def test_every_nibble_is_where_the_layout_says() -> None:
    q, zero_point, scale = layer(0)
    packed = pack(q, zero_point, scale)
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    for word in range(2):
        for lane in range(8):
            output = 8 * word + order[lane]
            assert [(value >> 4 * lane) & 15 for value in packed.qweight[:, word].tolist()] == q[output].tolist()
            assert [(value >> 4 * lane) & 15 for value in packed.qzeros[:, word].tolist()] == zero_point[output].tolist()
            assert packed.scales[:, output].tolist() == scale[output].tolist()


def test_types_and_shapes_are_those_of_the_format() -> None:
    packed = pack(*layer(1))
    assert [(tensor.dtype, tuple(tensor.shape)) for tensor in packed] == [
        (torch.int32, (24, 2)),
        (torch.int32, (3, 2)),
        (torch.float16, (3, 16)),
    ]
    assert all(tensor.is_contiguous() for tensor in packed)


@settings(deadline=None, derandomize=True, max_examples=30)
@given(seed=st.integers(0, 10**6), words=st.integers(1, 4), groups=st.integers(1, 4), group_size=st.sampled_from([1, 8, 32]))
def test_unpacking_gives_back_what_was_packed(seed: int, words: int, groups: int, group_size: int) -> None:
    original = layer(seed, rows=8 * words, groups=groups, group_size=group_size)
    for got, expected in zip(unpack(pack(*original)), original, strict=True):
        assert got.dtype == expected.dtype
        assert torch.equal(got, expected)


def test_a_rounded_weight_survives_packing_bit_for_bit() -> None:
    spec = QuantSpec(4, 8)
    w = torch.randn(16, 24, generator=torch.Generator().manual_seed(2)) * 0.02
    qp = qparams(w, spec)
    q = quantize(w, qp, spec)
    stored = unpack(pack(q, qp.zero_point, qp.scale))
    assert torch.equal(dequantize(stored.q, stored.qparams, spec), dequantize(q, qp, spec))


def test_a_number_of_outputs_that_8_does_not_divide_is_refused() -> None:
    with pytest.raises(ValueError, match="12 outputs"):
        pack(*layer(3, rows=12))


def test_integers_of_more_than_4_bits_are_refused() -> None:
    q, zero_point, scale = layer(4)
    with pytest.raises(ValueError, match="0 to 15"):
        pack(q + 10, zero_point, scale)
    with pytest.raises(ValueError, match="0 to 15"):
        pack(q, zero_point - 10, scale)


@pytest.mark.parametrize("scale", [1 / 3, 1e-9, 1e6])
def test_a_scale_that_float16_does_not_hold_is_refused(scale: float) -> None:
    q, zero_point, scales = layer(5)
    with pytest.raises(ValueError, match="float16"):
        pack(q, zero_point, torch.full_like(scales, scale))


@pytest.mark.parametrize("wrong", [{"qzeros": torch.zeros(2, 2, dtype=torch.int32)}, {"scales": torch.ones(3, 15)}, {"scales": torch.ones(5, 16)}])
def test_tensors_that_do_not_belong_together_are_refused(wrong: dict[str, torch.Tensor]) -> None:
    with pytest.raises(ValueError, match="AWQ layout"):
        unpack(pack(*layer(6))._replace(**wrong))


def test_words_of_another_type_are_refused() -> None:
    packed = pack(*layer(7))
    with pytest.raises(ValueError, match="int32"):
        unpack(AwqTensors(packed.qweight.long(), packed.qzeros, packed.scales))
