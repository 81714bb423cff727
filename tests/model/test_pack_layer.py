"""The three formats hold the same integers."""

from __future__ import annotations

import pytest
import torch

from qvlopt.model.pack_layer import Format, pack_layer
from qvlopt.model.quantize import dequantized
from qvlopt.quant import pack_awq, pack_compressed
from qvlopt.quant.rounding import Integers, QuantSpec, qparams, quantize

FORMS: tuple[Format, ...] = ("awq", "compressed-tensors", "bf16")


def layer(spec: QuantSpec) -> Integers:
    weight = torch.randn(24, 128, generator=torch.Generator().manual_seed(0))
    qp = qparams(weight, spec)
    return Integers(quantize(weight, qp, spec), qp.zero_point, qp.scale)


def same(got: Integers, expected: Integers) -> bool:
    return all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_each_format_has_its_own_tensors() -> None:
    spec = QuantSpec(4, 32)
    suffixes = {form: set(pack_layer(layer(spec), spec, form=form, dtype=torch.bfloat16)) for form in FORMS}
    assert suffixes["awq"] == {"qweight", "qzeros", "scales"}
    assert suffixes["compressed-tensors"] == {"weight_packed", "weight_scale", "weight_shape", "weight_zero_point"}
    assert suffixes["bf16"] == {"weight"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_awq_and_compressed_tensors_unpack_to_the_very_integers(dtype: torch.dtype) -> None:
    spec = QuantSpec(4, 32)
    integers = layer(spec)
    awq = pack_layer(integers, spec, form="awq", dtype=dtype)
    compressed = pack_layer(integers, spec, form="compressed-tensors", dtype=dtype)
    assert same(pack_awq.unpack(pack_awq.AwqTensors(**awq)), integers)
    assert same(pack_compressed.unpack(pack_compressed.CompressedTensors(**compressed), bits=4), integers)
    assert awq["scales"].dtype == torch.float16
    assert compressed["weight_scale"].dtype == dtype


@pytest.mark.parametrize("bits", range(2, 9))
def test_bf16_holds_what_engines_would_compute_at_any_width(bits: int) -> None:
    spec = QuantSpec(bits, 64)
    weight = pack_layer(layer(spec), spec, form="bf16", dtype=torch.bfloat16)["weight"]
    assert torch.equal(weight, dequantized(layer(spec), spec, torch.bfloat16))
    assert len(set(weight[0, :64].tolist())) <= 2**bits


def test_eight_bits_and_symmetric_layers_fit_compressed_tensors() -> None:
    eight, symmetric = QuantSpec(8, 32), QuantSpec(4, 32, symmetric=True)
    packed = pack_layer(layer(eight), eight, form="compressed-tensors", dtype=torch.bfloat16)
    assert same(pack_compressed.unpack(pack_compressed.CompressedTensors(**packed), bits=8), layer(eight))
    packed = pack_layer(layer(symmetric), symmetric, form="compressed-tensors", dtype=torch.bfloat16)
    assert "weight_zero_point" not in packed
    restored = pack_compressed.unpack(pack_compressed.CompressedTensors(**packed, weight_zero_point=None), bits=4)
    assert same(restored, layer(symmetric))
