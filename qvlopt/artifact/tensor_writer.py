"""Writes safetensors files as a stream, from a plan given first; import its names from `artifact.tensors`."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from qvlopt.artifact.byte_ranges import CHUNK_BYTES, read_chunks, write_at
from qvlopt.artifact.header import DTYPE_BYTES, Planned, TensorEntry, build_header
from qvlopt.errors import RunError

if TYPE_CHECKING:
    import torch

MAX_SHARD_BYTES = 5_000_000_000
"""The shard size that Hugging Face tools used for years; some stores refuse larger files."""

_TORCH_NAMES = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu",
    "U16": "uint16", "I16": "int16", "F16": "float16", "BF16": "bfloat16", "U32": "uint32", "I32": "int32", "F32": "float32",
    "U64": "uint64", "I64": "int64", "F64": "float64",
}  # fmt: skip
_CODES = {name: code for code, name in _TORCH_NAMES.items()}


def torch_dtype(code: str) -> torch.dtype:
    """The torch dtype of a safetensors code such as "BF16"."""
    import torch

    dtype: torch.dtype = getattr(torch, _TORCH_NAMES[code])
    return dtype


def dtype_code(dtype: torch.dtype) -> str:
    """The safetensors code of a torch dtype; raises ValueError when it has none."""
    name = str(dtype).removeprefix("torch.")
    if name not in _CODES:
        raise ValueError(f"torch.{name} cannot be stored as safetensors; supported are {', '.join(_CODES)}")
    return _CODES[name]


class TensorWriter:
    """Writes one file tensor by tensor, in any order. A context manager; without it call `close`.

    The same plan and values give the same bytes. Errors of the disk are OSError; `write_folder` turns them into words.
    """

    def __init__(self, path: Path, plan: Iterable[tuple[str, str, tuple[int, ...]]], *, metadata: Mapping[str, str] | None = None) -> None:
        """Creates the file, which must not exist; raises ValueError for a repeated name or an unknown dtype in the plan."""
        self.path = Path(path)
        self._plan, self._left, self._descriptor = _checked(plan), set[str](), -1
        header, self._offsets = build_header(self._plan.values(), metadata={"format": "pt", **(metadata or {})})
        self._left.update(self._plan)
        self._descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        write_at(self._descriptor, header, 0)

    def write(self, name: str, value: torch.Tensor | bytes | TensorEntry | Iterator[memoryview]) -> None:
        """Writes one planned tensor; the bytes of a TensorEntry are copied from its file undecoded, an iterator gives them in chunks.

        Raises ValueError for a name that is not in the plan or is written already, and for another dtype, shape or size.
        """
        if name not in self._left:
            raise ValueError(f"tensor {name!r} is {'written already' if name in self._plan else 'not in the plan'}: {self.path}")
        position, end = self._offsets[name]
        for chunk in _content(self._plan[name], value):
            if position + len(chunk) > end:
                raise ValueError(f"tensor {name!r} needs {self._plan[name].nbytes} bytes, got more")
            write_at(self._descriptor, chunk, position)
            position += len(chunk)
        if position != end:
            raise ValueError(f"tensor {name!r} needs {self._plan[name].nbytes} bytes, got {self._plan[name].nbytes - (end - position)}")
        self._left.discard(name)

    def close(self) -> None:
        """Flushes the file to the disk and closes it; raises RunError when a planned tensor was not written."""
        if self._descriptor < 0:
            return
        try:
            if self._left:
                raise RunError(f"{self.path} is incomplete: {len(self._left)} of {len(self._plan)} tensors not written, such as {min(self._left)!r}")
            os.fsync(self._descriptor)
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Closes the file as it is, complete or not."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is None:
            self.close()
        else:
            self.abandon()


class FolderWriter:
    """Writes a plan as `model.safetensors`, or as numbered shards and their index when it is larger than one shard."""

    def __init__(self, folder: Path, plan: Sequence[tuple[str, str, tuple[int, ...]]], *, max_shard_bytes: int = MAX_SHARD_BYTES) -> None:
        """Creates the files; raises ValueError as TensorWriter does. Tensors keep the order of the plan across shards."""
        self._folder = Path(folder)
        shards = _shards(list(_checked(plan).values()), max_shard_bytes)
        names = [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)] if len(shards) > 1 else ["model.safetensors"]
        self._weight_map = {planned.name: file for file, shard in zip(names, shards, strict=True) for planned in shard}
        self._total_bytes = sum(planned.nbytes for shard in shards for planned in shard)
        self._writers: dict[str, TensorWriter] = {}
        try:
            for file, shard in zip(names, shards, strict=True):
                self._writers[file] = TensorWriter(self._folder / file, shard)
        except BaseException:
            self.abandon()
            raise

    @property
    def files(self) -> tuple[str, ...]:
        """Names of the weight files, without the index."""
        return tuple(self._writers)

    def write(self, name: str, value: torch.Tensor | bytes | TensorEntry | Iterator[memoryview]) -> None:
        """As TensorWriter.write, into the shard that the plan gives."""
        if name not in self._weight_map:
            raise ValueError(f"tensor {name!r} is not in the plan: {self._folder}")
        self._writers[self._weight_map[name]].write(name, value)

    def close(self) -> None:
        """Closes every shard, then writes the index if there are several; raises RunError when a tensor is missing."""
        try:
            for writer in self._writers.values():
                writer.close()
        finally:
            self.abandon()
        if len(self._writers) > 1:
            write_index(self._folder, self._weight_map, total_bytes=self._total_bytes)

    def abandon(self) -> None:
        """Closes the files as they are, complete or not."""
        for writer in self._writers.values():
            writer.abandon()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is None:
            self.close()
        else:
            self.abandon()


def write_index(folder: Path, weight_map: Mapping[str, str], *, total_bytes: int, weights: str = "model.safetensors") -> Path:
    """Writes `weights`.index.json (tensor name to file name, bytes of all tensors) and returns its path."""
    path = Path(folder) / f"{weights}.index.json"
    fields = {"metadata": {"total_size": total_bytes}, "weight_map": dict(sorted(weight_map.items()))}
    path.write_text(json.dumps(fields, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return path


def _checked(plan: Iterable[tuple[str, str, tuple[int, ...]]]) -> dict[str, Planned]:
    planned: dict[str, Planned] = {}
    for name, dtype, shape in plan:
        if name in planned or name == "__metadata__":
            raise ValueError(f"the plan has the tensor name {name!r} twice, or it is reserved")
        if dtype not in DTYPE_BYTES:
            raise ValueError(f"the plan has dtype {dtype!r} for {name!r}; supported are {', '.join(DTYPE_BYTES)}")
        planned[name] = Planned(name, dtype, tuple(shape))
    return planned


def _shards(plan: list[Planned], max_shard_bytes: int) -> list[list[Planned]]:
    """The plan cut, in order, into runs of at most `max_shard_bytes`; a larger tensor gets a shard of its own."""
    shards: list[list[Planned]] = [[]]
    size = 0
    for planned in plan:
        if shards[-1] and size + planned.nbytes > max_shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(planned)
        size += planned.nbytes
    return shards


def _content(planned: Planned, value: torch.Tensor | bytes | TensorEntry | Iterator[memoryview]) -> Iterator[bytes | memoryview]:
    """The bytes to write, in chunks, after the value was compared with the plan."""
    if isinstance(value, Iterator):
        return value
    if isinstance(value, (bytes, bytearray, memoryview)):
        if len(value) != planned.nbytes:
            raise ValueError(f"tensor {planned.name!r} ({planned.dtype} {planned.shape}) needs {planned.nbytes} bytes, got {len(value)}")
        return iter([value])
    dtype = value.dtype if isinstance(value, TensorEntry) else dtype_code(value.dtype)
    if (dtype, tuple(value.shape)) != (planned.dtype, planned.shape):
        raise ValueError(f"tensor {planned.name!r} is planned as {planned.dtype} {planned.shape}, got {dtype} {tuple(value.shape)}")
    return read_chunks(value) if isinstance(value, TensorEntry) else _tensor_chunks(value)


def _tensor_chunks(tensor: torch.Tensor) -> Iterator[memoryview]:
    import torch

    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    for start in range(0, flat.numel(), CHUNK_BYTES):
        yield flat[start : start + CHUNK_BYTES].numpy().data
