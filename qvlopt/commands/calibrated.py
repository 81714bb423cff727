"""Statistics that an earlier `calibrate` left: those that a recipe names, and those that would be computed now."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from qvlopt.artifact.folder import existing_state
from qvlopt.artifact.manifest import read_intact, read_manifest
from qvlopt.commands.calibration_data import KIND, Asked
from qvlopt.commands.output import is_very_folder, output_folder
from qvlopt.errors import RunError
from qvlopt.recipe.paths import resolve_path


class Statistics(NamedTuple):
    """A calibrate output: its folder, what it covers, and its digest."""

    folder: Path
    coverage: dict[str, Any]
    digest: str


def named_statistics(asked: Asked, section: str) -> Statistics | None:
    """The `statistics` of a section; None where it names none. Raises RunError when they are missing or of another model."""
    named = getattr(asked.loaded.recipe, section).statistics
    if named is None:
        return None
    folder = resolve_path(named, asked.loaded.folder)
    if folder is None:
        raise RunError(f"{section}.statistics: there is no folder {named}", "give the output of qvlopt calibrate, or null")
    manifest = read_intact(folder)
    if manifest.kind != KIND or manifest.source is None or manifest.source.digest != asked.source.digest:
        raise RunError(f"{section}.statistics: {folder} was not calibrated on this source", "run qvlopt calibrate with this model.path")
    return Statistics(folder, manifest.coverage or {}, manifest.digest)


def found_statistics(asked: Asked) -> Statistics | None:
    """Those that `calibrate` left in `<output>/calibrate`, if they are the ones that would be computed now."""
    folder = output_folder(asked.loaded, "calibrate")
    if is_very_folder(asked.loaded) or not folder.exists() or existing_state(folder, asked.digest) != "same":
        return None
    return Statistics(folder, read_manifest(folder).coverage or {}, asked.digest)
