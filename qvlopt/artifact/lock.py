"""One run at a time writes an output folder."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from qvlopt.errors import RunError


@contextmanager
def locked(destination: Path) -> Iterator[None]:
    """Holds `.NAME.lock` beside the destination; raises RunError, naming the process, when another run holds it."""
    path = lock_path(destination)
    try:
        descriptor = _acquire(path, destination)
    except OSError as error:
        raise RunError(f"{path} cannot be locked: {error.strerror}", hint="Choose another --output.") from error
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(descriptor)


def lock_path(destination: Path) -> Path:
    """The file that is locked while a run writes the destination."""
    return destination.parent / f".{destination.name}.lock"


def _acquire(path: Path, destination: Path) -> int:
    """An open descriptor that holds the lock on the file which `path` names now, not on one that was unlinked since."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_named(descriptor, path):
                os.ftruncate(descriptor, 0)
                os.write(descriptor, str(os.getpid()).encode())
                return descriptor
        except BlockingIOError as error:
            holder = os.pread(descriptor, 20, 0).decode("ascii", "replace") or "unknown"
            os.close(descriptor)
            fault = f"{destination} is being written by another run (process {holder})"
            raise RunError(fault, hint="Wait until it ends, or choose another --output.") from error
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _is_named(descriptor: int, path: Path) -> bool:
    """Whether `path` still names the open file: the run that held the lock unlinks it when it ends."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False
