"""compressed-tensors' layout: golden words, its own packer and unpacker, and the way over from AWQ's layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qvlopt.quant import pack_awq
from qvlopt.quant.pack_compressed import CompressedTensors, pack, unpack
from qvlopt.quant.rounding import Integers, QuantSpec, dequantize, qparams, quantize

EXAMPLES = settings(deadline=None, derandomize=True, max_examples=30)


def layer(spec: QuantSpec, seed: int = 0, *, rows: int = 16, groups: int = 3) -> Integers:
    generator = torch.Generator().manual_seed(seed)
    w = torch.randn(rows, groups * spec.group_size, generator=generator) * 0.02 + 0.01
    qp = qparams(w, spec)
    return Integers(quantize(w, qp, spec), qp.zero_point, qp.scale)


def packed_layer(spec: QuantSpec, **options: int) -> CompressedTensors:
    return pack(*layer(spec, **options), bits=spec.bits, symmetric=spec.symmetric)


def scheme(spec: QuantSpec) -> Any:
    quantization = pytest.importorskip("compressed_tensors.quantization")
    weights = quantization.QuantizationArgs(num_bits=spec.bits, type="int", symmetric=spec.symmetric, strategy="group", group_size=spec.group_size)
    return quantization.QuantizationScheme(targets=["Linear"], weights=weights)


def test_values_0_to_7_make_the_golden_word_along_inputs_and_along_outputs() -> None:
    values = torch.arange(8, dtype=torch.int32)
    packed = pack(values.repeat(8, 1), values.view(8, 1), torch.ones(8, 1), bits=4)
    assert packed.weight_packed.tolist() == [[0x76543210]] * 8
    assert packed.weight_zero_point is not None
    assert packed.weight_zero_point.tolist() == [[0x76543210]]


@pytest.mark.parametrize("bits", [4, 8])
def test_types_and_shapes_are_those_of_the_format(bits: int) -> None:
    packed = packed_layer(QuantSpec(bits, 8))
    assert packed.weight_zero_point is not None
    assert (packed.weight_packed.dtype, tuple(packed.weight_packed.shape)) == (torch.int32, (16, 24 * bits // 32))
    assert (packed.weight_zero_point.dtype, tuple(packed.weight_zero_point.shape)) == (torch.int32, (16 * bits // 32, 3))
    assert (packed.weight_scale.dtype, tuple(packed.weight_scale.shape)) == (torch.bfloat16, (16, 3))
    assert (packed.weight_shape.dtype, packed.weight_shape.tolist()) == (torch.int64, [16, 24])
    assert all(tensor is not None and tensor.is_contiguous() for tensor in packed)


@EXAMPLES
@given(seed=st.integers(0, 10**6), bits=st.sampled_from([4, 8]), symmetric=st.booleans(), rows=st.integers(1, 17), groups=st.integers(1, 3))
def test_unpacking_gives_back_what_was_packed(seed: int, bits: int, symmetric: bool, rows: int, groups: int) -> None:
    spec = QuantSpec(bits, 4, symmetric)
    original = layer(spec, seed, rows=rows, groups=groups)
    packed = pack(*original, bits=bits, symmetric=symmetric)
    assert (packed.weight_zero_point is None) == symmetric
    for got, expected in zip(unpack(packed, bits=bits), original, strict=True):
        assert got.dtype == expected.dtype
        assert torch.equal(got, expected)


@EXAMPLES
@given(seed=st.integers(0, 10**6), bits=st.sampled_from([4, 8]), rows=st.integers(1, 17), groups=st.integers(1, 3))
def test_words_equal_those_of_the_formats_own_packer(seed: int, bits: int, rows: int, groups: int) -> None:
    helpers = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    q, zero_point, scale = layer(QuantSpec(bits, 4), seed, rows=rows, groups=groups)
    packed = pack(q, zero_point, scale, bits=bits)
    half = 2 ** (bits - 1)
    assert packed.weight_zero_point is not None
    assert torch.equal(packed.weight_packed, helpers.pack_to_int32((q - half).to(torch.int8), bits))
    assert torch.equal(packed.weight_zero_point, helpers.pack_to_int32((zero_point - half).to(torch.int8), bits, packed_dim=0))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("symmetric", [False, True])
def test_the_formats_own_reader_gets_our_dequantised_weights(bits: int, symmetric: bool) -> None:
    spec = QuantSpec(bits, 8, symmetric)
    compressor = pytest.importorskip("compressed_tensors.compressors.pack_quantized.base").PackedQuantizationCompressor
    q, zero_point, scale = layer(spec)
    stored = pack(q, zero_point, scale, bits=bits, symmetric=symmetric, dtype=torch.float32)
    state = {name: tensor for name, tensor in stored._asdict().items() if tensor is not None}
    read = compressor.decompress(state, scheme(spec))["weight"]
    assert torch.equal(read, dequantize(q, layer(spec).qparams, spec))


def test_the_way_over_from_the_awq_layout_gives_identical_weights_and_tensors() -> None:
    spec = QuantSpec(4, 8)
    original = layer(spec)
    stored = pack_awq.unpack(pack_awq.pack(*original))
    repacked = unpack(pack(*stored, bits=4, dtype=torch.float16), bits=4)
    assert torch.equal(dequantize(repacked.q, repacked.qparams, spec), dequantize(original.q, original.qparams, spec))


def test_the_formats_own_converter_turns_our_awq_tensors_into_our_compressed_ones() -> None:
    converters = pytest.importorskip("compressed_tensors.entrypoints.convert.converters.autoawq")
    original = layer(QuantSpec(4, 8))
    awq = pack_awq.pack(*original)
    converter = converters.AutoAWQConverter(group_size=8)
    converted = converter.process({f"layer.{name}": tensor for name, tensor in awq._asdict().items()})
    ours = pack(*original, bits=4, dtype=torch.float16)._asdict()
    assert {name.removeprefix("layer.") for name in converted} == set(ours)
    for name, tensor in ours.items():
        assert torch.equal(converted[f"layer.{name}"], tensor)


@pytest.mark.parametrize("bits", [2, 3, 5, 16])
def test_other_widths_are_refused(bits: int) -> None:
    q, zero_point, scale = layer(QuantSpec(2, 8))
    with pytest.raises(ValueError, match="expected 4 or 8"):
        pack(q, zero_point, scale, bits=bits)


def test_a_scale_that_the_stored_type_does_not_hold_is_refused() -> None:
    q, zero_point, scale = layer(QuantSpec(4, 8))
    with pytest.raises(ValueError, match="bfloat16"):
        pack(q, zero_point, scale * 1.001, bits=4)


def test_a_symmetric_layer_with_zero_points_off_the_middle_is_refused() -> None:
    with pytest.raises(ValueError, match="other than 8"):
        pack(*layer(QuantSpec(4, 8)), bits=4, symmetric=True)


@pytest.mark.parametrize(
    "wrong",
    [
        {"weight_shape": torch.tensor([16, 32])},
        {"weight_shape": torch.tensor([8, 24])},
        {"weight_scale": torch.ones(16, 5)},
        {"weight_zero_point": torch.zeros(2, 4, dtype=torch.int32)},
        {"weight_zero_point": torch.zeros(3, 3, dtype=torch.int32)},
        {"weight_packed": torch.zeros(16, 3)},
    ],
)
def test_tensors_that_do_not_belong_together_are_refused(wrong: dict[str, torch.Tensor]) -> None:
    with pytest.raises(ValueError, match=r"compressed-tensors layout|packed words"):
        unpack(packed_layer(QuantSpec(4, 8))._replace(**wrong), bits=4)
