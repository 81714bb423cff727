"""Bytes of tensors read from and written to their exact places in files (pread, pwrite)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from qvlopt.artifact.header import TensorEntry
from qvlopt.errors import RunError

CHUNK_BYTES = 8 << 20


def read_range(entry: TensorEntry) -> bytearray:
    """All bytes of a tensor; raises RunError, naming the file, when it has become shorter than its header says."""
    buffer = bytearray(entry.nbytes)
    with _opened(entry.file) as stream:
        _fill(stream, memoryview(buffer), entry, entry.start)
    return buffer


def read_chunks(entry: TensorEntry) -> Iterator[memoryview]:
    """The bytes of a tensor, at most CHUNK_BYTES at a time; a chunk is valid until the next is taken."""
    buffer = memoryview(bytearray(min(CHUNK_BYTES, entry.nbytes)))
    with _opened(entry.file) as stream:
        for position in range(entry.start, entry.end, CHUNK_BYTES):
            chunk = buffer[: min(CHUNK_BYTES, entry.end - position)]
            _fill(stream, chunk, entry, position)
            yield chunk


def write_at(descriptor: int, data: bytes | memoryview, position: int) -> None:
    """Writes all of `data` at `position`, however little the system takes at a time; raises OSError."""
    view = memoryview(data)
    while view:
        written = os.pwrite(descriptor, view, position)
        view = view[written:]
        position += written


def _opened(file: Path) -> BinaryIO:
    try:
        return open(file, "rb", buffering=0)
    except OSError as error:
        raise RunError(f"{file} cannot be read: {error.strerror}", hint="It must stay where it is, and readable, during a run.") from error


def _fill(stream: BinaryIO, view: memoryview, entry: TensorEntry, position: int) -> None:
    """Fills `view` from byte `position` of the file."""
    while view:
        count = os.preadv(stream.fileno(), [view], position)
        if count == 0:
            fault = f"{entry.file} is cut: tensor {entry.name!r} needs {entry.end} bytes, got {position}"
            raise RunError(fault, hint="Download or copy the file again; it must not change during a run.")
        view = view[count:]
        position += count
