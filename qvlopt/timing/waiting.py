"""How long this process's threads stood in line for a processor: what tells a slower program from a busier machine.

Linux counts it for every thread (Documentation/scheduler/sched-stats.rst, /proc/PID/schedstat, second field, nanoseconds).
Time that a hypervisor gave to other guests is not in it.
"""

from __future__ import annotations

import os
from pathlib import Path

_SELF = Path("/proc/self")
BUSY_SHARE = 0.10
"""Waiting for more than this share of the wall time, all threads together, means that something else was running."""


def waited_seconds(*, process: Path = _SELF) -> float | None:
    """Seconds that the live threads have waited so far, together; None where the kernel does not count."""
    nanoseconds, is_counted = 0, False
    try:
        tasks = os.listdir(process / "task")
    except OSError:
        return None
    for task in tasks:
        try:
            fields = (process / "task" / task / "schedstat").read_text(encoding="ascii").split()
        except OSError:  # it ended meanwhile, or nothing is counted here
            continue
        if len(fields) == 3:
            nanoseconds, is_counted = nanoseconds + int(fields[1]), True
    return nanoseconds / 1e9 if is_counted else None
