"""Output folders that are complete or absent: written beside, synced, renamed."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal, NamedTuple

from qvlopt.artifact.lock import locked
from qvlopt.artifact.manifest import CARD, MANIFEST, read_manifest, verify_files
from qvlopt.artifact.replacement import beside, clean_stale, has_leftovers, put_in_place, removable
from qvlopt.artifact.syncing import sync_folder
from qvlopt.artifact.unfinished import discard_unfinished, parts_folder
from qvlopt.errors import RunError, UsageError

State = Literal["absent", "same", "other"]

REPLACE = "Use --overwrite to replace it, --resume to go on with what is there, or another --output."
AWAY = "Move it away, or choose another --output."

_DISK_FULL = {errno.ENOSPC: "the disk is full", errno.EDQUOT: "the disk quota is used up", errno.EFBIG: "a file became larger than allowed"}


@contextmanager
def write_folder(destination: Path, *, digest: str, overwrite: bool = False) -> Iterator[Path]:
    """Yields an empty temporary folder beside `destination`, which gets that name when the block ends without an error.

    The block must leave a `qvlopt.json` with this `digest`. After an error or interrupt nothing is left. Raises UsageError
    when the destination is taken (with `overwrite`: by anything but an unchanged artifact), and RunError when another run
    is writing it, when the disk is full and when the place cannot be written.
    """
    destination = Path(os.path.realpath(destination))
    made = _make_parents(destination.parent)
    try:
        with locked(destination):
            clean_stale(destination)
            _refuse_taken(destination, digest, overwrite)
            temporary = beside(destination, "tmp")
            try:
                _make(temporary)
                yield temporary
                _check_complete(temporary, digest)
                sync_folder(temporary)
                if not overwrite:
                    _refuse_taken(destination, digest, overwrite)
                put_in_place(temporary, destination)
            finally:
                shutil.rmtree(temporary, ignore_errors=True)
    except BaseException as error:
        for folder in reversed(made):
            with suppress(OSError):
                folder.rmdir()
        if isinstance(error, OSError) and error.errno in _DISK_FULL:
            raise RunError(f"{destination} was not written: {_DISK_FULL[error.errno]}", hint="Free some space or choose another --output.") from error
        raise


def existing_state(destination: Path, digest: str) -> State:
    """Whether the destination is free, holds the complete result with this digest, or holds something else.

    An empty folder is free. Where the digest is right, every file but the card is read and compared with the manifest.
    """
    taken = _taken(destination, digest)
    if taken is None:
        return "absent"
    return "same" if taken.is_result else "other"


def is_done(destination: Path, digest: str, *, overwrite: bool) -> bool:
    """Whether the destination holds this result already, so that there is nothing to do.

    What killed runs left beside it is removed then. Raises UsageError, before any work, when it holds something that may not
    be replaced.
    """
    destination = Path(os.path.realpath(destination))
    if existing_state(destination, digest) == "same":
        if has_leftovers(destination) or parts_folder(destination).exists():
            with suppress(RunError), locked(destination):  # another run may be at work there, or the place be read-only
                clean_stale(destination)
                discard_unfinished(destination, digest)
        return True
    _refuse_taken(destination, digest, overwrite)
    return False


def require_space(folder: Path, needed_bytes: int) -> None:
    """Raises RunError when the disk of `folder`, which need not exist yet, has less than `needed_bytes` free."""
    place = Path(os.path.realpath(folder))
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if free < needed_bytes:
        fault = f"{folder} needs {_size(needed_bytes)}, its disk has {_size(free)} free"
        raise RunError(fault, hint="Free some space or choose another --output.")


def _size(n_bytes: int) -> str:
    return f"{n_bytes / 1e9:.2f} GB" if n_bytes >= 1e8 else f"{n_bytes / 1e6:.2f} MB"


class _Taken(NamedTuple):
    """What stands where a result is to go: a clause that says it, what to do, and whether it is that very result."""

    by: str
    hint: str
    is_result: bool = False


def _taken(destination: Path, digest: str) -> _Taken | None:
    """None when the destination is free."""
    if not os.path.exists(destination):
        return None
    if not destination.is_dir():
        return _Taken("is not a folder", AWAY)
    if not any(destination.iterdir()):
        return None
    try:
        manifest = read_manifest(destination)
    except RunError as error:
        return _Taken(f"is taken: {error.message}", AWAY)
    if manifest.digest != digest:
        return _Taken(f"holds another result: {manifest.kind} with digest {manifest.digest[:12]}, expected {digest[:12]}", REPLACE)
    problems = verify_files(destination, but=(CARD,))
    if problems:
        return _Taken(f"holds this result, but damaged: {problems[0]}", AWAY)
    return _Taken("holds this result already", REPLACE, is_result=True)


def _refuse_taken(destination: Path, digest: str, overwrite: bool) -> None:
    taken = _taken(destination, digest)
    if taken is None:
        return
    if overwrite:
        removable(destination)
        return
    raise UsageError(f"{destination} {taken.by}", hint=taken.hint)


def _check_complete(temporary: Path, digest: str) -> None:
    """An artifact that does not say what it is could never be recognised or replaced."""
    written = read_manifest(temporary).digest
    if written != digest:
        raise RunError(f"{temporary / MANIFEST} has digest {written}, expected {digest}")


def _make_parents(folder: Path) -> list[Path]:
    """Makes the folder and returns those that were missing, the outermost first."""
    missing: list[Path] = []
    place = folder
    while not place.exists():
        missing.insert(0, place)
        place = place.parent
    for path in missing:
        _make(path)
    return missing


def _make(folder: Path) -> None:
    try:
        folder.mkdir()
    except OSError as error:
        raise RunError(f"{folder} cannot be made: {error.strerror}", hint="Choose another --output.") from error
