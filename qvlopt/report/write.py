"""Writes report folders: complete under their time stamp or absent, with a link `latest` to the newest."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from qvlopt.report.plain import finite

LATEST = "latest"


def jsonl_text(rows: Iterable[Mapping[str, Any]]) -> str:
    """One JSON object a line; NaN and infinities become null."""
    return "".join(json.dumps(finite(row), ensure_ascii=False, allow_nan=False) + "\n" for row in rows)


def new_folder(parent: Path, stamp: str) -> Path:
    """A path for a folder `parent/stamp` that does not exist yet, with a number behind where that one does."""
    path, number = parent / stamp, 2
    while path.exists():
        path, number = parent / f"{stamp}-{number}", number + 1
    return path


def write_report(folder: Path, files: Mapping[str, str]) -> None:
    """Writes the texts as UTF-8 into `folder`, which gets its name when all are on the disk, and points `latest` to it.

    Raises OSError when that fails; then nothing is left.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = folder.with_name(f".{folder.name}.tmp-{os.getpid()}")
    temporary.mkdir()
    try:
        for name, text in files.items():
            _write_text(temporary / name, text)
        os.rename(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    _point_latest(folder)


def _write_text(path: Path, text: str) -> None:
    # halves of surrogate pairs, which a model may say, have no UTF-8
    with path.open("w", encoding="utf-8", errors="backslashreplace", newline="\n") as handle:
        handle.write(text)
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
