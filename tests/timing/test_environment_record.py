"""The record of the machine: real values where the kernel tells, None where it does not, threads within affinity and quota."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import qvlopt
from qvlopt.timing.environment import SAME_MACHINE, Roots, comparable, environment_record, git_state, gpu_state

CPUINFO = "processor\t: 0\nmodel name\t: Fast CPU 9000\nflags\t\t: fpu avx2 fma avx512f amx_int8 zzz\n\nprocessor\t: 1\nmodel name\t: Other\n"


def machine(folder: Path, files: dict[str, str]) -> Roots:
    roots = Roots(folder / "proc", folder / "sys", folder / "cgroups")
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)
    return roots


def test_what_the_kernel_tells_is_recorded(tmp_path: Path) -> None:
    cpu = "sys/devices/system/cpu"
    files = {
        "proc/cpuinfo": CPUINFO,
        "proc/loadavg": "1.50 0.75 0.10 2/345 6789\n",
        "proc/meminfo": "MemTotal: 2048 kB\nMemAvailable: 1024 kB\n",
        "proc/sys/kernel/randomize_va_space": "2\n",
        f"{cpu}/cpu0/cpufreq/scaling_governor": "powersave\n",
        f"{cpu}/cpu0/cpufreq/cpuinfo_max_freq": "3700000\n",
        f"{cpu}/intel_pstate/no_turbo": "1\n",
    }
    record = environment_record(roots=machine(tmp_path, files))
    assert record["cpu_model"] == "Fast CPU 9000"
    assert record["isa"] == ["avx2", "fma", "avx512f", "amx_int8"]
    assert (record["governor"], record["frequency_max_khz"], record["turbo"]) == ("powersave", 3700000, False)
    assert record["load_average"] == [1.5, 0.75, 0.1]
    assert record["memory_limit_bytes"] == 2048 * 1024
    assert record["address_randomisation"] == 2
    json.dumps(record)


def test_what_it_does_not_tell_is_null(tmp_path: Path) -> None:
    record = environment_record(roots=machine(tmp_path, {}))
    for key in ("cpu_model", "isa", "governor", "frequency_max_khz", "frequency_now_khz", "turbo", "power_limit_uw", "load_average", "container"):
        assert record[key] is None, key
    assert record["processor_quota"] is None
    assert record["gpu"] is None


@pytest.mark.parametrize(("quota", "threads"), [("100000 100000", 1), ("50000 100000", 1), ("max 100000", None)])
def test_threads_follow_a_quota(tmp_path: Path, quota: str, threads: int | None) -> None:
    roots = machine(tmp_path, {"proc/self/cgroup": "0::/\n", "cgroups/cpu.max": f"{quota}\n"})
    record = environment_record(roots=roots)
    assert record["threads"] == (threads or len(os.sched_getaffinity(0)))
    assert record["processor_quota"] == (None if quota.startswith("max") else int(quota.split()[0]) / 100000)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="affinity is Linux's")
def test_threads_follow_the_affinity() -> None:
    """What `taskset -c 0` does, in a process of its own."""
    code = (
        "import os, json; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
        "from qvlopt.timing.environment import environment_record\n"
        "record = environment_record(); print(json.dumps([record['threads'], record['processors']]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path(qvlopt.__file__).parents[1])
    assert json.loads(done.stdout) == [1, 1]


def test_what_the_recipe_asks_for_is_the_most(tmp_path: Path) -> None:
    assert environment_record(threads=1, roots=machine(tmp_path, {}))["threads"] == 1


def test_a_folder_without_git_has_no_state(tmp_path: Path) -> None:
    assert git_state(tmp_path) is None


def test_a_checkouts_commit_and_changes(tmp_path: Path) -> None:
    def git(*words: str) -> None:
        subprocess.run(["git", "-C", str(tmp_path), "-c", "user.name=x", "-c", "user.email=x@example.org", *words], check=True, capture_output=True)

    git("init")
    (tmp_path / "file").write_text("one")
    git("add", "file")
    git("commit", "-m", "first")
    clean = git_state(tmp_path)
    assert clean is not None
    assert (len(clean["commit"]), clean["dirty"]) == (40, False)
    (tmp_path / "file").write_text("two")
    assert git_state(tmp_path) == {"commit": clean["commit"], "dirty": True}


def test_machines_are_compared_by_what_matters() -> None:
    record = environment_record()
    assert set(comparable(record)) == set(SAME_MACHINE)
    near = {**record, "memory_limit_bytes": record["memory_limit_bytes"] + 4096, "load_average": [9.0], "versions": {"torch": "0"}}
    assert comparable(near) == comparable(record)
    assert comparable({**record, "threads": record["threads"] + 1}) != comparable(record)


def test_a_gpu_is_compared_by_its_name() -> None:
    one, other = {"gpu": {"name": "H200", "memory_bytes": 1}}, {"gpu": {"name": "H200", "memory_bytes": 2}}
    assert comparable(one) == comparable(other) != comparable({"gpu": {"name": "4090"}})


def test_without_a_gpus_own_program_its_state_is_unknown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert set(gpu_state().values()) == {None}


def test_what_the_gpus_own_program_says_is_recorded_and_what_it_cannot_say_is_null(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho '580.1, 450.00 W, [N/A], 210 MHz, 2520 MHz, Disabled, 0 %'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    state = gpu_state()
    assert (state["driver_version"], state["power_limit"], state["power_draw"], state["mig_mode_current"]) == ("580.1", "450.00 W", None, "Disabled")
