"""Which module a stored tensor belongs to, and what a quantised one amounts to: `INT4 g128`, whatever its packing."""

from __future__ import annotations

import hashlib
import re
import struct
from collections.abc import Mapping
from math import prod
from typing import NamedTuple

from qvlopt.artifact.byte_ranges import read_chunks
from qvlopt.artifact.header import TensorEntry
from qvlopt.artifact.tensors import TensorFiles

WORD_BITS = 32
"""Packed weights are stored as int32 words."""

_SCALED = {"I8": "INT8", "F8_E4M3": "FP8", "F8_E5M2": "FP8_E5M2"}
"""What a weight of these codes is called when a scale belongs to it."""


class ModuleRow(NamedTuple):
    """One module as stored: dtype and shape of its weight as the layer uses it, bytes of all its tensors.

    `sha256` is that of the tensors' bytes, in the order of their names; None where it was not computed.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int
    sha256: str | None = None


def module_rows(files: TensorFiles, *, digests: bool = False) -> tuple[ModuleRow, ...]:
    """A row for every module that has tensors, in natural order of names. Reads headers, and all bytes for `digests`."""
    modules: dict[str, dict[str, TensorEntry]] = {}
    for name, entry in files.entries.items():
        module, _, parameter = name.rpartition(".")
        modules.setdefault(module or name, {})[parameter] = entry
    return tuple(_row(name, modules[name], files, digests) for name in sorted(modules, key=natural_order))


def _row(name: str, tensors: Mapping[str, TensorEntry], files: TensorFiles, digests: bool) -> ModuleRow:
    dtype, shape = _weight(tensors, files)
    digest = _sha256(tensors) if digests else None
    return ModuleRow(name, dtype, shape, sum(entry.nbytes for entry in tensors.values()), digest)


def _weight(tensors: Mapping[str, TensorEntry], files: TensorFiles) -> tuple[str, tuple[int, ...]]:
    """Dtype in words and shape [N, K] (outputs, inputs) of a quantised layer; else those of the weight or first tensor."""
    matrices = {parameter for parameter, entry in tensors.items() if len(entry.shape) == 2 and 0 not in entry.shape}
    if {"qweight", "qzeros", "scales"} <= matrices:
        return _awq_or_gptq(tensors)
    if {"weight_packed", "weight_scale"} <= matrices:
        return _compressed_tensors(tensors, files)
    weight = tensors.get("weight") or tensors[min(tensors)]
    scale = tensors.get("weight_scale_inv") or tensors.get("weight_scale")
    if scale is not None and weight.dtype in _SCALED and len(weight.shape) == 2:
        return f"{_SCALED[weight.dtype]} {_granularity(weight.shape, scale.shape)}", weight.shape
    return weight.dtype, weight.shape


def _awq_or_gptq(tensors: Mapping[str, TensorEntry]) -> tuple[str, tuple[int, ...]]:
    """AWQ packs outputs (qweight [K, N/8]), GPTQ inputs (qweight [K/8, N]); both have qzeros [G, N/8], scales [G, N]."""
    packed, (groups, outputs) = tensors["qweight"].shape, tensors["scales"].shape
    bits = max(1, tensors["qzeros"].shape[1] * WORD_BITS // outputs)
    inputs = packed[0] * WORD_BITS // bits if packed[1] == outputs else packed[0]
    return _integer(bits, inputs, groups), (outputs, inputs)


def _compressed_tensors(tensors: Mapping[str, TensorEntry], files: TensorFiles) -> tuple[str, tuple[int, ...]]:
    """weight_packed [N, ceil(K * bits / 32)], weight_scale [N, G]; K stands in weight_shape (int64 [2]), which is read."""
    outputs, words = tensors["weight_packed"].shape
    shape = tensors.get("weight_shape")
    if shape is None or (shape.dtype, shape.shape) != ("I64", (2,)):
        return tensors["weight_packed"].dtype, tensors["weight_packed"].shape
    outputs, inputs = struct.unpack("<2q", files.read_bytes(shape.name))
    return _integer(words * WORD_BITS // max(1, inputs), inputs, tensors["weight_scale"].shape[1]), (outputs, inputs)


def _integer(bits: int, inputs: int, groups: int) -> str:
    return f"INT{bits} channel" if groups <= 1 else f"INT{bits} g{inputs // groups}"


def _granularity(weight: tuple[int, ...], scale: tuple[int, ...]) -> str:
    """What shares a scale: the tensor, an output channel, a group of one, or a block of rows and columns."""
    if len(scale) < 2:
        return "tensor" if prod(scale) == 1 else "channel"
    if scale == (weight[0], 1):
        return "channel"
    rows, columns = _block(weight[0], scale[0]), _block(weight[1], scale[1])
    return f"g{columns}" if rows == 1 else f"{rows}x{columns}"


def _block(size: int, blocks: int) -> int:
    """The power of two of which `blocks` cover `size`, the last one perhaps in part; else an even share."""
    share = -(-size // blocks)
    power = 1 << (share - 1).bit_length()
    return power if -(-size // power) == blocks else share


def _sha256(tensors: Mapping[str, TensorEntry]) -> str:
    digest = hashlib.sha256()
    for _, entry in sorted(tensors.items()):
        for chunk in read_chunks(entry):
            digest.update(chunk)
    return digest.hexdigest()


def natural_order(name: str) -> list[tuple[int, str]]:
    """Sort key that puts `blocks.2` before `blocks.10`."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"([0-9]+)", name)]
