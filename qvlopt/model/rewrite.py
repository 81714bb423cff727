"""Writes a checkpoint folder that is a source with some tensors replaced; everything else keeps its very bytes.

Tensors that stay are copied by byte range, files that stay are copied as they are; the weight index is made anew, so
it never names what is not there. Tensors are written under their canonical names: engines know no older ones for this
model (transformers 5.24, conversion_mapping.py; vLLM 0.33, qwen3_vl.py).
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from qvlopt.artifact.byte_ranges import read_chunks
from qvlopt.artifact.containment import contained_file
from qvlopt.artifact.manifest import MANIFEST
from qvlopt.artifact.tensor_writer import torch_dtype
from qvlopt.artifact.tensors import FolderWriter, TensorEntry, TensorFiles, dtype_code
from qvlopt.errors import RunError
from qvlopt.model.shapes import canonical_name
from qvlopt.model.source import Source

FLOATS = {"F32", "F16", "BF16", "F64"}
_REPLACED = (MANIFEST, "config.json", "README.md")
_NOT_COPIED = (
    ".safetensors",
    ".safetensors.index.json",
    ".bin",
    ".bin.index.json",
    ".pt",
    ".pth",
    ".ckpt",
    ".gguf",
    ".onnx",
    ".onnx_data",
    ".onnx.data",
    ".h5",
    ".msgpack",
)
_DTYPE_KEYS = ("dtype", "torch_dtype")

Added = torch.Tensor | TensorEntry
"""A new tensor, or where it lies in a file."""


@dataclass(frozen=True)
class Rewrite:
    """What becomes of a source. Names are canonical.

    removed: tensors that go. added: tensors that are new or other than before. cast: dtype that every remaining float
    tensor is cast to; None keeps the bytes. quantization_config: what config.json gets. settings: keys of its sections that
    get another value.
    """

    removed: frozenset[str] = frozenset()
    added: Mapping[str, Added] = field(default_factory=dict)
    cast: torch.dtype | None = None
    quantization_config: Mapping[str, Any] | None = None
    settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


def other_files(source: Path) -> list[Path]:
    """The source's files besides weights and config. Hidden ones, weights of other kinds and another artifact's manifest are not the model's.

    Raises RunError for one that is a link to a place outside.
    """
    found = [path.name for path in sorted(source.iterdir()) if path.is_file() and not path.name.startswith(".")]
    kept = [name for name in found if name not in _REPLACED and not name.endswith(_NOT_COPIED)]
    return [contained_file(source, name, named_by=str(source)) for name in kept]


def check_values(source: Source, rewrite: Rewrite) -> None:
    """Reads every tensor that stays, and raises RunError as `write_rewritten` does: before hours of work, not after them."""
    for entry in _kept(source, rewrite).values():
        for _ in _converted(source, entry, rewrite):
            pass


def write_rewritten(folder: Path, source: Source, rewrite: Rewrite) -> None:
    """Writes weights, config and all other files of the source into the empty `folder`, a chunk of a tensor at a time.

    Raises RunError naming the tensor that holds NaN or infinity, or does not fit the range of `rewrite.cast`.
    """
    kept = _kept(source, rewrite)
    plan = [(name, _code(entry, rewrite), entry.shape) for name, entry in kept.items()]
    plan += [(name, _added_code(value), tuple(value.shape)) for name, value in rewrite.added.items()]
    with FolderWriter(folder, sorted(plan)) as writer:
        for name, entry in kept.items():
            writer.write(name, _converted(source, entry, rewrite))
        for name, value in rewrite.added.items():
            writer.write(name, value)
    _copy_files(folder, source.folder)
    _write_config(folder, source, rewrite)


def verify_rewritten(folder: Path, source: Source, rewrite: Rewrite) -> int:
    """Reads the written tensors again and returns their number. Raises RunError naming one that is not what was meant."""
    written, kept = TensorFiles.open(folder), _kept(source, rewrite)
    odd = sorted(set(written.entries) ^ (set(kept) | set(rewrite.added)))
    if odd:
        raise RunError(f"{folder}: self-check failed, the tensors are not those planned: {odd[0]}")
    for name, entry in written.entries.items():
        if name in rewrite.added:
            good = _is_written(written, name, rewrite.added[name])
        else:
            meant = _sha256(_converted(source, kept[name], rewrite))
            good = (entry.dtype, entry.shape, written.sha256(name)) == (_code(kept[name], rewrite), kept[name].shape, meant)
        if not good:
            raise RunError(f"{folder}: self-check failed, {name} is not what was meant", "is the disk sound?")
    return len(written.entries)


def _kept(source: Source, rewrite: Rewrite) -> dict[str, TensorEntry]:
    """The source's tensors that stay, by canonical name."""
    names = {canonical_name(stored): entry for stored, entry in source.tensors.entries.items()}
    return {name: entry for name, entry in names.items() if name not in rewrite.removed and name not in rewrite.added}


def _code(entry: TensorEntry, rewrite: Rewrite) -> str:
    return dtype_code(rewrite.cast) if rewrite.cast is not None and entry.dtype in FLOATS else entry.dtype


def _added_code(value: Added) -> str:
    return value.dtype if isinstance(value, TensorEntry) else dtype_code(value.dtype)


def _is_written(written: TensorFiles, name: str, value: Added) -> bool:
    if isinstance(value, TensorEntry):
        entry = written.entry(name)
        return (entry.dtype, entry.shape, written.sha256(name)) == (value.dtype, value.shape, _sha256(read_chunks(value)))
    return torch.equal(written.read(name), value.cpu())


def _converted(source: Source, entry: TensorEntry, rewrite: Rewrite) -> Iterator[memoryview]:
    """The bytes of a tensor as they are to be written. Raises RunError where they are not, or would not be, finite."""
    if entry.dtype not in FLOATS:
        yield from read_chunks(entry)
        return
    dtype = torch_dtype(entry.dtype)
    for chunk in read_chunks(entry):
        values = torch.frombuffer(chunk, dtype=dtype)
        if not _is_finite(values):
            raise RunError(f"{source.folder}: {entry.name} holds NaN or infinity", "the file is damaged: get the checkpoint again")
        if rewrite.cast is None or rewrite.cast == dtype:
            yield chunk
            continue
        cast = values.to(rewrite.cast)
        if not _is_finite(cast):
            limit = torch.finfo(rewrite.cast).max
            largest = max(float(torch.frombuffer(part, dtype=dtype).abs().max()) for part in read_chunks(entry))
            raise RunError(f"{entry.name}: {largest:g} does not fit {rewrite.cast}, whose largest is {limit:g}", "set quantize_awq.dtype: source")
        yield cast.view(torch.uint8).numpy().data


def _sha256(chunks: Iterable[memoryview]) -> str:
    digest = hashlib.sha256()
    for chunk in chunks:
        digest.update(chunk)
    return digest.hexdigest()


def _is_finite(values: torch.Tensor) -> bool:
    return all(math.isfinite(float(end)) for end in torch.aminmax(values))


def _copy_files(folder: Path, source: Path) -> None:
    for path in other_files(source):
        shutil.copyfile(path, folder / path.name)


def _write_config(folder: Path, source: Source, rewrite: Rewrite) -> None:
    """config.json: its own bytes unless the dtype or the quantisation changed; never passed through a library's config."""
    path = source.folder / "config.json"
    if rewrite.cast is None and rewrite.quantization_config is None and not rewrite.settings:
        shutil.copyfile(path, folder / "config.json")
        return
    config = json.loads(path.read_text(encoding="utf-8"))
    if rewrite.cast is not None:
        _set_dtype(config, str(rewrite.cast).removeprefix("torch."))
    for section, values in rewrite.settings.items():
        config[section].update(values)
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
