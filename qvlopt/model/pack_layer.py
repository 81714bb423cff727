"""The stored tensors of one quantised linear in each of the three formats: re-packings of the same integers."""

from __future__ import annotations

from typing import Literal

import torch

from qvlopt.model.round_layer import dequantized
from qvlopt.quant import pack_awq, pack_compressed
from qvlopt.quant.rounding import Integers, QuantSpec

Format = Literal["awq", "compressed-tensors", "bf16"]


def pack_layer(integers: Integers, spec: QuantSpec, *, form: Format, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Tensors by their suffix after the linear's name. `dtype`: the checkpoint's, of a dequantised weight and CT's scales."""
    if form == "awq":
        return pack_awq.pack(*integers)._asdict()
    if form == "compressed-tensors":
        packed = pack_compressed.pack(*integers, bits=spec.bits, symmetric=spec.symmetric, dtype=dtype)
        return {suffix: tensor for suffix, tensor in packed._asdict().items() if tensor is not None}
    return {"weight": dequantized(integers, spec, dtype)}
