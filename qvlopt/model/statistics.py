"""What `calibrate` leaves: the input statistics of every layer, and what they were taken from. Float32 and float64 only."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from qvlopt.artifact.header import read_header
from qvlopt.artifact.tensors import TensorFiles, TensorWriter, write_index
from qvlopt.errors import RunError
from qvlopt.model.token_draw import HELD_OUT
from qvlopt.quant.objective import Gram

FILE = "statistics.safetensors"
_PARTS = ("sum", "centred", "abs_sum", "abs_max")


def save_statistics(path: Path, grams: Mapping[str, Gram]) -> None:
    """Writes a file with L.count, L.sum, L.centred, L.abs_sum and L.abs_max of every layer L."""
    with TensorWriter(path, [planned for name, gram in grams.items() for planned in _plan(name, len(gram.sum))]) as writer:
        for name, gram in grams.items():
            writer.write(f"{name}.count", torch.tensor([gram.count]))
            for part in _PARTS:
                writer.write(f"{name}.{part}", getattr(gram, part))


def gather_statistics(folder: Path, files: Sequence[Path]) -> None:
    """Makes files of `save_statistics` the numbered shards of `folder`, with their index. They keep their own names, too.

    They get a second name where the file system can give one, so that nothing is copied, and a copy elsewhere.
    """
    shards = {f"{FILE.removesuffix('.safetensors')}-{place:05d}-of-{len(files):05d}.safetensors": path for place, path in enumerate(files, 1)}
    headers = {shard: read_header(path) for shard, path in shards.items()}
    for shard, path in shards.items():
        try:
            os.link(path, folder / shard)
        except OSError:
            shutil.copyfile(path, folder / shard)
    names = {name: shard for shard, header in headers.items() for name in header}
    total = sum(entry.nbytes for header in headers.values() for entry in header.values())
    write_index(folder, names, total_bytes=total, weights=FILE)


def _plan(name: str, width: int) -> list[tuple[str, str, tuple[int, ...]]]:
    shapes = {"sum": ("F64", (width,)), "centred": ("F32", (width, width)), "abs_sum": ("F64", (width,)), "abs_max": ("F32", (width,))}
    return [(f"{name}.count", "I64", (1,)), *((f"{name}.{part}", *shapes[part]) for part in _PARTS)]


class StatisticsFiles:
    """The statistics of a `calibrate` output, layer by layer as they are asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files = TensorFiles.open(folder, weights=FILE)

    @property
    def layers(self) -> frozenset[str]:
        """Canonical names of the layers that have statistics."""
        return frozenset(name.removesuffix(".count") for name in self._files.entries if name.endswith(".count"))

    def read(self, name: str) -> Gram:
        """Of all tokens. Raises RunError when the layer was not calibrated."""
        held_out = self.read_held_out(name)
        return self.read_fitted(name) if held_out is None else self.read_fitted(name).merge(held_out)

    def read_largest(self, name: str) -> torch.Tensor:
        """The largest magnitude of every input of a layer, float32 [K], of all tokens. Raises RunError when it was not calibrated."""
        parts = [part for part in (name, name + HELD_OUT) if part in self.layers]
        if not parts:
            raise self._absent(name)
        return torch.stack([self._files.read(f"{part}.abs_max") for part in parts]).amax(0)

    def read_held_out(self, name: str) -> Gram | None:
        """Of the pictures that were held out; None where none were."""
        return self.read_fitted(name + HELD_OUT) if name + HELD_OUT in self.layers else None

    def read_fitted(self, name: str) -> Gram:
        """Without the pictures that were held out. Raises RunError when the layer was not calibrated."""
        if name not in self.layers:
            raise self._absent(name)
        parts = {part: self._files.read(f"{name}.{part}") for part in _PARTS}
        return Gram(count=int(self._files.read(f"{name}.count")), **parts)

    def _absent(self, name: str) -> RunError:
        return RunError(f"{self.folder}: has no statistics of {name}", "calibrate with the scope that is to be quantised")
