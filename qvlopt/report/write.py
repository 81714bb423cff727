"""Writes report folders: complete under their time stamp or absent, with a link `latest` to the newest."""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from qvlopt.report.plain import json_text

LATEST = "latest"
LEFTOVER = re.compile(r"\.(?:[0-9]{8}T[0-9]{6}Z(?:-[0-9]+)?|latest)\.tmp-([0-9]+)(?:-[0-9a-f]+)?")
"""What a run that was killed while it wrote a report leaves beside, with that process's id."""


def jsonl_text(rows: Iterable[Mapping[str, Any]]) -> str:
    """One JSON object a line, as harmless to print as `json_text` makes it."""
    return "".join(json_text(row, indent=None) + "\n" for row in rows)


def new_folder(parent: Path, stamp: str) -> Path:
    """A path for a folder `parent/stamp` that does not exist yet, with a number behind where that one does."""
    path, number = parent / stamp, 2
    while path.exists():
        path, number = parent / f"{stamp}-{number}", number + 1
    return path


def prepare_parent(parent: Path, *, is_alive: Callable[[int], bool]) -> None:
    """Makes sure that reports can be written below `parent`, before the work whose outcome they hold; makes nothing that stays.

    Raises OSError when they cannot. What killed runs left there is removed: `is_alive` says of a process's id whether it still runs.
    """
    place = Path(os.path.abspath(parent))
    while not os.path.exists(place):
        place = place.parent
    with tempfile.TemporaryDirectory(dir=place, prefix=".qvlopt-"):
        pass
    for path in parent.glob(".*.tmp-*"):
        match = LEFTOVER.fullmatch(path.name)
        if match is None or is_alive(int(match[1])):
            continue
        if path.is_symlink():
            path.unlink(missing_ok=True)
        else:
            shutil.rmtree(path, ignore_errors=True)


def write_report(folder: Path, files: Mapping[str, str | bytes]) -> bool:
    """Writes the files, texts as UTF-8, into `folder`, which gets its name when all are on the disk, and points `latest` to it.

    False when another run took that name meanwhile. Raises OSError when writing fails. In both cases nothing is left.
    """
    made = [place for place in (folder.parent, *folder.parent.parents) if not place.exists()]
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = folder.with_name(f".{folder.name}.tmp-{os.getpid()}-{secrets.token_hex(4)}")
    try:
        temporary.mkdir()
        for name, content in files.items():
            _write_file(temporary / name, content)
        if not _renamed(temporary, folder):
            return False
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        for place in made:
            with suppress(OSError):  # not empty: the report is there
                place.rmdir()
    _point_latest(folder)
    return True


def _renamed(temporary: Path, folder: Path) -> bool:
    try:
        os.rename(temporary, folder)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            return False
        raise
    return True


def _write_file(path: Path, content: str | bytes) -> None:
    with path.open("wb") as handle:
        # halves of surrogate pairs, which a model may say, have no UTF-8
        handle.write(content.encode("utf-8", "backslashreplace") if isinstance(content, str) else content)
        handle.flush()
        os.fsync(handle.fileno())


def _point_latest(folder: Path) -> None:
    """A relative link beside the folder, replaced in one step; whatever else has that name is left alone."""
    link = folder.with_name(LATEST)
    if link.exists() and not link.is_symlink():
        return
    temporary = folder.with_name(f".{LATEST}.tmp-{os.getpid()}")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(folder.name, target_is_directory=True)
    os.replace(temporary, link)
