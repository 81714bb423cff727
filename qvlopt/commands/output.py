"""Where a command writes: the recipe's output has a sub-folder for every section; --output names the very folder."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from qvlopt.recipe.load import LoadedRecipe

FLAG = "--output"


def output_folder(loaded: LoadedRecipe, section: str) -> Path:
    """The folder of `section` (`calibrate`, `awq`, `evaluate`, ...), relative to the working directory."""
    root = Path(loaded.recipe.output)
    return root if is_very_folder(loaded) else root / section


def is_very_folder(loaded: LoadedRecipe) -> bool:
    """Whether the user named the command's own folder, so that nothing else has a place under it."""
    return loaded.origins.get("output") == FLAG


def as_root(loaded: LoadedRecipe) -> LoadedRecipe:
    """The same recipe with its output as the root of all sections, as `run` understands --output."""
    return dataclasses.replace(loaded, origins={**loaded.origins, "output": "run"})
