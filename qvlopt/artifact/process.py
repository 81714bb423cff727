"""What this process may use: threads and memory inside the limits of a container, and what it has used."""

from __future__ import annotations

import ctypes
import os
import resource
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from qvlopt.errors import UsageError

_CGROUPS = Path("/sys/fs/cgroup")
_PROC = Path("/proc")
_UNLIMITED_BYTES = 1 << 60
"""Control groups of version 1 write "no limit" as a number near 2**63."""

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4
"""Parameters of mallopt, from glibc's malloc.h: free bytes that the heap may end in, bytes from which a piece has pages of its own,
and how many such pieces there may be."""


def peak_rss_bytes(*, proc: Path = _PROC) -> int:
    """The largest resident memory of this program so far.

    getrusage(2) has what the parent held when it started this one in its maximum too, so Linux's own count comes first: VmHWM.
    """
    for line in _read(proc / "self" / "status").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


@contextmanager
def kept_memory() -> Iterator[None]:
    """Has the C library keep what is freed inside for the next use or `release_memory`, where it can be told to (glibc).

    Otherwise large pieces go back to the system at once, and it clears every page of the next one: a tenth of the time of
    work on tensors of some megabytes each.
    """
    _mallopt({_TRIM_THRESHOLD: 2**30, _MMAP_MAX: 0})
    try:
        yield
    finally:
        # Thresholds that were set no longer adapt, so these are where glibc's own end up after large pieces; the rest is its default.
        _mallopt({_TRIM_THRESHOLD: 2**26, _MMAP_THRESHOLD: 2**25, _MMAP_MAX: 2**16})
        release_memory()


def _mallopt(values: Mapping[int, int]) -> None:
    """mallopt(3), where there is one."""
    with suppress(OSError, AttributeError):
        library = ctypes.CDLL(None)
        for parameter, value in values.items():
            library.mallopt(parameter, value)


def release_memory() -> None:
    """Gives freed memory back to the system, where the C library has a way to (glibc): it keeps what lies between used pieces."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def is_another_alive(pid: int) -> bool:
    """Whether another process has this id. Our own id marks a leftover too, for in containers ids repeat."""
    if pid == os.getpid():
        return False
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True


def thread_count(requested: int | None, *, cgroups: Path = _CGROUPS, proc: Path = _PROC) -> int:
    """The smallest of the processors that this process may run on, the whole processors of its quota, and `requested`; at least 1.

    Raises UsageError when fewer than one is requested.
    """
    if requested is not None and requested < 1:
        raise UsageError(f"hardware.threads is {requested}, expected at least 1", hint="Leave it out to use all that is allowed.")
    limits = [_allowed_processors(), *map(int, _quotas(cgroups, proc))]
    if requested is not None:
        limits.append(requested)
    return max(1, min(limits))


def processor_quota(*, cgroups: Path = _CGROUPS, proc: Path = _PROC) -> float | None:
    """Processors' worth of time that the strictest control group above this process allows; None without a quota."""
    return min(_quotas(cgroups, proc), default=None)


def memory_limit_bytes(*, cgroups: Path = _CGROUPS, proc: Path = _PROC) -> int:
    """The smaller of the machine's memory and the limits of this process's control groups."""
    machine = _meminfo(proc).get("MemTotal", _UNLIMITED_BYTES)
    return min([machine, *(limit for limit, _ in _memory_limits(cgroups, proc))])


def available_memory_bytes(*, cgroups: Path = _CGROUPS, proc: Path = _PROC) -> int:
    """Memory that can still be used: the smallest of what the machine has left and each limit minus its use.

    File cache that the kernel gives back counts as free.
    """
    machine = _meminfo(proc).get("MemAvailable", _UNLIMITED_BYTES)
    return max(0, min([machine, *(limit - used for limit, used in _memory_limits(cgroups, proc))]))


def _allowed_processors() -> int:
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _quotas(cgroups: Path, proc: Path) -> Iterator[float]:
    """Processors' worth of time that each control group above this process allows."""
    for group in _groups(cgroups, proc, controller=""):
        quota, period = (*_read(group / "cpu.max").split(), "", "")[:2]
        if quota.isdigit() and period.isdigit():
            yield int(quota) / int(period)
    for group in _groups(cgroups, proc, controller="cpu"):
        quota, period = _read(group / "cpu.cfs_quota_us"), _read(group / "cpu.cfs_period_us")
        if quota.isdigit() and period.isdigit():
            yield int(quota) / int(period)


def _memory_limits(cgroups: Path, proc: Path) -> Iterator[tuple[int, int]]:
    """(limit, used) in bytes of each control group above this process that has a limit."""
    for controller, limit_file, used_file in (("", "memory.max", "memory.current"), ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes")):
        for group in _groups(cgroups, proc, controller=controller):
            limit, used = _read(group / limit_file), _read(group / used_file)
            if limit.isdigit() and int(limit) < _UNLIMITED_BYTES:
                yield int(limit), max(0, int(used or 0) - _reclaimable(group))


def _reclaimable(group: Path) -> int:
    """File cache that was not used lately; both versions write it to memory.stat (version 1 with `total_` for the subtree)."""
    fields = dict(line.split() for line in _read(group / "memory.stat").splitlines() if len(line.split()) == 2)
    return int(fields.get("total_inactive_file", fields.get("inactive_file", 0)))


def _groups(cgroups: Path, proc: Path, *, controller: str) -> Iterator[Path]:
    """This process's control group and those above it, for version 2 (controller "") or a controller of version 1.

    A container sees its own group as the root, so the path of /proc/self/cgroup may not exist below the mount.
    """
    for line in _read(proc / "self" / "cgroup").splitlines():
        _, names, path = (*line.split(":", 2), "", "")[:3]
        if controller not in names.split(","):
            continue
        mounts = [cgroups] if not controller else [mount for mount in (cgroups / names, cgroups / controller) if mount.is_dir()][:1]
        for mount in mounts:
            group = Path(os.path.normpath(f"{mount}/{path}"))
            if not group.is_relative_to(mount):
                group = mount
            while group != mount:
                yield group
                group = group.parent
            yield mount


def _meminfo(proc: Path) -> dict[str, int]:
    """Sizes in bytes by their names in /proc/meminfo; empty where there is no such file."""
    sizes = {}
    for line in _read(proc / "meminfo").splitlines():
        name, _, rest = line.partition(":")
        if rest.endswith("kB"):
            sizes[name] = int(rest.split()[0]) * 1024
    return sizes


def _read(path: Path) -> str:
    """The content without surrounding blanks, or "" when the file cannot be read."""
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""
