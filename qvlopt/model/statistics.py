"""What `calibrate` leaves: the input statistics of every layer, and what they were taken from. Float32 and float64 only."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from qvlopt.artifact.tensor_writer import TensorWriter
from qvlopt.artifact.tensors import TensorFiles
from qvlopt.errors import RunError
from qvlopt.model.token_draw import HELD_OUT
from qvlopt.quant.objective import Gram

FILE = "statistics.safetensors"
_PARTS = ("sum", "centred", "abs_sum", "abs_max")


class StatisticsWriter(TensorWriter):
    """Writes `folder`/statistics.safetensors layer by layer, in any order: L.count, L.sum, L.centred, L.abs_sum, L.abs_max.

    `widths` are the input widths K of all layers by canonical name. A context manager.
    """

    def __init__(self, folder: Path, widths: Mapping[str, int]) -> None:
        super().__init__(folder / FILE, [planned for name, width in widths.items() for planned in _plan(name, width)])

    def write_layer(self, name: str, gram: Gram) -> None:
        """Raises ValueError for a layer that is not planned, is written already or has another width."""
        self.write(f"{name}.count", torch.tensor([gram.count]))
        for part in _PARTS:
            self.write(f"{name}.{part}", getattr(gram, part))


def save_statistics(folder: Path, grams: Mapping[str, Gram]) -> None:
    """All layers at once."""
    with StatisticsWriter(folder, {name: len(gram.sum) for name, gram in grams.items()}) as writer:
        for name, gram in grams.items():
            writer.write_layer(name, gram)


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

    def read_held_out(self, name: str) -> Gram | None:
        """Of the pictures that were held out; None where none were."""
        return self.read_fitted(name + HELD_OUT) if name + HELD_OUT in self.layers else None

    def read_fitted(self, name: str) -> Gram:
        """Without the pictures that were held out. Raises RunError when the layer was not calibrated."""
        if name not in self.layers:
            raise RunError(f"{self.folder}: has no statistics of {name}", "calibrate with the scope that is to be quantised")
        parts = {part: self._files.read(f"{name}.{part}") for part in _PARTS}
        return Gram(count=int(self._files.read(f"{name}.count")), **parts)
