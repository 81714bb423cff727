"""Processes of engines without an engine: they answer bench's messages at once, and their times are what a test says."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

from qvlopt.errors import RunError
from qvlopt.timing.stages import CallTimes

MIB = 1 << 20
STAGES = {"preprocess": 0.01, "vision": 0.1, "prefill": 0.08, "decode": 0.02, "detokenise": 0.001}
"""Seconds of one stretch of each stage where a test says nothing else."""

Factor = Callable[[str], float]
"""How much slower than STAGES the engine at a path is."""


class Machine:
    """Starts the doubles and remembers what they were asked. `fails` maps paths to why opening them fails.

    `alive` counts those that opened an engine; `paces` is what asking for the machine's pace gives in turn.
    """

    def __init__(self, factor: Factor = lambda _path: 1.0, *, spread: float = 0.01, keeps: bool = False) -> None:
        self.factor, self.spread, self.keeps = factor, spread, keeps
        self.fails: dict[str, str] = {}
        self.broken: dict[str, str] = {}
        self.threads: list[int] = []
        self.opened: list[str] = []
        self.messages: list[Mapping[str, Any]] = []
        self.calls: list[tuple[str, list[dict[str, Any]]]] = []
        self.alive = 0
        self.most_alive = 0
        self.paces: list[dict[str, float]] = []
        self.random = Random(0)

    @contextmanager
    def start(self, threads: int) -> Iterator[Double]:
        self.threads.append(threads)
        double = Double(self)
        try:
            yield double
        finally:
            self.alive -= bool(double.path)


class Double:
    """One process."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.path = ""

    @property
    def peak_tree_bytes(self) -> int:
        return 300 * MIB

    def ask(self, message: Mapping[str, Any]) -> dict[str, Any]:
        return {"open": self._open, "call": self._call, "probe": self._probe, "pace": self._pace, "close": self._close}[message["do"]](message)

    def _open(self, message: Mapping[str, Any]) -> dict[str, Any]:
        self.path = message["path"]
        self.machine.opened.append(self.path)
        self.machine.alive += 1
        self.machine.most_alive = max(self.machine.most_alive, self.machine.alive)
        self.machine.messages.append(message)
        if self.path in self.machine.fails:
            raise RunError(self.machine.fails[self.path])
        dtype = "bfloat16" if message["dtype"] == "bfloat16" else "float32"
        fingerprint = {"engine": "fake", "dtype": dtype, "model_digest": f"sha256:{Path(self.path).name}"}
        return {"load_s": 1.0, "fingerprint": fingerprint, "keeps": self.machine.keeps, "gpu": None}

    def _call(self, message: Mapping[str, Any]) -> dict[str, Any]:
        requests = message["requests"]
        self.machine.calls.append((self.path, requests))
        new = requests[0]["new_tokens"]
        factor = self.machine.factor(self.path) * self.machine.random.lognormvariate(0, self.machine.spread)
        stages = {name: (seconds * factor,) * (new - 1 if name == "decode" else 1) for name, seconds in STAGES.items()}
        wall = sum(map(sum, stages.values()))
        first = sum(stages[name][0] for name in ("preprocess", "vision", "prefill"))
        times = CallTimes(wall, len(requests), new * len(requests), (first,), (wall,), ((wall - first) / (new - 1),), stages, 60, 12)
        return {**times.to_json(), "error": self.machine.broken.get(self.path)}

    def _probe(self, message: Mapping[str, Any]) -> dict[str, Any]:
        return {"operations_per_s": dict.fromkeys(message["dtypes"], 1e10), "bytes_per_s": 1e10}

    def _pace(self, _message: Mapping[str, Any]) -> dict[str, Any]:
        """The next of what a test says; the last for ever."""
        paces = self.machine.paces
        return {"rates": (paces.pop(0) if len(paces) > 1 else paces[0]) if paces else {"float32": 1e10}}

    def _close(self, _message: Mapping[str, Any]) -> dict[str, Any]:
        return {"peak_rss_bytes": int(200 * MIB * self.machine.factor(self.path)), "anonymous_bytes": 150 * MIB, "peak_cuda_bytes": None}
