"""What was written is on the disk, not only in the system's cache."""

from __future__ import annotations

import os
from pathlib import Path


def sync_folder(folder: Path) -> None:
    """Returns when every file and folder inside, and the folder itself, is on the disk; raises OSError."""
    for place, _, files in os.walk(folder, topdown=False):
        for name in files:
            sync_path(Path(place, name))
        sync_path(Path(place))


def sync_path(path: Path) -> None:
    """Returns when this file, or the list of names of this folder, is on the disk; raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
