"""An output folder takes the place of another, and only what an unchanged artifact consists of is ever removed."""

from __future__ import annotations

import errno
import logging
import os
import re
import secrets
import shutil
import stat
from pathlib import Path
from typing import Literal, NamedTuple

from qvlopt.artifact.digest import sha256_file
from qvlopt.artifact.lock import lock_path
from qvlopt.artifact.manifest import MANIFEST, FileRecord, read_manifest, stored_files
from qvlopt.artifact.process import is_another_alive
from qvlopt.artifact.syncing import sync_path
from qvlopt.errors import QvloptError, RunError, UsageError

_log = logging.getLogger(__name__)


class Removable(NamedTuple):
    """All that an artifact folder consists of: names of files, the manifest last, and of folders, the deepest first."""

    files: tuple[str, ...]
    folders: tuple[str, ...]


def removable(folder: Path) -> Removable:
    """What may be removed: all of the folder, if it holds nothing but files that its manifest lists, unchanged.

    Reads every file. Raises UsageError, naming what else is there, and removes nothing.
    """
    listed = _listed_files(folder)
    files = [name for name in sorted(stored_files(folder)) if name != MANIFEST or (folder / name).is_symlink()]
    problems = [f"{name} ({fault})" for name in files if (fault := _fault(folder / name, listed.get(name)))]
    needed = {parent.as_posix() for name in files for parent in Path(name).parents}
    folders = [Path(place).relative_to(folder).as_posix() for place, _, _ in os.walk(folder, topdown=False)]
    problems += [f"{name}/ (not listed)" for name in folders if name not in needed and name != "."]
    if problems:
        more = f" and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise _refused(f"{folder} holds what its {MANIFEST} does not account for: {', '.join(problems[:3])}{more}")
    return Removable((*files, MANIFEST), tuple(folders))


def put_in_place(temporary: Path, destination: Path) -> None:
    """Gives a finished folder its name; an artifact that has it steps aside first and is removed last.

    Raises UsageError when the destination is anything but absent, empty or an unchanged artifact.
    """
    if not destination.exists() or (destination.is_dir() and not any(destination.iterdir())):
        _rename(temporary, destination)
        return
    old = removable(destination)
    aside = beside(destination, "old")
    try:
        _rename(destination, aside)
        _rename(temporary, destination)
    finally:
        if aside.exists():
            _settle(aside, destination, old)


def beside(destination: Path, kind: Literal["tmp", "old"]) -> Path:
    """A new name beside the destination that says whose folder it is and which process made it."""
    return destination.parent / f".{destination.name}.{kind}-{os.getpid()}-{secrets.token_hex(4)}"


def clean_stale(destination: Path) -> None:
    """Removes what dead processes left beside; an old artifact that lost its name gets it back. The lock must be held."""
    for path, match in _beside_by_name(destination):
        if path.is_symlink() or not path.is_dir() or is_another_alive(int(match[2])):
            continue
        if match[1] == "tmp":
            shutil.rmtree(path, ignore_errors=True)
            continue
        try:
            _settle(path, destination, removable(path) if destination.exists() else None)
        except QvloptError as error:
            _log.warning("%s is kept: %s", path, error.message)


def has_leftovers(destination: Path) -> bool:
    """Whether an earlier run left something beside: a temporary folder, an old artifact or a lock."""
    return lock_path(destination).exists() or bool(_beside_by_name(destination))


def _beside_by_name(destination: Path) -> list[tuple[Path, re.Match[str]]]:
    """What has a name made by `beside`, and that name taken apart: kind and process."""
    pattern = re.compile(rf"\.{re.escape(destination.name)}\.(tmp|old)-(\d+)-[0-9a-f]+")
    matches = ((path, pattern.fullmatch(path.name)) for path in sorted(destination.parent.iterdir()))
    return [(path, match) for path, match in matches if match is not None]


def _settle(aside: Path, destination: Path, old: Removable | None) -> None:
    """Gives an old artifact its name back if nothing took its place, else removes it."""
    if not destination.exists():
        _rename(aside, destination)
    elif old is not None:
        _remove(aside, old)


def _remove(folder: Path, removable: Removable) -> None:
    """Removes the files, then the folders; what came in meanwhile stays, with a warning."""
    for name in removable.files:
        (folder / name).unlink(missing_ok=True)
    try:
        for name in removable.folders:
            (folder / name).rmdir()
    except OSError as error:
        _log.warning("%s is kept: %s", folder, error.strerror)


def _rename(source: Path, target: Path) -> None:
    """Renames a folder, onto an empty one at most, for good."""
    try:
        source.rename(target)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise UsageError(f"{target} was made by something else during the run", hint="Choose another --output.") from error
        raise RunError(f"{source} cannot be renamed to {target}: {error.strerror}", hint="Choose another --output.") from error
    sync_path(target.parent)


def _listed_files(folder: Path) -> dict[str, FileRecord]:
    if not folder.is_dir():
        raise _refused(f"{folder} is not a folder")
    try:
        return read_manifest(folder).files
    except RunError as error:
        raise _refused(f"{folder} cannot be overwritten: {error.message}") from error


def _fault(path: Path, record: FileRecord | None) -> str | None:
    """Why this file does not belong to the artifact."""
    status = path.lstat()
    if not stat.S_ISREG(status.st_mode):
        return "no regular file"
    if record is None:
        return "not listed"
    if status.st_size != record.bytes or sha256_file(path) != record.sha256:
        return "changed since it was written"
    return None


def _refused(fault: str) -> UsageError:
    return UsageError(fault, hint="Nothing was removed. Move it away, or choose another --output.")
