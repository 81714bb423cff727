"""Tensors of a checkpoint folder: found by name and read by byte range; `tensor_writer` writes them.

Nothing is mapped into memory and no tensor is decoded to be copied or hashed, so memory use is one tensor or one chunk.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from qvlopt.artifact.byte_ranges import read_chunks, read_range
from qvlopt.artifact.containment import contained_file
from qvlopt.artifact.header import Planned, TensorEntry, read_header
from qvlopt.artifact.tensor_writer import MAX_SHARD_BYTES, FolderWriter, TensorWriter, dtype_code, torch_dtype, write_index
from qvlopt.errors import RunError

if TYPE_CHECKING:  # commands that only list tensors start without torch
    import torch

__all__ = ["MAX_SHARD_BYTES", "WEIGHTS", "FolderWriter", "Planned", "TensorEntry", "TensorFiles", "TensorWriter", "dtype_code", "write_index"]

WEIGHTS = "model.safetensors"

_AGAIN = "Download the checkpoint again."


class TensorFiles:
    """The tensors of one folder: headers are read once, bytes on demand."""

    def __init__(self, folder: Path, entries: Mapping[str, TensorEntry]) -> None:
        self.folder = folder
        self.entries: dict[str, TensorEntry] = dict(entries)

    @classmethod
    def open(cls, folder: Path, *, weights: str = WEIGHTS) -> TensorFiles:
        """Reads the header of the file `weights`, or of the shards that `weights`.index.json names.

        Raises RunError, naming the file, when neither exists, when a shard is missing, cut, broken or outside the folder,
        when the index and the headers name different tensors, and when weights of another set lie in the folder.
        """
        folder = Path(folder)
        index = folder / f"{weights}.index.json"
        if not index.exists():
            return cls(folder, _single_header(folder, weights))
        weight_map = _read_weight_map(contained_file(folder, index.name, named_by=str(folder)))
        shards: dict[str, set[str]] = {}
        for name, shard in weight_map.items():
            shards.setdefault(shard, set()).add(name)
        _refuse_other_set(folder, weights, set(shards))
        entries: dict[str, TensorEntry] = {}
        for shard, names in sorted(shards.items()):
            header = read_header(_shard(folder, shard, index))
            if names != set(header):
                raise RunError(f"{index} and the header of {shard} disagree: {_difference(names, set(header))}", hint=_AGAIN)
            entries.update(header)
        return cls(folder, entries)

    def entry(self, name: str) -> TensorEntry:
        """Where the tensor lies; raises RunError, naming the folder, when there is none of that name."""
        entry = self.entries.get(name)
        if entry is None:
            raise RunError(f"{self.folder} has no tensor {name!r} among its {len(self.entries)}", hint="Is the checkpoint complete?")
        return entry

    def read(self, name: str) -> torch.Tensor:
        """The tensor in its stored dtype and shape, on the CPU, in memory of its own."""
        import torch

        entry = self.entry(name)
        dtype = torch_dtype(entry.dtype)
        if entry.nbytes == 0:
            return torch.empty(entry.shape, dtype=dtype)
        return torch.frombuffer(read_range(entry), dtype=dtype).reshape(entry.shape)

    def read_bytes(self, name: str) -> bytes:
        """The tensor's bytes as stored (little-endian, row-major)."""
        return bytes(read_range(self.entry(name)))

    def sha256(self, name: str) -> str:
        """Hex SHA-256 of the tensor's bytes; dtype and shape are not part of it."""
        digest = hashlib.sha256()
        for chunk in read_chunks(self.entry(name)):
            digest.update(chunk)
        return digest.hexdigest()


def _single_header(folder: Path, weights: str) -> dict[str, TensorEntry]:
    if not folder.is_dir():
        raise RunError(f"{folder} is not a folder", hint="Name a folder that holds config.json and safetensors files.")
    if not (folder / weights).exists():
        pickles = sorted(path.name for path in folder.iterdir() if path.suffix in {".bin", ".pt", ".pth", ".ckpt"})
        if pickles:
            fault = f"{folder} has no {weights}, only {pickles[0]}, which can run code when it is read"
            raise RunError(fault, hint="Save the checkpoint as safetensors.")
        raise RunError(f"{folder} has neither {weights} nor {weights}.index.json", hint="Name a folder that holds a whole checkpoint.")
    _refuse_other_set(folder, weights, {weights})
    return read_header(contained_file(folder, weights, named_by=str(folder)))


def _read_weight_map(index: Path) -> dict[str, str]:
    """Tensor name to shard name; raises RunError when the index is not JSON of that form."""
    try:
        fields = json.loads(index.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise RunError(f"{index} cannot be read: {error}", hint=_AGAIN) from error
    weight_map = fields.get("weight_map") if isinstance(fields, dict) else None
    if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise RunError(f"{index} has no weight_map from tensor names to file names", hint=_AGAIN)
    return weight_map


def _shard(folder: Path, shard: str, index: Path) -> Path:
    path = contained_file(folder, shard, named_by=str(index))
    if not path.is_file():
        raise RunError(f"{index} names the shard {shard}, which is missing in {folder}", hint=_AGAIN)
    return path


def _refuse_other_set(folder: Path, weights: str, used: set[str]) -> None:
    """Two sets of weights in one folder: other tools would take either, so neither is read."""
    stem = re.escape(weights.removesuffix(".safetensors"))
    pattern = re.compile(rf"{stem}(-\d+-of-\d+)?\.safetensors")
    strays = sorted(path.name for path in folder.iterdir() if pattern.fullmatch(path.name) and path.name not in used)
    if strays:
        raise RunError(f"{folder} holds two sets of weights: {strays[0]} does not belong to {min(used)}", hint="Remove the files of the older set.")


def _difference(mapped: set[str], stored: set[str]) -> str:
    """Names of at most one tensor on each side that the other lacks."""
    parts = []
    if mapped - stored:
        parts.append(f"{len(mapped - stored)} tensors are only in the index, such as {min(mapped - stored)!r}")
    if stored - mapped:
        parts.append(f"{len(stored - mapped)} tensors are only in the file, such as {min(stored - mapped)!r}")
    return "; ".join(parts)
