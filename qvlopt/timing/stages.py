"""Where the time of one call goes: the engine's stages on a clock that is an argument.

A call is one `generate` of one or more requests. Its wall time is read on its own, not added up from its stages, so that
what no stage covers shows (`CallTimes.coverage`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

Clock = Callable[[], float]
"""Seconds that never go back, such as `time.perf_counter`."""

STAGES = ("preprocess", "vision", "prefill", "decode", "detokenise")
"""In the order of a request; the names of `runtime.engine.Stage`."""


class Entry(NamedTuple):
    """One stretch of a stage, in seconds since the call began."""

    stage: str
    began: float
    ended: float


@dataclass(frozen=True)
class CallTimes:
    """What one call took, in seconds, and what it made.

    `stages` has every stretch of each stage (decode: one a step), `ttft` and `e2e` one value a request where requests are
    timed apart (a server's; `ttft` also where an engine takes them one after the other) and one for the whole call otherwise.
    `tokens` are new ids of all answers. `prompt_tokens` are the first request's, of which `picture_tokens` stand for its
    picture; None where unknown. `waited` is how long the engine's threads stood in line for a processor, together. `error`
    says why the call does not count.
    """

    wall: float
    requests: int
    tokens: int
    ttft: tuple[float, ...]
    e2e: tuple[float, ...]
    tpot: tuple[float, ...] = ()
    stages: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    prompt_tokens: int | None = None
    picture_tokens: int | None = None
    waited: float | None = None
    error: str | None = None

    @property
    def coverage(self) -> float | None:
        """Share of the wall time that the stages cover; None where no stage is seen from outside."""
        return sum(map(sum, self.stages.values())) / self.wall if self.stages and self.wall > 0 else None

    def to_json(self) -> dict[str, Any]:
        """JSON values; `call_from_json` reads them back."""
        return {**vars(self), "stages": {name: list(times) for name, times in self.stages.items()}}


def call_from_json(values: Mapping[str, Any]) -> CallTimes:
    """The call of `CallTimes.to_json`; keys that are not known (round, index, state) are left out."""
    known = {name: values[name] for name in CallTimes.__dataclass_fields__ if name in values}
    for name in ("ttft", "e2e", "tpot"):
        known[name] = tuple(known.get(name, ()))
    known["stages"] = {stage: tuple(times) for stage, times in known.get("stages", {}).items()}
    return CallTimes(**known)


class StageRecorder:
    """An engine's `on_stage`: remembers when it entered and left each stage."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._began = 0.0
        self.entries: list[Entry] = []

    def start(self) -> None:
        """A call begins now; what was recorded before is forgotten."""
        self.entries = []
        self._began = self._clock()

    def elapsed(self) -> float:
        """Seconds since `start`."""
        return self._clock() - self._began

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        """The context manager that the engine enters around its work; a stage that fails is recorded too."""
        began = self.elapsed()
        try:
            yield
        finally:
            self.entries.append(Entry(stage, began, self.elapsed()))


def call_times(entries: Sequence[Entry], wall: float, answers: Sequence[int]) -> CallTimes:
    """A call of an engine in this process: `wall` seconds for answers of so many new tokens each.

    TTFT ends with a prefill, which chooses the first token: that of the batch, or each request's own, its waiting for the
    others included. TPOT is (wall - TTFT) / (tokens - 1), the definition of `vllm bench serve`, and exists for a single
    request of two tokens and more.
    """
    stages: dict[str, list[float]] = {}
    for stage, began, ended in entries:
        stages.setdefault(stage, []).append(ended - began)
    firsts = tuple(entry.ended for entry in entries if entry.stage == "prefill")
    lone = len(answers) == 1 and answers[0] > 1 and bool(firsts)
    return CallTimes(
        wall=wall,
        requests=len(answers),
        tokens=sum(answers),
        ttft=firsts,
        e2e=(wall,),
        tpot=((wall - firsts[-1]) / (answers[0] - 1),) if lone else (),
        stages={name: tuple(stages[name]) for name in (*STAGES, *stages) if name in stages},
    )
