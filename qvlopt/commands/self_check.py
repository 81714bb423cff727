"""Proves a written artifact before it gets its name: every tensor is read back, and the reloaded tower still sees."""

from __future__ import annotations

from collections.abc import Collection
from itertools import islice
from pathlib import Path

import torch

from qvlopt.artifact.manifest import CheckRecord
from qvlopt.commands import calibrate as calibration
from qvlopt.damage.tensors import TowerError, encode, tower_errors
from qvlopt.errors import RunError
from qvlopt.model.load import load_vision
from qvlopt.model.names import VISION
from qvlopt.model.rewrite import Rewrite, verify_rewritten
from qvlopt.model.source import open_source

CHECK_PICTURES = 4
BROKEN = 1.0
"""A tower whose output is off by as much as it is large carries nothing of the picture."""


def self_check(folder: Path, asked: calibration.Asked, rewrite: Rewrite, *, expected: Collection[str], found: Collection[str]) -> CheckRecord:
    """The written tensors are those meant, nothing outside the scope changed, and the reloaded tower still sees.

    `expected` and `found` are the linears that were to be quantised and that were. Raises RunError where something is
    wrong. `worst` is the largest relative error of the tower's outputs on a few calibration pictures.
    """
    written = verify_rewritten(folder, asked.source, rewrite)
    wrong = sorted(set(expected) ^ set(found))
    if wrong:
        raise RunError(f"self-check failed: {wrong[0]} was not treated as asked")
    outside = [name for name in rewrite.added if not name.startswith(f"{VISION}.")]
    if outside:
        raise RunError(f"self-check failed: {outside[0]} lies outside the scope and would change")
    worst = _worst_tower_error(folder, asked)
    if not worst.relative_error < BROKEN:
        fault = f"self-check failed: the reloaded tower's {worst.output} is off by {worst.relative_error:.0%}"
        raise RunError(fault, "use more bits or smaller groups")
    kept = "byte-identical to the source" if rewrite.cast is None else f"the source's values as {str(rewrite.cast).removeprefix('torch.')}"
    detail = (
        f"read back {written} tensors: {len(rewrite.added)} as meant, {written - len(rewrite.added)} {kept}; "
        f"reloaded tower off by at most {worst.relative_error:.2%} ({worst.output}, {CHECK_PICTURES} pictures)"
    )
    return CheckRecord(passed=True, worst=worst.relative_error, detail=detail)


def _worst_tower_error(folder: Path, asked: calibration.Asked) -> TowerError:
    """One tower at a time is in memory: the source's, then the one that the written folder gives."""
    pictures = list(islice(calibration.pictures(asked, calibration.Coverage()), CHECK_PICTURES))
    base = encode(load_vision(asked.source, dtype=torch.float32, device="cpu"), pictures)
    again = open_source(str(folder.resolve()), folder=folder)
    candidate = encode(load_vision(again, dtype=torch.float32, device="cpu"), pictures)
    return max(tower_errors(base, candidate), key=lambda row: row.relative_error)
