"""AutoAWQ's GEMM layout: 4-bit integers and zero points, transposed, eight neighbouring outputs a word, interleaved.

Column 8c + ORDER[i] of the transposed matrix sits in bits 4i..4i+3 of word c, so outputs 0..7 with the values 0..7 make
0x75316420. Source: AutoAWQ 0.2.9, awq/modules/linear/gemm.py; vLLM, gptqmodel and transformers read the same.

Letters in shapes: N outputs, K inputs, G groups.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from qvlopt.quant.rounding import Integers
from qvlopt.quant.words import pack_words, unpack_words

BITS = 4
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
LANES = len(ORDER)


class AwqTensors(NamedTuple):
    """The stored tensors. qweight: int32 [K, N/8]. qzeros: int32 [G, N/8]. scales: float16 [G, N]."""

    qweight: torch.Tensor
    qzeros: torch.Tensor
    scales: torch.Tensor


def pack(q: torch.Tensor, zero_point: torch.Tensor, scale: torch.Tensor) -> AwqTensors:
    """The tensors of one layer from `q` [N, K] and `zero_point` [N, G] in 0..15 and `scale` [N, G].

    Raises ValueError on a number of outputs that 8 does not divide, on integers out of range and on a scale that float16
    cannot hold.
    """
    if q.shape[0] % LANES:
        raise ValueError(f"AWQ layout: got {q.shape[0]} outputs, expected a multiple of {LANES}")
    scales = scale.to(torch.float16)
    if not torch.equal(scales.to(scale.dtype), scale):
        raise ValueError("AWQ layout: a scale is not exact in float16, expected scales made by qparams()")
    return AwqTensors(_pack_columns(q.T), _pack_columns(zero_point.T), scales.T.contiguous())


def unpack(tensors: AwqTensors) -> Integers:
    """What was packed. Raises ValueError on shapes or types that do not belong together."""
    qweight, qzeros, scales = tensors
    outputs = scales.shape[-1]
    fitting = scales.ndim == qweight.ndim == 2 and scales.shape[0] > 0 and qweight.shape[0] % scales.shape[0] == 0
    if not fitting or outputs % LANES or qzeros.shape != (scales.shape[0], outputs // LANES):
        shapes = [tuple(tensor.shape) for tensor in tensors]
        raise ValueError(f"AWQ layout: got qweight, qzeros, scales of shapes {shapes}, expected [K, N/8], [G, N/8], [G, N]")
    return Integers(
        q=_unpack_columns(qweight, outputs).T.contiguous(),
        zero_point=_unpack_columns(qzeros, outputs).T.contiguous(),
        scale=scales.float().T.contiguous(),
    )


def _pack_columns(values: torch.Tensor) -> torch.Tensor:
    lanes = values.reshape(values.shape[0], -1, LANES)[..., list(ORDER)]
    return pack_words(lanes.flatten(1), BITS)


def _unpack_columns(words: torch.Tensor, count: int) -> torch.Tensor:
    lanes = unpack_words(words, BITS, count).view(words.shape[0], -1, LANES)
    back = [ORDER.index(column) for column in range(LANES)]
    return torch.flatten(lanes[..., back], 1)
