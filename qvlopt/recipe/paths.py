"""Where a path written in a recipe points: `builtin:NAME`, else the recipe's folder, else the working directory."""

from __future__ import annotations

import os
from pathlib import Path

from qvlopt.recipe.shipped import BUILTIN, Kind, builtin


def resolve_path(value: str, folder: Path, *, kind: Kind = "calib") -> Path | None:
    """The existing file or folder that `value` means, None when there is none.

    `folder` is the recipe's; `kind` says whether `builtin:` names a set (`calib`) or a checkpoint (`assets`). Raises what
    `shipped.builtin` raises for a builtin name that does not exist.
    """
    if not value:
        return None
    if value.startswith(BUILTIN):
        return builtin(value, kind)
    path = user_path(value)
    return next((candidate for candidate in (folder / path, path) if is_there(candidate)), None)


def user_path(value: str | Path) -> Path:
    """`value` with a leading `~` or `~USER` replaced by that user's folder, and kept where there is no such user."""
    return Path(os.path.expanduser(value))


def is_there(path: Path) -> bool:
    """Whether something is at `path`. A name that no file can have, and a folder that may not be looked into, hold nothing."""
    return os.path.exists(path)
