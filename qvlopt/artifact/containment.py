"""Paths named inside manifests, weight maps and locks stay inside their folder."""

from __future__ import annotations

from pathlib import Path, PurePosixPath, PureWindowsPath

from qvlopt.errors import RunError


def contained_file(folder: Path, name: str, *, named_by: str) -> Path:
    """The path of the file `name` of `folder`, as the folder spells it (links are not replaced by their targets).

    `named_by` says in errors where the name stands. A link may lead to a place inside the folder or, in a hub cache
    (`REPO/snapshots/REVISION/...`), to `REPO/blobs/`. The file need not exist.
    Raises RunError for an absolute name, one with `..`, and one that leads outside through a link.
    """
    if escapes(name):
        raise RunError(f"{named_by} names the path {name!r}, which leaves {folder}", hint="Only relative paths without '..' are read.")
    path = folder / name
    target = path.resolve()
    if not any(target.is_relative_to(root) for root in _roots(folder.resolve())):
        raise RunError(
            f"{path} is a link to {target}, outside {folder}",
            hint="Copy the file into the folder, or name the folder that holds it. Links of the hub's cache into its own blobs are followed.",
        )
    return path


def escapes(name: str) -> bool:
    """True for a name that is empty, absolute or climbs with `..`, by the rules of POSIX or of Windows."""
    pure = PurePosixPath(name)
    windows = PureWindowsPath(name)
    absolute = pure.is_absolute() or windows.is_absolute() or bool(windows.drive) or name.startswith("\\")
    return not name or "\0" in name or absolute or ".." in pure.parts or ".." in windows.parts


def _roots(folder: Path) -> list[Path]:
    """Folders in which a link's target may lie: the folder itself and the blobs of the hub cache that it belongs to."""
    roots = [folder]
    for ancestor in folder.parents:
        if ancestor.name == "snapshots" and (ancestor.parent / "blobs").is_dir():
            roots.append(ancestor.parent / "blobs")
            break
    return roots
