"""The largest magnitude of every linear's inputs over the calibration set: read from a calibrate output, or found now, equal to the bit."""

from __future__ import annotations

from pathlib import Path

import torch

from qvlopt.artifact.process import kept_memory
from qvlopt.artifact.unfinished import Parts
from qvlopt.commands.calibrate import captured_stages, layer_widths
from qvlopt.commands.calibrated import Statistics, found_statistics
from qvlopt.commands.calibration_data import Asked
from qvlopt.model.input_sums import MagnitudeSum
from qvlopt.model.statistics import StatisticsFiles
from qvlopt.model.token_draw import HELD_OUT
from qvlopt.report.progress import Progress

_WORK = "work"
"""Folder for hidden states inside the temporary output; gone when that gets its name."""
Magnitudes = dict[str, torch.Tensor]
"""float32 [K] by canonical name of the linears in `calibrate.scope`."""


def magnitudes(asked: Asked, named: Statistics | None, folder: Path, device: torch.device, progress: Progress) -> Magnitudes:
    """Of the statistics that are `named`, else of those in the recipe's output, else of the pictures themselves.

    `folder` has room for hidden states meanwhile. Raises RunError when too few samples are usable.
    """
    there = named or found_statistics(asked)
    if there is not None:
        files = StatisticsFiles(there.folder)
        return {name: files.read_largest(name) for name in files.layers if not name.endswith(HELD_OUT)}
    return _computed(asked, folder, device, progress)


@kept_memory()
def _computed(asked: Asked, folder: Path, device: torch.device, progress: Progress) -> Magnitudes:
    """As `calibrate` computes them, without the rest of its statistics."""
    parts, found = Parts(folder / _WORK), Magnitudes()
    progress.start(len(layer_widths(asked.source, scope=asked.loaded.recipe.calibrate.scope)), "calibrate")
    try:
        for stage, grams in captured_stages(asked, parts, device, progress, sums=MagnitudeSum):
            for name, gram in grams.items():
                layer, largest = name.removesuffix(HELD_OUT), gram.abs_max.cpu()
                found[layer] = torch.maximum(found[layer], largest) if layer in found else largest
            progress.advance(len(stage.linears), f"calibrate {stage.name}")
    finally:
        progress.finish()
        parts.remove()
    return found
