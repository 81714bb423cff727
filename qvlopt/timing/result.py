"""What bench found out, as JSON and as series to compare. Raw values are kept; statistics are made of them when asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from qvlopt.timing.comparison import Comparison, Series
from qvlopt.timing.plan import Case, State, Workload
from qvlopt.timing.roofline import Attained
from qvlopt.timing.samples import Samples, joined
from qvlopt.timing.stages import STAGES, CallTimes, call_from_json

MOMENTS = ("ttft", "tpot", "e2e")
NO_TIMES, NO_BYTES = Samples(()), Samples((), "bytes")
COVERED = 0.95
"""Share of a request's time that its stages should explain; below, a warning says so."""


@dataclass(frozen=True)
class Iteration:
    """One measured call, and when it was made."""

    round: int
    index: int
    times: CallTimes

    def to_json(self) -> dict[str, Any]:
        return {"round": self.round, "index": self.index, **self.times.to_json()}


@dataclass(frozen=True)
class CaseResult:
    """All calls of one engine in one case. `first` is its very first call (warm-up or not), which is slower and not counted twice."""

    case: Case
    state: State
    iterations: tuple[Iteration, ...]
    first: float | None = None
    limits: Mapping[str, Attained] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.case.name if self.state == "cold" else f"{self.case.name}, {self.state}"

    @property
    def good(self) -> tuple[Iteration, ...]:
        """Calls that count: the others failed and are listed."""
        return tuple(each for each in self.iterations if each.times.error is None)

    @property
    def errors(self) -> tuple[str, ...]:
        return tuple(f"{self.name}, iteration {each.index}: {each.times.error}" for each in self.iterations if each.times.error)

    @property
    def coverage(self) -> float | None:
        """The smallest share of a call's time that the stages explain."""
        shares = [share for each in self.good if (share := each.times.coverage) is not None]
        return min(shares, default=None)

    @property
    def waited(self) -> float | None:
        """Median share of a call's time that the engine's threads waited for a processor; None where it is not counted."""
        return Samples(
            tuple(each.times.waited / each.times.wall for each in self.good if each.times.waited is not None and each.times.wall > 0)
        ).median

    def samples(self, name: str) -> Samples:
        """A stage's values (decode: each step), or those of ttft, tpot, e2e."""
        if name in MOMENTS:
            return joined([getattr(each.times, name) for each in self.good])
        if name == "decode":
            return joined([each.times.stages.get(name, ()) for each in self.good])
        return Samples(tuple(sum(each.times.stages[name]) for each in self.good if name in each.times.stages))

    def series(self, name: str) -> Series:
        """One value a call (of several requests: their mean), by round, to be compared."""
        rounds: dict[int, list[float]] = {}
        for each in self.good:
            values = getattr(each.times, name) if name in MOMENTS else each.times.stages.get(name, ())
            if values:
                rounds.setdefault(each.round, []).append(sum(values) / (len(values) if name in MOMENTS else 1))
        return Series(tuple(tuple(rounds[number]) for number in sorted(rounds)), waited=self.waited)

    def rate(self, what: str) -> float | None:
        """Median of `tokens` (new ones), `pictures` or `requests` a second of wall time."""
        rates = [(each.times.tokens if what == "tokens" else each.times.requests) / each.times.wall for each in self.good if each.times.wall > 0]
        return Samples(tuple(rates)).median

    def stages_json(self) -> dict[str, Any]:
        return {name: self.samples(name).to_json() for name in (*STAGES, *MOMENTS)}

    def to_json(self) -> dict[str, Any]:
        first = self.good[0].times if self.good else None
        return {
            **self.case.to_json(),
            "name": self.name,
            "state": self.state,
            "n": len(self.good),
            "failed": list(self.errors),
            "prompt_tokens_real": first.prompt_tokens if first else None,
            "picture_tokens": first.picture_tokens if first else None,
            "stages": self.stages_json(),
            "tokens_per_s": self.rate("tokens"),
            "pictures_per_s": self.rate("pictures"),
            "requests_per_s": self.rate("requests"),
            "first_call_s": self.first,
            "coverage": self.coverage,
            "waited_share": self.waited,
            "limits": {stage: limit._asdict() for stage, limit in self.limits.items()},
            "samples": [each.to_json() for each in self.iterations],
        }


@dataclass(frozen=True)
class EngineResult:
    """One engine's turns together. `load`, `peak_rss` and `peak_cuda` have a value a turn; `error` says why it did not finish.

    `anonymous_bytes` is what the engine itself held at the end of a turn, pages of mapped files left out, at most. `paces` are
    the machine's rates before and after every turn.
    """

    name: str
    candidate: str
    cases: tuple[CaseResult, ...] = ()
    load: Samples = NO_TIMES
    peak_rss: Samples = NO_BYTES
    peak_cuda: Samples = NO_BYTES
    anonymous_bytes: int | None = None
    artifact_bytes: int | None = None
    fingerprint: Mapping[str, Any] = field(default_factory=dict)
    paces: tuple[Mapping[str, float], ...] = ()
    error: str | None = None

    @property
    def errors(self) -> tuple[str, ...]:
        own = (self.error,) if self.error else ()
        return (*own, *(error for case in self.cases for error in case.errors))

    def series(self) -> dict[tuple[str, str], Series]:
        """Everything that can be compared, by case and metric."""
        found = {(case.name, name): case.series(name) for case in self.cases for name in (*STAGES, *MOMENTS)}
        found["", "load"] = Series(tuple((value,) for value in self.load.values))
        found["", "peak_rss"] = Series((self.peak_rss.values,), "bytes", is_exact=True)
        size = () if self.artifact_bytes is None else (float(self.artifact_bytes),)
        found["", "artifact_bytes"] = Series((size,), "bytes", is_exact=True)
        return {key: series for key, series in found.items() if series.values}

    def to_json(self) -> dict[str, Any]:
        """The contract's keys are those of the first case; `cases` has all of them."""
        first = self.cases[0] if self.cases else None
        stages = first.stages_json() if first else {name: Samples(()).to_json() for name in (*STAGES, *MOMENTS)}
        return {
            "name": self.name,
            "candidate": self.candidate,
            "stages": {"load": self.load.to_json(), **stages},
            "tokens_per_s": first.rate("tokens") if first else None,
            "peak_rss_bytes": _largest(self.peak_rss),
            "peak_cuda_bytes": _largest(self.peak_cuda),
            "anonymous_bytes": self.anonymous_bytes,
            "artifact_bytes": self.artifact_bytes,
            "error": self.error,
            "fingerprint": dict(self.fingerprint),
            "load_samples": list(self.load.values),
            "peak_rss_samples": list(self.peak_rss.values),
            "paces": [dict(pace) for pace in self.paces],
            "cases": [case.to_json() for case in self.cases],
        }


def engine_from_json(values: Mapping[str, Any]) -> EngineResult:
    """An engine of a report, as far as it can be compared. Raises KeyError, TypeError, ValueError and AttributeError for what is none."""
    return EngineResult(
        name=str(values["name"]),
        candidate=str(values["candidate"]),
        cases=tuple(_case_from_json(case) for case in values["cases"]),
        load=Samples(tuple(map(float, values.get("load_samples", ())))),
        peak_rss=Samples(tuple(map(float, values.get("peak_rss_samples", ()))), "bytes"),
        artifact_bytes=values.get("artifact_bytes"),
        fingerprint=dict(values.get("fingerprint") or {}),
        paces=tuple({str(name): float(rate) for name, rate in pace.items() if float(rate) > 0} for pace in values.get("paces", ())),
        error=values.get("error"),
    )


@dataclass(frozen=True)
class BenchFindings:
    """Everything measured, before anything is written."""

    workload: Workload
    engines: tuple[EngineResult, ...]
    comparison: Comparison
    environment: Mapping[str, Any]
    limits: Mapping[str, Any] | None

    def to_json(self) -> dict[str, Any]:
        return {
            "engines": [engine.to_json() for engine in self.engines],
            "comparison": self.comparison.to_json(),
            "environment": dict(self.environment),
            "workload": self.workload.to_json(),
            "limits": self.limits,
        }


def gathered(cases: Sequence[tuple[Case, State]], iterations: Mapping[tuple[Case, State], Sequence[Iteration]]) -> Iterator[CaseResult]:
    """Results of the cases, in their order, that some call was made of."""
    for case, state in cases:
        if iterations.get((case, state)):
            yield CaseResult(case, state, tuple(sorted(iterations[case, state], key=lambda each: each.index)))


def _largest(samples: Samples) -> int | None:
    return int(max(samples.values)) if samples.values else None


def _case_from_json(values: Mapping[str, Any]) -> CaseResult:
    case = Case(**{name: int(values[name]) for name in Case.__dataclass_fields__})
    iterations = tuple(Iteration(int(each["round"]), int(each["index"]), call_from_json(each)) for each in values["samples"])
    return CaseResult(case, values["state"], iterations, values.get("first_call_s"))
