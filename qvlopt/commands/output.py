"""Where a command writes: the recipe's output has a sub-folder for every section; --output names the very folder."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from qvlopt.recipe.load import LoadedRecipe
from qvlopt.recipe.paths import user_path

FLAG = "--output"


def output_folder(loaded: LoadedRecipe, section: str) -> Path:
    """The folder of `section` (`calibrate`, `awq`, `evaluate`, ...), relative to the working directory."""
    root = output_root(loaded)
    return root if is_very_folder(loaded) else root / section


def output_root(loaded: LoadedRecipe) -> Path:
    """The recipe's output, relative to the working directory; `~` is the user's folder, as no shell reads a recipe."""
    return user_path(loaded.recipe.output)


def is_very_folder(loaded: LoadedRecipe) -> bool:
    """Whether the user named the command's own folder, so that nothing else has a place under it."""
    return loaded.origins.get("output") == FLAG


def as_root(loaded: LoadedRecipe) -> LoadedRecipe:
    """The same recipe with its output as the root of all sections, as `run` understands --output."""
    return dataclasses.replace(loaded, origins={**loaded.origins, "output": "run"})
