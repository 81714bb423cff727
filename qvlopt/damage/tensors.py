"""Distance of a candidate's tensor from the base's: pure numbers, in float64."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from qvlopt.model.preprocess import Picture
from qvlopt.model.vision import VisionOutput, VisionTower


class TowerError(NamedTuple):
    """Error of one output of the tower over all pictures: `merged` or `deepstack.I`."""

    output: str
    relative_error: float
    cosine: float


def relative_error(base: torch.Tensor, candidate: torch.Tensor) -> float:
    """||candidate - base|| / ||base||; 0 for equal tensors, infinite where only the base is zero or a value is not finite."""
    off = float((candidate.double() - base.double()).norm())
    whole = float(base.double().norm())
    return 0.0 if off == 0 else off / whole if whole and math.isfinite(off) else math.inf


def cosine(base: torch.Tensor, candidate: torch.Tensor) -> float:
    """Cosine of the flattened tensors, in [-1, 1]; 1 for equal ones, zeros too. Blind to scale: see `sqnr_db` too."""
    if torch.equal(base, candidate):
        return 1.0
    x, y = base.double().flatten(), candidate.double().flatten()
    norms = float(x.norm() * y.norm())
    return float(x @ y) / norms if norms else 0.0


def sqnr_db(base: torch.Tensor, candidate: torch.Tensor) -> float:
    """Signal to quantisation noise, 20 log10(||base|| / ||base - candidate||), in dB; infinite for equal tensors."""
    error = relative_error(base, candidate)
    return -20 * math.log10(error) if error else math.inf


def encode(tower: VisionTower, pictures: Iterable[Picture]) -> list[VisionOutput]:
    """The tower's outputs for each picture by itself."""
    device = tower.weights["pos_embed.weight"].device
    with torch.inference_mode():
        return [tower(picture.pixel_values[None].to(device), picture.grid) for picture in pictures]


def tower_errors(base: Sequence[VisionOutput], candidate: Sequence[VisionOutput]) -> tuple[TowerError, ...]:
    """Errors of the merged tokens and of every DeepStack tap, all pictures together."""
    names = ["merged", *(f"deepstack.{i}" for i in range(len(base[0].deepstack)))]
    rows = []
    for index, name in enumerate(names):
        x, y = (torch.cat([(out.merged, *out.deepstack)[index].flatten() for out in outputs]) for outputs in (base, candidate))
        rows.append(TowerError(name, relative_error(x, y), cosine(x, y)))
    return tuple(rows)
