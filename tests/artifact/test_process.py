"""Threads and memory follow the container's limits, with files of both control group versions as the kernel writes them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from qvlopt.artifact.process import available_memory_bytes, memory_limit_bytes, peak_rss_bytes, thread_count
from qvlopt.errors import UsageError

GB = 1 << 30


class Machine:
    """Fake /proc and /sys/fs/cgroup."""

    def __init__(self, root: Path) -> None:
        self.cgroups, self.proc = root / "cgroup", root / "proc"
        sizes = f"MemTotal:       {64 * GB // 1024} kB\nMemFree: 1 kB\nMemAvailable:   {40 * GB // 1024} kB\nHugePages_Total: 0\n"
        self.write(self.proc / "meminfo", sizes)

    def write(self, path: Path, text: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def group(self, place: str, **files: object) -> None:
        for name, value in files.items():
            self.write(self.cgroups / place / name.replace("__", "."), f"{value}\n")

    def joined(self, text: str) -> None:
        self.write(self.proc / "self" / "cgroup", text)

    def threads(self, requested: int | None = None) -> int:
        return thread_count(requested, cgroups=self.cgroups, proc=self.proc)

    def limit(self) -> int:
        return memory_limit_bytes(cgroups=self.cgroups, proc=self.proc)

    def available(self) -> int:
        return available_memory_bytes(cgroups=self.cgroups, proc=self.proc)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """64 GiB and 16 allowed processors."""
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(16)), raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 128)
    return Machine(tmp_path)


def test_without_limits_affinity_and_memory_of_the_machine_count(machine: Machine) -> None:
    assert machine.threads() == 16
    assert machine.limit() == 64 * GB
    assert machine.available() == 40 * GB


@pytest.mark.parametrize(
    ("quota", "threads"), [("400000 100000", 4), ("max 100000", 16), ("250000 100000", 2), ("50000 100000", 1), ("9900000 100000", 16)]
)
def test_a_quota_of_version_2_bounds_the_threads(machine: Machine, quota: str, threads: int) -> None:
    machine.joined("0::/\n")
    machine.group("", cpu__max=quota)
    assert machine.threads() == threads


def test_the_tightest_group_above_counts(machine: Machine) -> None:
    machine.joined("0::/kubepods/pod1/box\n")
    machine.group("kubepods/pod1/box", cpu__max="max 100000", memory__max="max", memory__current=0)
    machine.group("kubepods/pod1", cpu__max="300000 100000", memory__max=8 * GB, memory__current=2 * GB)
    machine.group("kubepods", cpu__max="800000 100000", memory__max=32 * GB, memory__current=31 * GB)
    assert machine.threads() == 3
    assert machine.limit() == 8 * GB
    assert machine.available() == 1 * GB


def test_limits_of_version_1_count_at_the_mount_that_a_container_sees(machine: Machine) -> None:
    machine.joined("5:cpu,cpuacct:/docker/0a1b\n3:memory:/docker/0a1b\n")
    machine.group("cpu,cpuacct", cpu__cfs_quota_us=200000, cpu__cfs_period_us=100000)
    machine.group("memory", memory__limit_in_bytes=4 * GB, memory__usage_in_bytes=3 * GB, memory__stat=f"inactive_file 1\ntotal_inactive_file {GB}")
    assert machine.threads() == 2
    assert machine.limit() == 4 * GB
    assert machine.available() == 2 * GB


def test_no_limit_as_version_1_writes_it_is_none(machine: Machine) -> None:
    machine.joined("5:cpu:/\n3:memory:/\n")
    machine.group("cpu", cpu__cfs_quota_us=-1, cpu__cfs_period_us=100000)
    machine.group("memory", memory__limit_in_bytes=9223372036854771712, memory__usage_in_bytes=GB)
    assert machine.threads() == 16
    assert machine.limit() == 64 * GB
    assert machine.available() == 40 * GB


def test_file_cache_that_can_go_counts_as_free(machine: Machine) -> None:
    machine.joined("0::/\n")
    machine.group("", memory__max=10 * GB, memory__current=9 * GB, memory__stat=f"anon 5\ninactive_file {6 * GB}\n")
    assert machine.available() == 7 * GB


def test_a_group_over_its_limit_has_nothing_left(machine: Machine) -> None:
    machine.joined("0::/\n")
    machine.group("", memory__max=GB, memory__current=2 * GB)
    assert machine.available() == 0


def test_a_group_path_that_climbs_out_of_the_mount_is_read_at_the_mount(machine: Machine) -> None:
    machine.joined("0::/../../other\n")
    machine.group("", cpu__max="200000 100000")
    assert machine.threads() == 2


@pytest.mark.parametrize("junk", ["", "0::", "nonsense", "0::/\n\n"])
def test_unreadable_group_files_limit_nothing(machine: Machine, junk: str) -> None:
    machine.joined(junk)
    machine.group("", cpu__max="?", memory__max="?")
    assert machine.threads() == 16
    assert machine.limit() == 64 * GB


@pytest.mark.parametrize(("requested", "threads"), [(1, 1), (8, 8), (16, 16), (500, 16)])
def test_a_request_lowers_the_count_and_never_raises_it(machine: Machine, requested: int, threads: int) -> None:
    assert machine.threads(requested) == threads


@pytest.mark.parametrize("requested", [0, -1])
def test_a_request_below_one_is_refused(machine: Machine, requested: int) -> None:
    with pytest.raises(UsageError, match=rf"hardware\.threads is {requested}"):
        machine.threads(requested)


def test_this_process_has_its_own_limits_and_a_peak() -> None:
    assert 1 <= thread_count(None) <= (os.cpu_count() or 1)
    assert 0 < available_memory_bytes() <= memory_limit_bytes()
    assert 1 << 20 < peak_rss_bytes() < 1 << 45


@pytest.mark.skipif(sys.platform != "linux", reason="VmHWM is Linux's")
def test_the_peak_is_this_programs_and_not_its_parents() -> None:
    parent = bytearray(b"x" * (400 << 20))
    code = "from qvlopt.artifact.process import peak_rss_bytes; print(peak_rss_bytes())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) < len(parent) // 2


def test_a_system_without_proc_has_a_peak_too(tmp_path: Path) -> None:
    assert 1 << 20 < peak_rss_bytes(proc=tmp_path) < 1 << 45


@pytest.mark.skipif(sys.platform != "linux", reason="asks glibc")
def test_freed_memory_is_kept_for_the_next_use_and_given_back_in_the_end() -> None:
    """In a process of its own: what the tests before have left in the heap says nothing."""
    script = """
from pathlib import Path
import torch
from qvlopt.artifact.process import kept_memory
def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
def use():
    torch.ones(2**24)
torch.set_num_threads(1)
before = resident()
use()
without = resident()
with kept_memory():
    use()
    inside = resident()
print(without - before < 2**24, inside - before > 2**25, resident() - before < 2**24)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "True", "True"]
