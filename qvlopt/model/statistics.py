"""What `calibrate` leaves: the input statistics of every layer, and what they were taken from. Float32 and float64 only."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from qvlopt.artifact.tensor_writer import TensorWriter, dtype_code
from qvlopt.artifact.tensors import TensorFiles
from qvlopt.errors import RunError
from qvlopt.quant.objective import Gram

FILE = "statistics.safetensors"
_PARTS = ("sum", "centred", "abs_sum", "abs_max")


def save_statistics(folder: Path, grams: Mapping[str, Gram]) -> None:
    """Writes `folder`/statistics.safetensors: for layer L the tensors L.count, L.sum, L.centred, L.abs_sum, L.abs_max."""
    tensors = {f"{name}.count": torch.tensor([gram.count]) for name, gram in grams.items()}
    for name, gram in grams.items():
        tensors.update({f"{name}.{part}": getattr(gram, part) for part in _PARTS})
    plan = [(name, dtype_code(tensor.dtype), tuple(tensor.shape)) for name, tensor in tensors.items()]
    with TensorWriter(folder / FILE, plan) as writer:
        for name, tensor in tensors.items():
            writer.write(name, tensor)


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
        """Raises RunError when the layer was not calibrated."""
        if name not in self.layers:
            raise RunError(f"{self.folder}: has no statistics of {name}", "calibrate with the scope that is to be quantised")
        parts = {part: self._files.read(f"{name}.{part}") for part in _PARTS}
        return Gram(count=int(self._files.read(f"{name}.count")), **parts)
