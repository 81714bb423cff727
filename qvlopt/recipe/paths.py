"""Where a path written in a recipe points: `builtin:NAME`, else the recipe's folder, else the working directory."""

from __future__ import annotations

from pathlib import Path

from qvlopt.recipe.shipped import BUILTIN, Kind, builtin


def resolve_path(value: str, folder: Path, *, kind: Kind = "calib") -> Path | None:
    """The existing file or folder that `value` means, None when there is none.

    `folder` is the recipe's; `kind` says whether `builtin:` names a set (`calib`) or a checkpoint (`assets`). Raises what
    `shipped.builtin` raises for a builtin name that does not exist.
    """
    if value.startswith(BUILTIN):
        return builtin(value, kind)
    path = Path(value).expanduser()
    for candidate in (folder / path, path):
        if candidate.exists():
            return candidate
    return None
