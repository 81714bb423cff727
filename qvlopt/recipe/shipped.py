"""Finds what ships with the package (recipes, sets, the built-in checkpoint) in a checkout and in an installed wheel."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

from qvlopt.errors import RunError, UsageError
from qvlopt.recipe.values import nearest

Kind = Literal["recipes", "calib", "assets"]
BUILTIN = "builtin:"
PACKAGE = Path(__file__).resolve().parents[1]


def shipped_root(kind: Kind) -> Path:
    """The folder that holds everything shipped of one kind; RunError when the installation has lost it."""
    for folder in (PACKAGE / kind, PACKAGE.parent / kind):
        if folder.is_dir():
            return folder
    raise RunError(f"the folder {kind} that ships with qvlopt is missing beside {PACKAGE}", "install qvlopt again")


def shipped_recipe(name: str) -> Path | None:
    """The shipped recipe of that name (`demo`, `4090d`), None when there is none."""
    return {path.stem: path for path in shipped_root("recipes").glob("*.yaml")}.get(name)


def shipped_names(kind: Kind) -> list[str]:
    """What ships, by name: recipes without their suffix, folders for the other kinds."""
    if kind == "recipes":
        return sorted(path.stem for path in shipped_root(kind).glob("*.yaml"))
    return sorted(path.name for path in shipped_root(kind).iterdir() if path.is_dir() and not path.name.startswith((".", "__")))


def builtin(path: str, kind: Kind) -> Path:
    """The folder that `builtin:NAME` stands for: a set (`calib`) or a checkpoint (`assets`).

    Raises UsageError for a name that nothing has.
    """
    name = path.removeprefix(BUILTIN)
    folder = shipped_root(kind) / name
    if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", name) and folder.is_dir():
        return folder
    what = "set" if kind == "calib" else "checkpoint"
    names = shipped_names(kind)
    near = nearest(name, names)
    hint = f"did you mean {BUILTIN}{near}?" if near else f"there are: {', '.join(BUILTIN + known for known in names)}"
    raise UsageError(f"there is no {what} {path}", hint)
