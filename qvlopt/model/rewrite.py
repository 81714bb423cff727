"""Writes a checkpoint folder that is a source with some tensors replaced; everything else keeps its very bytes.

Tensors that stay are copied by byte range, files that stay are copied as they are; the weight index is made anew, so
it never names what is not there.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from qvlopt.artifact.manifest import MANIFEST
from qvlopt.artifact.tensor_writer import FolderWriter
from qvlopt.artifact.tensors import TensorFiles
from qvlopt.errors import RunError
from qvlopt.model.source import Source

CODES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int32: "I32", torch.int64: "I64", torch.float64: "F64"}
FLOATS = {"F32", "F16", "BF16", "F64"}
_REPLACED = (MANIFEST, "config.json", "README.md")
_NOT_COPIED = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".pt", ".pth", ".ckpt", ".gguf", ".onnx", ".h5", ".msgpack")
_DTYPE_KEYS = ("dtype", "torch_dtype")


@dataclass(frozen=True)
class Rewrite:
    """What becomes of a source. Names are stored names, as in the source's files.

    removed: tensors that go. added: tensors that are new or other than before. cast: dtype that every remaining float
    tensor is cast to; None keeps the bytes. quantization_config: what config.json gets.
    """

    removed: frozenset[str] = frozenset()
    added: Mapping[str, torch.Tensor] = field(default_factory=dict)
    cast: torch.dtype | None = None
    quantization_config: Mapping[str, Any] | None = None


def write_rewritten(folder: Path, source: Source, rewrite: Rewrite) -> None:
    """Writes weights, config and all other files of the source into the empty `folder`.

    Raises RunError naming the tensor that does not fit the range of `rewrite.cast`.
    """
    kept = [entry for name, entry in source.tensors.entries.items() if name not in rewrite.removed and name not in rewrite.added]
    plan = [(entry.name, _code(entry.dtype, rewrite.cast), entry.shape) for entry in kept]
    plan += [(name, CODES[tensor.dtype], tuple(tensor.shape)) for name, tensor in rewrite.added.items()]
    with FolderWriter(folder, sorted(plan)) as writer:
        for entry in kept:
            same = _code(entry.dtype, rewrite.cast) == entry.dtype
            writer.write(entry.name, entry if same else _cast(source, entry.name, rewrite.cast))
        for name, tensor in rewrite.added.items():
            writer.write(name, tensor)
    _copy_files(folder, source.folder)
    _write_config(folder, source, rewrite)


def verify_rewritten(folder: Path, source: Source, rewrite: Rewrite) -> dict[str, str]:
    """Reads the written tensors again: SHA-256 of each by name. Raises RunError naming one that is not what was meant."""
    written = TensorFiles.open(folder)
    expected = (set(source.tensors.entries) - rewrite.removed) | set(rewrite.added)
    if set(written.entries) != expected:
        odd = sorted(set(written.entries) ^ expected)
        raise RunError(f"{folder}: self-check failed, the tensors are not those planned: {odd[0]}")
    digests: dict[str, str] = {}
    for name in written.entries:
        digests[name] = written.sha256(name)
        if name in rewrite.added:
            good = torch.equal(written.read(name), rewrite.added[name].cpu())
        elif written.entry(name).dtype == source.tensors.entry(name).dtype:
            good = digests[name] == source.tensors.sha256(name)
        else:
            good = torch.equal(written.read(name), _cast(source, name, rewrite.cast))
        if not good:
            raise RunError(f"{folder}: self-check failed, {name} is not what was meant", "is the disk sound?")
    return digests


def _code(stored: str, cast: torch.dtype | None) -> str:
    return CODES[cast] if cast is not None and stored in FLOATS else stored


def _cast(source: Source, name: str, dtype: torch.dtype | None) -> torch.Tensor:
    assert dtype is not None
    tensor = source.tensors.read(name)
    cast = tensor.to(dtype)
    if bool((~torch.isfinite(cast) & torch.isfinite(tensor)).any()):
        largest = float(tensor.abs().max())
        raise RunError(f"{name}: {largest:g} does not fit {dtype}, whose largest is {torch.finfo(dtype).max:g}", "set quantize_awq.dtype: source")
    return cast


def _copy_files(folder: Path, source: Path) -> None:
    """The source's other files. Hidden ones, weights of other kinds and another artifact's manifest are not the model's."""
    for path in sorted(source.iterdir()):
        if path.is_file() and not path.name.startswith(".") and path.name not in _REPLACED and not path.name.endswith(_NOT_COPIED):
            shutil.copyfile(path, folder / path.name)


def _write_config(folder: Path, source: Source, rewrite: Rewrite) -> None:
    """config.json: its own bytes unless the dtype or the quantisation changed; never passed through a library's config."""
    path = source.folder / "config.json"
    if rewrite.cast is None and rewrite.quantization_config is None:
        shutil.copyfile(path, folder / "config.json")
        return
    config = json.loads(path.read_text(encoding="utf-8"))
    if rewrite.cast is not None:
        _set_dtype(config, str(rewrite.cast).removeprefix("torch."))
    if rewrite.quantization_config is not None:
        config["quantization_config"] = dict(rewrite.quantization_config)
    (folder / "config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _set_dtype(config: dict[str, Any], dtype: str) -> None:
    parts = [config, *(part for part in config.values() if isinstance(part, dict))]
    for part in parts:
        for key in _DTYPE_KEYS:
            if key in part:
                part[key] = dtype
    if not any(key in config for key in _DTYPE_KEYS):
        config["dtype"] = dtype
