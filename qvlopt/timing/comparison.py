"""Did it get slower: ratios with intervals, and a verdict that says so when there is too little to tell.

A value of the candidate is compared with the base's times (1 + tolerance): `fail` when the interval of the ratio lies above
it, `pass` when it lies below, else `inconclusive`. With fewer than FEWEST samples a side nothing is claimed. Two processes a
side show how much one process may differ from another of the same program, so a `fail` must show in every pair of them. A
side that stood in line for a processor may be slow for that reason alone: a verdict must hold without the time that its
threads waited, all together, which is the most that waiting can have cost (each wait of one holds up the others at the next
barrier). Beyond BUSY_SHARE nothing is claimed at all, since neighbours take caches and memory as well. Two runs at different times
are on a machine whose pace may have changed, as those of shared hosts do, and may change within a run: it is taken before and after
every process, and a verdict must hold with the base's fastest and the candidate's slowest, or the other way round.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, Literal

from qvlopt.timing.rank_test import p_greater, ratio_interval
from qvlopt.timing.waiting import BUSY_SHARE

Verdict = Literal["pass", "fail", "inconclusive", "not_comparable"]
ORDER: tuple[Verdict, ...] = ("not_comparable", "fail", "inconclusive", "pass")
"""The worst first."""
STATUS: dict[Verdict, int] = {"pass": 0, "fail": 1, "inconclusive": 3, "not_comparable": 4}
"""Exit statuses of the contract, where a gate is asked for."""

FEWEST = 9
"""Samples a side below which nothing is said (Google Benchmark's compare.py asks for as many)."""
ALPHA = 0.05
TOLERANCE = 0.10
"""By how much a time may grow where the recipe asks for no gate and the verdict only informs."""

GATED = ("ttft", "tpot", "e2e", "peak_rss")
"""What the verdict is about: what users wait for and what must fit. The stages tell where it went."""


@dataclass(frozen=True)
class Pace:
    """How many times slower, and faster, the machine may have been beside the candidate than beside the base: each at least 1."""

    slower: float = 1.0
    faster: float = 1.0

    @classmethod
    def between(cls, then: Sequence[Mapping[str, float]], now: Sequence[Mapping[str, float]]) -> Pace:
        """By the rates that were measured beside each, whichever changed most; what only one side knows says nothing."""
        return cls(_most_ratio(then, now), _most_ratio(now, then))


def _most_ratio(one: Sequence[Mapping[str, float]], other: Sequence[Mapping[str, float]]) -> float:
    """The largest rate of `one` over the smallest of `other`, at least 1."""
    known = set[str]().union(*one) & set[str]().union(*other)
    ratios = (max(pace[key] for pace in one if key in pace) / min(pace[key] for pace in other if key in pace) for key in known)
    return max([1.0, *ratios])


@dataclass(frozen=True)
class Series:
    """One quantity of one engine: raw values by round. `is_exact` marks sizes, which are the same in every run.

    `waited` is the share of the time that its threads waited for a processor, all together: 0.1 of two may be 0.05 each.
    """

    rounds: tuple[tuple[float, ...], ...]
    unit: str = "s"
    is_exact: bool = False
    waited: float | None = None

    @property
    def values(self) -> tuple[float, ...]:
        return tuple(value for part in self.rounds for value in part)


@dataclass(frozen=True)
class Ratio:
    """Candidate over base of one quantity; above 1 is slower or larger. `verdict` is None where it only informs."""

    engine: str
    case: str
    metric: str
    unit: str
    base: float
    candidate: float
    ratio: float
    ci_low: float | None
    ci_high: float | None
    p_slower: float | None
    n_base: int
    n_candidate: int
    verdict: Verdict | None
    reason: str

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Comparison:
    """What was compared with what. `verdict` is None where the engines are only set side by side."""

    base: str | None
    verdict: Verdict | None
    ratios: tuple[Ratio, ...]
    tolerance: float
    remarks: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        rest = {"tolerance": self.tolerance, "alpha": ALPHA, "remarks": list(self.remarks)}
        return {"base": self.base, "verdict": self.verdict, "ratios": [ratio.to_json() for ratio in self.ratios], **rest}


def compare_series(name: tuple[str, str, str], base: Series, other: Series, *, tolerance: float, pace: Pace = Pace()) -> Ratio | None:
    """The ratio of one quantity; `name` is engine, case and metric. None when a side has no values."""
    if not base.values or not other.values or min(*base.values, *other.values) <= 0:
        return None
    engine, case, metric = name
    if base.is_exact:
        ratio = max(other.values) / max(base.values)
        verdict: Verdict = "fail" if ratio > 1 + tolerance else "pass"
        figures = (max(base.values), max(other.values), ratio, None, None, None)
        return Ratio(engine, case, metric, base.unit, *figures, len(base.values), len(other.values), verdict, "largest of all turns")
    estimate = ratio_interval(base.values, other.values, alpha=ALPHA)
    verdict, reason = _judged(base, other, (estimate.low, estimate.high), 1 + tolerance, pace)
    figures_ = (median(base.values), median(other.values), *estimate, p_greater(base.values, other.values))
    return Ratio(engine, case, metric, base.unit, *figures_, len(base.values), len(other.values), verdict, reason)


def compare_engines(
    name: str, base: Mapping[tuple[str, str], Series], other: Mapping[tuple[str, str], Series], *, tolerance: float, pace: Pace = Pace()
) -> tuple[Ratio, ...]:
    """Ratios of every quantity, by case and metric, that both sides have."""
    ratios = (compare_series((name, *key), base[key], other[key], tolerance=tolerance, pace=pace) for key in base if key in other)
    return tuple(ratio for ratio in ratios if ratio is not None)


def verdict_of(ratios: Sequence[Ratio]) -> Verdict:
    """The worst verdict of the gated quantities; without any there is nothing that could be compared."""
    found = [ratio.verdict for ratio in ratios if ratio.metric in GATED and ratio.verdict]
    return min(found, key=ORDER.index, default="not_comparable")


def unlike(base: Mapping[str, Any], other: Mapping[str, Any], keys: Sequence[str]) -> tuple[str, ...]:
    """Which of `keys` differ, in words; an unknown value (null) on either side is not held against it."""
    return tuple(
        f"{key} was {base.get(key)}, is {other.get(key)}"
        for key in keys
        if base.get(key) is not None and other.get(key) is not None and base[key] != other[key]
    )


def _judged(base: Series, other: Series, interval: tuple[float | None, float | None], most: float, pace: Pace) -> tuple[Verdict, str]:
    fewest = min(len(base.values), len(other.values))
    if fewest < FEWEST:
        return "inconclusive", f"{fewest} samples, {FEWEST} are needed"
    low, high = interval
    if high is not None and high < most:
        if high * pace.faster >= most:
            return "inconclusive", f"the machine itself was up to {pace.faster:.2f} times as fast as then"
        holds = high < most * _working(base)
        return ("pass", f"below {most:.2f} times the base") if holds else ("inconclusive", _busy("the base", base))
    if low is None or low <= most:
        return "inconclusive", f"the interval contains {most:.2f}"
    slowest = max(median(part) for part in base.rounds if part)
    if min(median(part) for part in other.rounds if part) <= slowest:
        return "inconclusive", "not every process was slower than every process of the base"
    if low <= most * pace.slower:
        return "inconclusive", f"the machine itself was up to {pace.slower:.2f} times as slow as then"
    holds = low * _working(other) > most
    return ("fail", f"above {most:.2f} times the base") if holds else ("inconclusive", _busy("the engine", other))


def _working(series: Series) -> float:
    """The share of its time that it would have taken at least, had no thread waited; none where the machine was too busy to tell."""
    waited = series.waited or 0.0
    return 0.0 if waited > BUSY_SHARE else 1.0 - waited


def _busy(whose: str, series: Series) -> str:
    """A slow candidate may be a good one on a busy machine, and so may a slow base that nothing is slower than."""
    return f"{whose}'s threads waited for a processor {100 * (series.waited or 0):.0f} % of the time, which may be the difference"
