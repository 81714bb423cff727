"""Takes the turns: one engine's process at a time, warm-ups first, every call's raw times kept."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from qvlopt.commands.bench_inputs import BenchTarget, weight_bytes
from qvlopt.commands.bench_process import Asked, OpenProcess
from qvlopt.errors import RunError
from qvlopt.report.progress import Progress
from qvlopt.timing.plan import STATES, Case, State, Turn, Workload
from qvlopt.timing.result import EngineResult, Iteration, gathered
from qvlopt.timing.samples import Samples
from qvlopt.timing.session import Request
from qvlopt.timing.stages import call_from_json
from qvlopt.timing.workload import write_picture

log = logging.getLogger(__name__)

Key = tuple[Case, State]


@dataclass
class Record:
    """What is known of one engine so far."""

    iterations: dict[Key, list[Iteration]] = field(default_factory=dict)
    first: dict[Key, float] = field(default_factory=dict)
    loads: list[float] = field(default_factory=list)
    peaks: list[int] = field(default_factory=list)
    anonymous: list[int] = field(default_factory=list)
    cuda_peaks: list[int] = field(default_factory=list)
    paces: list[dict[str, float]] = field(default_factory=list)
    fingerprint: dict[str, Any] = field(default_factory=dict)
    gpu: dict[str, Any] | None = None
    error: str | None = None


@dataclass(frozen=True)
class Bench:
    """The engines, their requests, where the pictures are, how processes are started, and how fast the machine is at the moment."""

    targets: Sequence[BenchTarget]
    workload: Workload
    pictures: Path
    threads: int
    open_process: OpenProcess
    pace: Callable[[], dict[str, float]]
    progress: Progress

    def run(self) -> tuple[Record, ...]:
        """Takes every turn. An engine that fails has its `error` and no further turns; the others go on."""
        records = tuple(Record() for _ in self.targets)
        self._draw()
        turns = list(self.workload.turns(len(self.targets)))
        pace = self.pace()
        self.progress.start(sum(self._calls(turn) for turn in turns), "bench")
        try:
            for turn in turns:
                record, target = records[turn.engine], self.targets[turn.engine]
                if record.error is not None:
                    continue
                self.progress.advance(0, f"bench {target.name}, round {turn.round + 1} of {self.workload.rounds}")
                try:
                    self._take(turn, target, record)
                except RunError as error:
                    record.error = str(error)
                    log.warning("%s: %s", target.name, error)
                before, pace = pace, self.pace()
                record.paces += [before, pace]
        finally:
            self.progress.finish()
        return records

    def requests(self, case: Case, index: int, state: State) -> list[Request]:
        """The requests of one call: no two iterations share a picture or a prompt, unless the state says so."""
        number, seed = self.workload.cases.index(case), self.workload.seed
        return [
            Request(
                id=f"{number}-{index}-{each}-{state}",
                picture=str(self._picture(case, (seed, number, index, each))),
                prompt_seed=(seed, number, index, each, STATES.index(state)),
                prompt_tokens=case.prompt_tokens,
                new_tokens=case.new_tokens,
                picture_last=state == "warm picture",
            )
            for each in range(case.concurrency)
        ]

    def _draw(self) -> None:
        """All pictures, before any clock runs."""
        total = self.workload.iterations * sum(case.concurrency for case in self.workload.cases)
        self.progress.start(total, "drawing pictures")
        for case in self.workload.cases:
            for index in range(self.workload.iterations):
                self.requests(case, index, "cold")
                self.progress.advance(case.concurrency)

    def _picture(self, case: Case, seed: tuple[int, ...]) -> Path:
        return write_picture(self.pictures, case.width, case.height, seed)

    def _calls(self, turn: Turn) -> int:
        return len(self.workload.cases) * (len(turn.warmup) + len(turn.measured))

    def _take(self, turn: Turn, target: BenchTarget, record: Record) -> None:
        with self.open_process(self.threads) as process:
            opened = process.ask({"do": "open", **asdict(target.spec)})
            record.fingerprint, record.gpu = dict(opened["fingerprint"]), opened["gpu"]
            if opened["load_s"] is not None:
                record.loads.append(opened["load_s"])
            for case in self.workload.cases:
                is_warmed = opened["keeps"] and case == self.workload.cases[0] and case.concurrency == 1
                states = STATES if is_warmed else STATES[:1]
                for index in (*turn.warmup, *turn.measured):
                    for state in states:
                        self._call(process, record, (case, state), index, turn)
                    self.progress.advance()
            closed = process.ask({"do": "close"})
        # a server's own memory cannot be seen from here, and its client's says nothing
        if target.spec.kind != "openai":
            record.peaks.append(max(closed["peak_rss_bytes"], process.peak_tree_bytes))
            record.anonymous += [closed["anonymous_bytes"]] if closed["anonymous_bytes"] is not None else []
        if closed["peak_cuda_bytes"] is not None:
            record.cuda_peaks.append(closed["peak_cuda_bytes"])

    def _call(self, process: Asked, record: Record, key: Key, index: int, turn: Turn) -> None:
        case, state = key
        reply = process.ask({"do": "call", "requests": [asdict(request) for request in self.requests(case, index, state)]})
        times = call_from_json(reply)
        record.first.setdefault(key, times.wall)
        if index in turn.measured:
            record.iterations.setdefault(key, []).append(Iteration(turn.round, index, times))


def engine_result(target: BenchTarget, record: Record, cases: Sequence[Case]) -> EngineResult:
    """The record of an engine as a result, without its limits."""
    keys: list[Key] = [(case, state) for state in STATES for case in cases]
    results = tuple(replace(result, first=record.first.get((result.case, result.state))) for result in gathered(keys, record.iterations))
    return EngineResult(
        name=target.name,
        candidate=target.candidate,
        cases=results,
        load=Samples(tuple(record.loads)),
        peak_rss=Samples(tuple(map(float, record.peaks)), "bytes"),
        peak_cuda=Samples(tuple(map(float, record.cuda_peaks)), "bytes"),
        anonymous_bytes=max(record.anonymous, default=None),
        artifact_bytes=weight_bytes(target.folder),
        fingerprint=record.fingerprint,
        paces=tuple(record.paces),
        error=record.error,
    )
