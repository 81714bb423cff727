"""How a parameter is stored: as it is, or quantised in one of three layouts; and the one rule that widens it again.

The rule: (q - zero_point) * scale in float32, rounded to the checkpoint's own dtype. So a quantised checkpoint is, weight
for weight, the bf16 (or fp16) twin that `quantize-awq` writes, and an engine in any compute dtype starts from that twin.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Literal, NamedTuple

import torch

from qvlopt.quant import pack_awq, pack_compressed
from qvlopt.quant.rounding import Integers, QuantSpec, dequantize

Kind = Literal["plain", "awq", "compressed", "fp8"]
METHODS: dict[str, Kind] = {"awq": "awq", "compressed-tensors": "compressed", "fp8": "fp8"}
"""quant_method of a config.json and the layout that it announces."""

_LAYOUTS: tuple[tuple[Kind, tuple[str, ...], tuple[str, ...]], ...] = (
    ("fp8", ("weight", "weight_scale_inv"), ()),
    ("plain", ("weight",), ()),
    ("awq", ("qweight", "qzeros", "scales"), ()),
    ("compressed", ("weight_packed", "weight_scale", "weight_shape"), ("weight_zero_point",)),
)
"""Kind, the tensors that a weight of it is made of, and those that it may have; the first that fits is it."""


class Storage(NamedTuple):
    """How one parameter is stored, and the canonical names of the tensors that hold it, in the order of its layout."""

    kind: Kind
    tensors: tuple[str, ...]


def storage_of(parameter: str, names: Collection[str]) -> Storage | None:
    """How `parameter` (such as `lm_head.weight`) is stored among the canonical `names`; None when it is not there."""
    module, _, kind = parameter.rpartition(".")
    if kind != "weight":
        return Storage("plain", (parameter,)) if parameter in names else None
    for layout, needed, possible in _LAYOUTS:
        tensors = tuple(f"{module}.{suffix}" for suffix in needed)
        if all(name in names for name in tensors):
            return Storage(layout, tensors + tuple(f"{module}.{suffix}" for suffix in possible if f"{module}.{suffix}" in names))
    return None


def widened(storage: Storage, read: Callable[[str], torch.Tensor], *, dtype: torch.dtype, fp8_block: tuple[int, int]) -> torch.Tensor:
    """The weight [N, K] that a quantised parameter stands for, in `dtype`, the checkpoint's own.

    `read` gives a tensor by canonical name; `fp8_block` is the config's weight_block_size. Raises ValueError when the
    tensors do not belong together.
    """
    tensors = [read(name) for name in storage.tensors]
    if storage.kind == "awq":
        return _dequantised(pack_awq.unpack(pack_awq.AwqTensors(*tensors)), bits=pack_awq.BITS).to(dtype)
    if storage.kind == "compressed":
        packed, scale, shape = tensors[:3]
        layer = pack_compressed.CompressedTensors(packed, scale, shape, tensors[3] if len(tensors) > 3 else None)
        bits = packed.shape[1] * 32 // max(1, int(shape[1]))
        return _dequantised(pack_compressed.unpack(layer, bits=bits), bits=bits).to(dtype)
    weight, scale = tensors
    return _scaled_blocks(weight, scale, fp8_block).to(dtype)


def _dequantised(integers: Integers, *, bits: int) -> torch.Tensor:
    group_size = integers.q.shape[1] // integers.scale.shape[1]
    return dequantize(integers.q, integers.qparams, QuantSpec(bits, group_size))


def _scaled_blocks(weight: torch.Tensor, scale: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """float8 [N, K] times one scale a block of rows x columns, [ceil(N / rows), ceil(K / columns)], in float32."""
    rows, columns = weight.shape
    expected = (-(-rows // block[0]), -(-columns // block[1]))
    if scale.shape != expected:
        raise ValueError(f"weight_scale_inv is {tuple(scale.shape)}, expected {expected} for {rows}x{columns} in blocks of {block[0]}x{block[1]}")
    spread = scale.float().repeat_interleave(block[0], 0)[:rows].repeat_interleave(block[1], 1)[:, :columns]
    return weight.float() * spread
