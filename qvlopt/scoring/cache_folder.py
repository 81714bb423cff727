"""Where results are kept between runs: one folder, capped by size, whose files are named by the digest of what they depend on."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

CACHE = "QVLOPT_CACHE"
LIMIT = 2 * 1024**3
"""Bytes that the folder may hold before a run; the files that were not used for longest go first."""


def cache_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """`$QVLOPT_CACHE`, else `qvlopt` in the user's cache folder (`$XDG_CACHE_HOME`, else `~/.cache`)."""
    if environment.get(CACHE):
        return Path(environment[CACHE]).expanduser()
    home = environment.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "qvlopt"


def keep_within(folder: Path, limit: int = LIMIT) -> None:
    """Removes the files that were changed longest ago until the folder holds at most `limit` bytes."""
    files = []
    for path in folder.rglob("*"):
        with suppress(OSError):
            if path.is_file() and not path.is_symlink():
                files.append((path.stat().st_mtime_ns, path.stat().st_size, path))
    total = sum(size for _, size, _ in files)
    for _, size, path in sorted(files, key=lambda entry: entry[0]):
        if total <= limit:
            return
        with suppress(OSError):
            path.unlink()
            total -= size
