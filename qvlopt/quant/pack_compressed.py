"""compressed-tensors' pack-quantized layout: integers packed along the inputs, zero points along the outputs.

Value i of a word sits in bits i*bits and up, so the 4-bit values 0..7 make 0x76543210. The format describes signed
integers and stores them with half the range added: its stored numbers are our unsigned ones. Source: compressed-tensors
0.20.1, compressors/pack_quantized.

Letters in shapes: N outputs, K inputs, G groups.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from qvlopt.quant.rounding import Integers
from qvlopt.quant.words import pack_words, unpack_words

WIDTHS = (4, 8)


class CompressedTensors(NamedTuple):
    """The stored tensors. weight_packed: int32 [N, K*bits/32]. weight_scale: [N, G]. weight_shape: int64 [2] = N, K.

    weight_zero_point: int32 [N*bits/32, G], None in a symmetric layer.
    """

    weight_packed: torch.Tensor
    weight_scale: torch.Tensor
    weight_shape: torch.Tensor
    weight_zero_point: torch.Tensor | None


def pack(
    q: torch.Tensor, zero_point: torch.Tensor, scale: torch.Tensor, *, bits: int, symmetric: bool = False, dtype: torch.dtype = torch.bfloat16
) -> CompressedTensors:
    """The tensors of one layer from `q` [N, K] and `zero_point` [N, G] in 0..2**bits-1 and `scale` [N, G]; `dtype` of the scales.

    Raises ValueError on bits other than 4 and 8, on integers out of range, on a scale that `dtype` cannot hold and on a
    symmetric layer with a zero point off the middle.
    """
    _check_bits(bits)
    stored_scale = scale.to(dtype)
    if not torch.equal(stored_scale.to(scale.dtype), scale):
        raise ValueError(f"compressed-tensors layout: a scale is not exact in {dtype}, expected scales made by qparams()")
    if symmetric and not bool((zero_point == 2 ** (bits - 1)).all()):
        raise ValueError(f"compressed-tensors layout: a symmetric layer has zero points other than {2 ** (bits - 1)}")
    packed_zero_point = None if symmetric else pack_words(zero_point.T, bits).T.contiguous()
    return CompressedTensors(
        weight_packed=pack_words(q, bits),
        weight_scale=stored_scale,
        weight_shape=torch.tensor(q.shape, dtype=torch.int64),
        weight_zero_point=packed_zero_point,
    )


def unpack(tensors: CompressedTensors, *, bits: int) -> Integers:
    """What was packed. Raises ValueError on shapes or types that do not belong together."""
    _check_bits(bits)
    packed, scale, shape, zero_point = tensors
    rows, width = (int(size) for size in shape.tolist())
    if packed.shape[0] != rows or scale.ndim != 2 or scale.shape[0] != rows or scale.shape[1] < 1 or width % scale.shape[1]:
        raise ValueError(
            f"compressed-tensors layout: got weight_packed {tuple(packed.shape)} and weight_scale {tuple(scale.shape)} "
            f"for a weight of shape ({rows}, {width})"
        )
    if zero_point is None:
        zeros = torch.full(scale.shape, 2 ** (bits - 1), dtype=torch.int32, device=scale.device)
    elif zero_point.ndim == 2 and zero_point.shape[1] == scale.shape[1]:
        zeros = unpack_words(zero_point.T, bits, rows).T.contiguous()
    else:
        raise ValueError(f"compressed-tensors layout: got weight_zero_point {tuple(zero_point.shape)} for weight_scale {tuple(scale.shape)}")
    return Integers(q=unpack_words(packed, bits, width), zero_point=zeros, scale=scale.float())


def _check_bits(bits: int) -> None:
    if bits not in WIDTHS:
        raise ValueError(f"compressed-tensors layout: got {bits} bits, expected 4 or 8")
