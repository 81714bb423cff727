"""Rounding to integers: against a slow reference, its bounds, and the weights that break quantisers."""

from __future__ import annotations

import struct

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qvlopt.quant.rounding import LARGEST_SCALE, SMALLEST_SCALE, QuantSpec, dequantize, qparams, quantize, rounding_error

EXAMPLES = settings(deadline=None, derandomize=True, max_examples=40)
SPECS = st.builds(QuantSpec, bits=st.integers(2, 8), group_size=st.sampled_from([1, 4, 8]), symmetric=st.booleans())


def weights(seed: int, *, rows: int = 3, groups: int = 2, group_size: int = 8, size: float = 0.02) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    w = torch.randn(rows, groups * group_size, generator=generator) * size
    w[torch.rand(w.shape, generator=generator) < 0.1] = 0.0
    return w + size * torch.randn(rows, 1, generator=generator)


def shrinks(seed: int, rows: int, groups: int, *, ends: int) -> torch.Tensor:
    clip = 0.5 + 0.5 * torch.rand(rows, groups, ends, generator=torch.Generator().manual_seed(seed))
    return clip[..., 0] if ends == 1 else clip


def nearest_bfloat16(value: np.float32) -> np.float32:
    """Round to nearest, ties to even, on the bits of a float32."""
    (bits,) = struct.unpack("<I", struct.pack("<f", value))
    bits += 0x7FFF + ((bits >> 16) & 1)
    return np.float32(struct.unpack("<f", struct.pack("<I", bits & 0xFFFF0000))[0])


def slow_group(group: list[float], spec: QuantSpec, low_clip: float, high_clip: float) -> tuple[float, int, list[int]]:
    """Scale, zero point and integers of one group, one number at a time in float32."""
    low = np.float32(min(0.0, *group)) * np.float32(low_clip)
    high = np.float32(max(0.0, *group)) * np.float32(high_clip)
    span = np.float32(2) * max(-low, high) if spec.symmetric else high - low
    scale = np.float32(1.0)
    if span > 0:
        scale = min(max(nearest_bfloat16(span / np.float32(2**spec.bits - 1)), np.float32(2**-14)), np.float32(65280))
    largest = 2**spec.bits - 1
    zero_point = 2 ** (spec.bits - 1) if spec.symmetric else min(max(round(float(-low / scale)), 0), largest)
    q = [min(max(round(float(np.float32(value) / scale)) + zero_point, 0), largest) for value in group]
    return float(scale), zero_point, q


@EXAMPLES
@given(spec=SPECS, seed=st.integers(0, 10**6), size=st.sampled_from([1e-6, 0.02, 300.0]), ends=st.sampled_from([0, 1, 2]))
def test_equals_the_slow_reference(spec: QuantSpec, seed: int, size: float, ends: int) -> None:
    w = weights(seed, group_size=spec.group_size, size=size)
    clip = shrinks(seed, *w.view(3, -1, spec.group_size).shape[:2], ends=ends) if ends else None
    qp = qparams(w, spec, clip)
    q = quantize(w, qp, spec)
    for row in range(w.shape[0]):
        for group in range(qp.scale.shape[1]):
            part = slice(group * spec.group_size, (group + 1) * spec.group_size)
            low_clip, high_clip = (1.0, 1.0) if clip is None else clip[row, group].expand(2).tolist()
            expected = slow_group([*w[row, part].tolist(), 0.0], spec, low_clip, high_clip)
            assert float(qp.scale[row, group]) == expected[0]
            assert int(qp.zero_point[row, group]) == expected[1]
            assert q[row, part].tolist() == expected[2][:-1]


@EXAMPLES
@given(spec=SPECS, seed=st.integers(0, 10**6), size=st.sampled_from([1e-30, 1e-6, 0.02, 1e6, 1e37]))
def test_scales_are_exact_in_bfloat16_and_float16_and_integers_are_in_range(spec: QuantSpec, seed: int, size: float) -> None:
    w = weights(seed, group_size=spec.group_size, size=size)
    qp = qparams(w, spec)
    q = quantize(w, qp, spec)
    assert torch.equal(qp.scale.to(torch.bfloat16).float(), qp.scale)
    assert torch.equal(qp.scale.to(torch.float16).float(), qp.scale)
    assert bool((qp.scale > 0).all())
    for integers in (q, qp.zero_point):
        assert integers.dtype == torch.int32
        assert 0 <= int(integers.min()) <= int(integers.max()) <= 2**spec.bits - 1


@EXAMPLES
@given(spec=SPECS, seed=st.integers(0, 10**6))
def test_error_is_at_most_half_a_step_where_the_grid_reaches(spec: QuantSpec, seed: int) -> None:
    w = weights(seed, group_size=spec.group_size)
    qp = qparams(w, spec)
    step = qp.scale.repeat_interleave(spec.group_size, 1)
    zero_point = qp.zero_point.repeat_interleave(spec.group_size, 1)
    reached = w.clamp(-zero_point * step, (spec.largest - zero_point) * step)
    change = dequantize(quantize(w, qp, spec), qp, spec) - reached
    assert bool((change.abs() <= step * 0.5001).all())


@EXAMPLES
@given(spec=SPECS, seed=st.integers(0, 10**6), ends=st.sampled_from([0, 1, 2]))
def test_rounding_error_is_the_dequantised_weight_less_the_weight_bit_for_bit(spec: QuantSpec, seed: int, ends: int) -> None:
    w = weights(seed, group_size=spec.group_size)
    clip = shrinks(seed, 3, 2, ends=ends) if ends else None
    qp = qparams(w, spec, clip)
    expected = dequantize(quantize(w, qp, spec), qp, spec) - w
    assert torch.equal(rounding_error(w, spec, clip), expected)


@EXAMPLES
@given(spec=SPECS, seed=st.integers(0, 10**6))
def test_zero_weights_stay_exactly_zero(spec: QuantSpec, seed: int) -> None:
    w = weights(seed, group_size=spec.group_size)
    w[:, ::3] = 0.0
    qp = qparams(w, spec)
    assert bool((dequantize(quantize(w, qp, spec), qp, spec)[:, ::3] == 0).all())


def test_a_group_of_zeros_has_scale_one_and_integers_zero() -> None:
    spec = QuantSpec(4, 8)
    w = weights(0)
    w[1, :8] = 0.0
    w[2] = -0.0
    qp = qparams(w, spec)
    q = quantize(w, qp, spec)
    assert qp.scale[1, 0] == 1
    assert qp.zero_point[1, 0] == 0
    assert q[1, :8].tolist() == q[2, :8].tolist() == [0] * 8
    assert dequantize(q, qp, spec)[2].tolist() == [0.0] * 16


def test_a_symmetric_group_of_zeros_dequantises_to_zeros() -> None:
    spec = QuantSpec(4, 8, symmetric=True)
    qp = qparams(torch.zeros(2, 8), spec)
    assert qp.zero_point.tolist() == [[8], [8]]
    assert not dequantize(quantize(torch.zeros(2, 8), qp, spec), qp, spec).any()


def test_a_group_on_one_side_of_zero_still_covers_zero() -> None:
    spec = QuantSpec(4, 4)
    w = torch.tensor([[0.9, 1.0, 0.95, 0.92], [-0.9, -1.0, -0.95, -0.92]])
    assert qparams(w, spec).zero_point.tolist() == [[0], [15]]


def test_dequantised_weights_are_exact() -> None:
    spec = QuantSpec(8, 8)
    w = weights(3, size=1.7)
    qp = qparams(w, spec)
    q = quantize(w, qp, spec)
    exact = (q - qp.zero_point.repeat_interleave(8, 1)).double() * qp.scale.double().repeat_interleave(8, 1)
    assert torch.equal(dequantize(q, qp, spec).double(), exact)


def test_bfloat16_weights_are_rounded_as_their_float32_values() -> None:
    spec = QuantSpec(4, 8)
    w = weights(4).to(torch.bfloat16)
    assert torch.equal(quantize(w, qparams(w, spec), spec), quantize(w.float(), qparams(w.float(), spec), spec))


def test_extreme_weights_get_the_ends_of_the_scale_range_and_finite_values() -> None:
    spec = QuantSpec(4, 4)
    w = torch.tensor([[1e-30, 0.0, -1e-30, 0.0], [3e38, -3e38, 0.0, 1.0]])
    qp = qparams(w, spec)
    assert qp.scale.flatten().tolist() == [SMALLEST_SCALE, LARGEST_SCALE]
    assert torch.isfinite(dequantize(quantize(w, qp, spec), qp, spec)).all()


def test_weights_are_not_modified() -> None:
    spec = QuantSpec(4, 8)
    w = weights(5)
    before = w.clone()
    quantize(w, qparams(w, spec, torch.full((3, 2), 0.5)), spec)
    rounding_error(w, spec)
    assert torch.equal(w, before)


def test_a_width_that_the_group_does_not_divide_is_refused_with_both_numbers() -> None:
    with pytest.raises(ValueError, match=r"128.*4304"):
        qparams(torch.zeros(2, 4304), QuantSpec(4, 128))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_weights_that_are_not_finite_are_refused(value: float) -> None:
    spec = QuantSpec(4, 8)
    w = weights(6)
    qp = qparams(w, spec)
    w[1, 3] = value
    with pytest.raises(ValueError, match="NaN or infinity"):
        qparams(w, spec)
    with pytest.raises(ValueError, match="NaN or infinity"):
        quantize(w, qp, spec)
    with pytest.raises(ValueError, match="NaN or infinity"):
        rounding_error(w, spec)


@pytest.mark.parametrize("clip", [torch.ones(2, 3), torch.zeros(3, 2), torch.full((3, 2), 1.1), torch.full((3, 2, 2), float("nan"))])
def test_a_clip_of_another_shape_or_outside_zero_to_one_is_refused(clip: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="clip"):
        qparams(weights(7), QuantSpec(4, 8), clip)


def test_a_weight_that_is_no_matrix_is_refused() -> None:
    with pytest.raises(ValueError, match="two dimensions"):
        qparams(torch.zeros(2, 3, 8), QuantSpec(4, 8))


@pytest.mark.parametrize(("bits", "group_size"), [(1, 128), (9, 128), (4, 0), (4, -1)])
def test_impossible_specs_are_refused(bits: int, group_size: int) -> None:
    with pytest.raises(ValueError, match="expected"):
        QuantSpec(bits, group_size)


@pytest.mark.parametrize("bits", range(2, 8))
def test_another_bit_cuts_the_squared_error_at_least_by_two_thirds(bits: int) -> None:
    w = weights(8, rows=64, group_size=64)
    coarse, fine = (rounding_error(w, QuantSpec(width, 64)).square().sum() for width in (bits, bits + 1))
    assert fine < coarse / 3
