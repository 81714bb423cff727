"""Memory of a process tree from /proc, as the kernel writes it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from qvlopt.timing.memory import PeakOfTree, descendants, resident_bytes, tree_bytes

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def process(proc: Path, pid: int, kilobytes: int, children: str = "") -> None:
    task = proc / str(pid) / "task" / str(pid)
    task.mkdir(parents=True)
    (proc / str(pid) / "status").write_text(f"Name:\tx\nVmHWM:\t{2 * kilobytes} kB\nVmRSS:\t{kilobytes} kB\n")
    (task / "children").write_text(children)


def test_a_tree_is_summed(tmp_path: Path) -> None:
    process(tmp_path, 1, 100, "2 3 ")
    process(tmp_path, 2, 10)
    process(tmp_path, 3, 5, "4")
    process(tmp_path, 4, 1)
    process(tmp_path, 9, 1000)
    assert list(descendants(1, proc=tmp_path)) == [1, 2, 3, 4]
    assert tree_bytes(1, proc=tmp_path) == 116 * 1024
    assert resident_bytes(1, "VmHWM", proc=tmp_path) == 200 * 1024


def test_a_process_that_has_gone_has_nothing(tmp_path: Path) -> None:
    assert resident_bytes(77, proc=tmp_path) is None
    assert tree_bytes(77, proc=tmp_path) == 0


def test_a_field_that_is_not_there_is_none() -> None:
    assert resident_bytes("self", "VmNothing") is None
    assert (resident_bytes("self", "VmHWM") or 0) >= (resident_bytes("self") or 0) // 2 > 0


def test_the_peak_of_a_child_is_seen_and_its_parent_not() -> None:
    """The child holds 64 MiB until it is told to end; the test does, so nothing depends on how long anything takes."""
    code = "held = b'x' * (64 << 20); print('ready', flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdout.readline()
        with PeakOfTree(child.pid, interval=60.0) as watch:
            while not watch.peak:
                os.sched_yield()
        child.stdin.write("\n")
        child.stdin.flush()
    assert 64 << 20 < watch.peak < 256 << 20
