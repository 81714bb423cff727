"""The machine and the programs that a measurement was made with. What cannot be read is None, never guessed."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import qvlopt
from qvlopt.artifact.process import available_memory_bytes, memory_limit_bytes, processor_quota, thread_count

PACKAGES = ("torch", "transformers", "onnxruntime", "numpy", "pillow", "tokenizers", "safetensors")
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "KMP_AFFINITY", "GOMP_CPU_AFFINITY", "ORT_NUM_THREADS")
ISA_FLAGS = (
    "sse4_2", "avx", "avx2", "fma", "f16c", "avx_vnni", "avx512f", "avx512bw", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_int8",
    "amx_bf16", "asimd", "asimddp", "i8mm", "bf16", "sve",
)  # fmt: skip
"""Instruction sets that matrix kernels choose by; names of /proc/cpuinfo (x86 `flags`, Arm `Features`)."""
GPU_FIELDS = ("driver_version", "power.limit", "power.draw", "clocks.sm", "clocks.max.sm", "mig.mode.current", "utilization.gpu")
SAME_MACHINE = ("cpu_model", "processors", "processor_quota", "threads", "isa", "gpu", "memory_limit_bytes")
"""Keys that two measurements must share to be compared. Versions may differ: they may be what is compared."""


class Roots(NamedTuple):
    """Where the kernel tells about the machine; tests have their own."""

    proc: Path = Path("/proc")
    sys: Path = Path("/sys")
    cgroups: Path = Path("/sys/fs/cgroup")


HOST = Roots()


def environment_record(*, threads: int | None = None, gpu: Mapping[str, Any] | None = None, roots: Roots = HOST) -> dict[str, Any]:
    """JSON values. `threads` is what the recipe asks for: the record has what affinity and quota leave of it."""
    return {
        "time_utc": datetime.now(UTC).isoformat(timespec="seconds"),
        "qvlopt": qvlopt.__version__,
        "git": git_state(Path(qvlopt.__file__).parents[1]),
        "system": f"{platform.system()} {platform.release()}",
        "container": _container(roots),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in PACKAGES},
        "threads": thread_count(threads, cgroups=roots.cgroups, proc=roots.proc),
        "thread_variables": {name: os.environ.get(name) for name in THREAD_VARIABLES},
        **_processor(roots),
        "memory_limit_bytes": memory_limit_bytes(cgroups=roots.cgroups, proc=roots.proc),
        "memory_available_bytes": available_memory_bytes(cgroups=roots.cgroups, proc=roots.proc),
        "load_average": _load(roots),
        "gpu": dict(gpu) if gpu else None,
    }


def comparable(record: Mapping[str, Any]) -> dict[str, Any]:
    """What of a record must be the same on both sides of a comparison."""
    chosen = {key: record.get(key) for key in SAME_MACHINE}
    limit, gpu = chosen["memory_limit_bytes"], chosen["gpu"]
    if isinstance(limit, int) and limit > 0:
        digits = len(str(limit)) - 2
        chosen["memory_limit_bytes"] = round(limit, -digits)
    chosen["gpu"] = gpu.get("name") if isinstance(gpu, Mapping) else None
    return chosen


def git_state(folder: Path) -> dict[str, Any] | None:
    """Commit of the checkout that the package runs from and whether it has changes; None for an installed package."""
    if not (folder / ".git").exists():
        return None
    commit = _git(folder, "rev-parse", "HEAD")
    if commit is None:
        return None
    changes = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return {"commit": commit, "dirty": None if changes is None else bool(changes)}


def gpu_state() -> dict[str, str | None]:
    """What nvidia-smi says of the first GPU: driver, power, clocks, MIG and how busy it is; None where it does not."""
    said = _said("nvidia-smi", f"--query-gpu={','.join(GPU_FIELDS)}", "--format=csv,noheader", "--id=0")
    values = [value.strip() for value in said.splitlines()[0].split(",")] if said else []
    known = dict(zip(GPU_FIELDS, values, strict=True)) if len(values) == len(GPU_FIELDS) else {}
    return {name.replace(".", "_"): None if known.get(name, "[N/A]").startswith("[") else known[name] for name in GPU_FIELDS}


def _git(folder: Path, *words: str) -> str | None:
    return _said("git", "-C", str(folder), *words)


def _said(*words: str) -> str | None:
    """What a program prints; None when it is not there, fails or takes too long."""
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _processor(roots: Roots) -> dict[str, Any]:
    info = _fields(roots.proc / "cpuinfo")
    flags = (info.get("flags") or info.get("Features") or "").split()
    frequency = roots.sys / "devices/system/cpu/cpu0/cpufreq"
    return {
        "cpu_model": info.get("model name") or info.get("Processor"),
        "machine": platform.machine(),
        "processors": _affinity(),
        "processors_online": os.cpu_count(),
        "processor_quota": processor_quota(cgroups=roots.cgroups, proc=roots.proc),
        "isa": [flag for flag in ISA_FLAGS if flag in flags] if flags else None,
        "governor": _text(frequency / "scaling_governor"),
        "frequency_max_khz": _whole(frequency / "cpuinfo_max_freq"),
        "frequency_now_khz": _whole(frequency / "scaling_cur_freq"),
        "turbo": _turbo(roots.sys),
        "power_limit_uw": _whole(roots.sys / "class/powercap/intel-rapl:0/constraint_0_power_limit_uw"),
        "address_randomisation": _whole(roots.proc / "sys/kernel/randomize_va_space"),
    }


def _affinity() -> int | None:
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else None


def _turbo(root: Path) -> bool | None:
    """Intel's driver says whether turbo is off, the generic one whether boost is on."""
    off, boost = _whole(root / "devices/system/cpu/intel_pstate/no_turbo"), _whole(root / "devices/system/cpu/cpufreq/boost")
    if off is not None:
        return off == 0
    return None if boost is None else boost == 1


def _container(roots: Roots) -> str | None:
    """`docker` or `podman` by the files they leave, a name from the control group, None where nothing tells."""
    root = roots.proc.parent
    if (root / ".dockerenv").exists():
        return "docker"
    if (root / "run/.containerenv").exists():
        return "podman"
    groups = _text(roots.proc / "1/cgroup") or ""
    return next((name for name in ("kubepods", "docker", "lxc", "containerd") if name in groups), None)


def _load(roots: Roots) -> list[float] | None:
    words = (_text(roots.proc / "loadavg") or "").split()[:3]
    return [float(word) for word in words] if len(words) == 3 else None


def _fields(path: Path) -> dict[str, str]:
    """The first value of every name in a file of `name : value` lines."""
    fields: dict[str, str] = {}
    for line in (_text(path) or "").splitlines():
        name, colon, value = line.partition(":")
        if colon:
            fields.setdefault(name.strip(), value.strip())
    return fields


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip() or None
    except OSError:
        return None


def _whole(path: Path) -> int | None:
    text = _text(path)
    return int(text) if text is not None and text.lstrip("-").isdigit() else None
