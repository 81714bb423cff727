"""The header of a safetensors file: read and checked, or built, without touching the tensors.

Format (huggingface/safetensors, README "Format"): 8 bytes little-endian length, that many bytes of JSON, then the
tensors' bytes without gaps; `data_offsets` count from the first byte after the header.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from qvlopt.errors import RunError

DTYPE_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
    "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4,
    "U64": 8, "I64": 8, "F64": 8,
}  # fmt: skip
"""Bytes an element by safetensors dtype code; the sub-byte codes (F4, F6_*) are refused by name."""

MAX_HEADER_BYTES = 100_000_000
"""The limit of the reference implementation; a longer header is a broken or hostile file."""


class Planned(NamedTuple):
    """A tensor that will be written: its name, safetensors dtype code and shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return DTYPE_BYTES[self.dtype] * prod(self.shape)


@dataclass(frozen=True)
class TensorEntry:
    """Where a tensor lies: bytes `start` to `end` of `file`, counted from the file's first byte."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    start: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.start


def read_header(file: Path) -> dict[str, TensorEntry]:
    """The tensors of one safetensors file by name, in the order of their bytes.

    Raises RunError, naming the file, when it is cut or too long, when the header is no valid JSON, or when an entry has
    an unknown dtype, a size unlike dtype * shape, or bytes that overlap another's, leave a gap or lie outside the file.
    """
    fields, data_start, file_bytes = _read_json(file)
    entries = [_entry(file, name, value, data_start) for name, value in fields.items() if name != "__metadata__"]
    entries.sort(key=lambda entry: (entry.start, entry.end))
    position = data_start
    for entry in entries:
        if entry.start != position:
            fault = "overlaps the tensor before it" if entry.start < position else "leaves a gap before it"
            raise _broken(file, f"tensor {entry.name!r} {fault}: expected it to start at byte {position}, got {entry.start}")
        position = entry.end
    if position != file_bytes:
        fault = "is cut" if file_bytes < position else "has bytes after its last tensor"
        raise RunError(f"{file} {fault}: expected {position} bytes by its header, got {file_bytes}", hint="Download or copy the file again.")
    return {entry.name: entry for entry in entries}


def build_header(plan: Iterable[Planned], *, metadata: Mapping[str, str]) -> tuple[bytes, dict[str, tuple[int, int]]]:
    """The first bytes of a file (length and padded JSON) and each tensor's (start, end) in that file.

    Wide dtypes come first, then names in order, as the reference implementation does: every tensor stays aligned and
    the same plan gives the same bytes.
    """
    ordered = sorted(plan, key=lambda planned: (-DTYPE_BYTES[planned.dtype], planned.name))
    fields: dict[str, Any] = {"__metadata__": dict(sorted(metadata.items()))}
    offsets: dict[str, tuple[int, int]] = {}
    position = 0
    for planned in ordered:
        end = position + planned.nbytes
        fields[planned.name] = {"dtype": planned.dtype, "shape": list(planned.shape), "data_offsets": [position, end]}
        offsets[planned.name] = (position, end)
        position = end
    text = json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    data_start = 8 + len(text)
    return struct.pack("<Q", len(text)) + text, {name: (data_start + start, data_start + end) for name, (start, end) in offsets.items()}


def _read_json(file: Path) -> tuple[dict[str, Any], int, int]:
    """The header's JSON object, the first byte after it, and the file's size."""
    with open(file, "rb") as stream:
        file_bytes = os.fstat(stream.fileno()).st_size
        prefix = stream.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else None
        if length is None or 8 + length > file_bytes:
            expected = "at least 8" if length is None else f"at least {8 + length}"
            raise RunError(
                f"{file} is cut or is no safetensors file: expected {expected} bytes, got {file_bytes}", hint="Download or copy the file again."
            )
        if length > MAX_HEADER_BYTES:
            raise _broken(file, f"the header claims {length} bytes, the limit is {MAX_HEADER_BYTES}")
        text = stream.read(length)
    try:
        fields = json.loads(text.decode(), object_pairs_hook=_without_duplicates)
    except (ValueError, RecursionError) as error:
        raise _broken(file, f"the header is not valid JSON ({error})") from error
    if not isinstance(fields, dict):
        raise _broken(file, "the header is not a JSON object")
    return fields, 8 + length, file_bytes


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the name {next(name for name in names if names.count(name) > 1)!r} occurs twice")
    return fields


def _entry(file: Path, name: str, value: Any, data_start: int) -> TensorEntry:
    """One checked header entry; the offsets are not yet compared with those of other tensors."""
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        raise _broken(file, f"tensor {name!r} needs exactly dtype, shape and data_offsets")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        raise _broken(file, f"tensor {name!r} has dtype {dtype!r}; supported are {', '.join(DTYPE_BYTES)}")
    if not _are_counts(shape) or not _are_counts(offsets) or len(offsets) != 2:
        raise _broken(file, f"tensor {name!r} has shape {shape!r} and data_offsets {offsets!r}; expected whole numbers from 0")
    size = DTYPE_BYTES[dtype] * prod(shape)
    if offsets[1] - offsets[0] != size:
        raise _broken(file, f"tensor {name!r} ({dtype} {shape}) needs {size} bytes, its data_offsets {offsets} give {offsets[1] - offsets[0]}")
    return TensorEntry(name, dtype, tuple(shape), file, data_start + offsets[0], data_start + offsets[1])


def _are_counts(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)


def _broken(file: Path, fault: str) -> RunError:
    return RunError(f"{file} is not a valid safetensors file: {fault}", hint="Download or copy the file again.")
