"""Proves a written artifact before it gets its name: every tensor is read back, and the reloaded tower still sees."""

from __future__ import annotations

from collections.abc import Collection
from itertools import islice
from pathlib import Path

import torch

from qvlopt.artifact.manifest import CheckRecord
from qvlopt.commands.calibration_data import Asked, Coverage
from qvlopt.commands.calibration_data import pictures as pictures_of
from qvlopt.commands.calibration_prompts import prompts
from qvlopt.damage.tensors import TowerError, relative_error, tower_errors
from qvlopt.errors import RunError
from qvlopt.model.language_capture import last_hidden
from qvlopt.model.names import LANGUAGE, VISION
from qvlopt.model.rewrite import Rewrite, verify_rewritten
from qvlopt.model.source import open_source
from qvlopt.model.stage_forward import encode_by_stage

CHECK_PICTURES = 2
CHECK_PROMPTS = 2
BROKEN = 1.0
"""A tower whose output is off by as much as it is large carries nothing of the picture."""


def self_check(folder: Path, asked: Asked, rewrite: Rewrite, *, expected: Collection[str], found: Collection[str]) -> CheckRecord:
    """The written tensors are those meant, nothing outside the scope changed, and the reloaded tower still sees.

    `expected` and `found` are the linears that were to be quantised and that were. Raises RunError where something is
    wrong. `worst` is the largest relative error of the tower's outputs on a few calibration pictures.
    """
    written = verify_rewritten(folder, asked.source, rewrite)
    wrong = sorted(set(expected) ^ set(found))
    if wrong:
        raise RunError(f"self-check failed: {wrong[0]} was not treated as asked")
    has_language = any(name.startswith(f"{LANGUAGE}.") for name in expected)
    roots = (f"{VISION}.", f"{LANGUAGE}.layers.") if has_language else (f"{VISION}.",)
    outside = [name for name in rewrite.added if not name.startswith(roots)]
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
    if has_language:
        off = _language_error(folder, asked)
        detail += f"; reloaded model off by {off:.2%} (last hidden states, {CHECK_PROMPTS} prompts)"
        if not off < BROKEN:
            raise RunError(f"self-check failed: the reloaded model's last hidden states are off by {off:.0%}", "use more bits or smaller groups")
    return CheckRecord(passed=True, worst=worst.relative_error, detail=detail)


def _worst_tower_error(folder: Path, asked: Asked) -> TowerError:
    """One stage of one tower at a time is in memory."""
    pictures = list(islice(pictures_of(asked, Coverage()), CHECK_PICTURES))
    batches = [(picture.pixel_values[None], picture.grid) for picture in pictures]
    base = encode_by_stage(asked.source, batches, torch.device("cpu"))
    candidate = encode_by_stage(open_source(str(folder.resolve()), folder=folder), batches, torch.device("cpu"))
    return max(tower_errors(base, candidate), key=lambda row: row.relative_error)


def _language_error(folder: Path, asked: Asked) -> float:
    """Relative error of the last hidden states, towers included, over a few calibration prompts."""
    shown = list(islice(prompts(asked, Coverage()), CHECK_PROMPTS))
    again = open_source(str(folder.resolve()), folder=folder)
    base, candidate = (torch.cat([x.flatten() for x in last_hidden(source, shown, torch.device("cpu"))]) for source in (asked.source, again))
    return relative_error(base, candidate)
