"""Hidden states of all pictures at one point of the tower, in a file: memory does not grow with their number."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO, Self

import numpy as np
import torch

from qvlopt.errors import RunError

Shape = tuple[int, int, int]


class HiddenWriter:
    """Writes float32 [B, N, D] of one batch after the other. A context manager; `digest` is known when it is closed."""

    def __init__(self, path: Path) -> None:
        self._file: BinaryIO = open(path, "wb", buffering=0)  # noqa: SIM115
        self._sha256 = hashlib.sha256()

    def append(self, hidden: torch.Tensor) -> None:
        data = hidden.detach().float().cpu().contiguous().numpy().data.cast("B")
        self._sha256.update(data)
        while data:
            data = data[self._file.write(data) :]

    @property
    def digest(self) -> str:
        """Hex SHA-256 of all that was written."""
        return self._sha256.hexdigest()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


class HiddenStates:
    """Reads back what a HiddenWriter wrote; `shapes` are [B, N, D] of every batch in order."""

    def __init__(self, path: Path, shapes: Sequence[Shape]) -> None:
        self.path = path
        self.shapes = tuple(shapes)
        self._starts = np.cumsum([0, *(4 * b * n * d for b, n, d in self.shapes)]).tolist()

    def __len__(self) -> int:
        return len(self.shapes)

    def read(self, index: int) -> torch.Tensor:
        """float32 [B, N, D] of one batch, in memory of its own. Raises RunError when the file was cut."""
        shape = self.shapes[index]
        count = shape[0] * shape[1] * shape[2]
        values = np.fromfile(self.path, dtype=np.float32, count=count, offset=self._starts[index])
        if values.size != count:
            raise RunError(f"{self.path} is cut: batch {index} needs {count} values, got {values.size}", "it must not change during a run")
        return torch.from_numpy(values).view(shape)
