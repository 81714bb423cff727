"""Memory of a process and all that it started, from /proc; None where a system does not tell.

A kernel keeps the peak of each process, but that of a child started by fork begins with its parent's; VmHWM of the new
program does not. Peaks of several processes need not coincide, so their sum is sampled while they run.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

_PROC = Path("/proc")
INTERVAL_S = 0.05
"""Between two looks; one costs well under a millisecond."""


def resident_bytes(pid: int | str, field: str = "VmRSS", *, proc: Path = _PROC) -> int | None:
    """A size from /proc/PID/status: VmRSS now, VmHWM at most so far, RssAnon without files that are mapped."""
    try:
        lines = (proc / str(pid) / "status").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    for line in lines:
        name, _, value = line.partition(":")
        if name == field and value.split()[1:] == ["kB"]:
            return int(value.split()[0]) * 1024
    return None


def descendants(pid: int, *, proc: Path = _PROC) -> Iterator[int]:
    """The process itself and all below it."""
    yield pid
    for child in _children(proc / str(pid) / "task"):
        yield from descendants(child, proc=proc)


def _children(tasks: Path) -> list[int]:
    """Processes that any thread started; those that go away meanwhile have none."""
    found: list[int] = []
    with suppress(OSError):
        for task in os.listdir(tasks):
            with suppress(OSError):
                found += map(int, (tasks / task / "children").read_text(encoding="utf-8").split())
    return found


def tree_bytes(pid: int, *, proc: Path = _PROC) -> int:
    """Resident memory of a process and all below it, now; 0 when it is gone."""
    return sum(resident_bytes(each, proc=proc) or 0 for each in descendants(pid, proc=proc))


class PeakOfTree:
    """A context in which a thread watches a process tree; `peak` is the most that was seen, in bytes."""

    def __init__(self, pid: int, *, interval: float = INTERVAL_S) -> None:
        self.peak = 0
        self._pid = pid
        self._interval = interval
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while True:
            self.peak = max(self.peak, tree_bytes(self._pid))
            if self._over.wait(self._interval):
                return
