"""Runs the tower over calibration pictures and keeps, for every linear layer, the statistics of its inputs.

Pictures may come in any order and batch: each picture's own statistics are taken, then merged in the order in which they
are given, so sort them first where bytes must agree. Nothing of a picture is kept, memory does not grow with their number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
import torch.nn.functional as F

from qvlopt.errors import RunError
from qvlopt.model.names import VISION
from qvlopt.model.positions import Grid
from qvlopt.model.vision import VisionConfig, VisionTower
from qvlopt.quant.objective import Gram

Batch = tuple[torch.Tensor, Grid]
"""`pixel_values` float32 [B, N, patch_dim] of B pictures of one size, and their grid."""


def capture_vision(
    config: VisionConfig, weights: Mapping[str, torch.Tensor], batches: Iterable[Batch], *, seen: Callable[[int], None] = lambda _: None
) -> dict[str, Gram]:
    """Input statistics of every linear of the tower by canonical name; `seen` is told how many pictures a batch had.

    `weights` are the tower's, float32, by name relative to it. Raises RunError naming the layer whose inputs are not finite.
    """
    grams: dict[str, Gram] = {}

    def observe(name: str, x: torch.Tensor) -> torch.Tensor:
        key = f"{VISION}.{name}"
        for picture in x:
            try:
                new = Gram.of(picture)
            except ValueError as error:
                raise RunError(f"{key}: {error}", "the source's weights or a calibration picture overflow") from error
            grams[key] = grams[key].merge(new) if key in grams else new
        return F.linear(x, weights[f"{name}.weight"], weights[f"{name}.bias"])

    tower = VisionTower(config, weights, linear=observe)
    device = weights["pos_embed.weight"].device
    with torch.inference_mode():
        for pixel_values, grid in batches:
            tower(pixel_values.to(device), grid)
            seen(len(pixel_values))
    return grams
