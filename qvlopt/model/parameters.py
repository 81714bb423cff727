"""A checkpoint's parameters, read one at a time by canonical name."""

from __future__ import annotations

import torch

from qvlopt.errors import RunError
from qvlopt.model.shapes import EMBEDDING
from qvlopt.model.source import Source
from qvlopt.model.stored import widened

PLAIN_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}
"""Stored dtypes that need no scales, by safetensors code."""


def checkpoint_dtype(source: Source) -> torch.dtype:
    """The dtype that the checkpoint is in: as its config says, else that of the embedding."""
    stored = source.tensors.entry(source.names[source.storages[EMBEDDING].tensors[0]]).dtype
    return source.settings.dtype or PLAIN_DTYPES.get(stored, torch.bfloat16)


def read_parameter(source: Source, parameter: str) -> torch.Tensor:
    """One parameter by canonical name on the CPU: plain ones in their stored dtype, quantised ones in the checkpoint's.

    Raises RunError naming the parameter when its tensors are broken or hold NaN or infinity.
    """
    storage = source.storages[parameter]

    def read(name: str) -> torch.Tensor:
        return source.tensors.read(source.names[name])

    if storage.kind == "plain":
        stored = source.tensors.entry(source.names[parameter]).dtype
        if stored not in PLAIN_DTYPES:
            raise RunError(f"{source.folder}: {source.names[parameter]} is {stored} without scales, expected {', '.join(PLAIN_DTYPES)}")
        return read(parameter)
    block = (source.config.get("quantization_config") or {}).get("weight_block_size") or (128, 128)
    try:
        return widened(storage, read, dtype=checkpoint_dtype(source), fp8_block=(int(block[0]), int(block[1])))
    except ValueError as error:
        raise RunError(f"{source.folder}: {parameter} cannot be unpacked: {error}") from error


def place_parameter(source: Source, parameter: str, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """One parameter in `dtype` on `device`. Raises RunError naming it when it is broken or does not fit the dtype."""
    tensor = read_parameter(source, parameter).to(device=device, dtype=dtype)
    if not bool(torch.isfinite(tensor).all()):
        raise RunError(f"{source.folder}: {parameter} holds NaN or infinity in {dtype}", hint="the file is damaged, or the dtype's range too small")
    return tensor
