"""Decides from paired scores whether a candidate lost quality, and says when the data cannot tell.

A metric passes when a drop of `margin` or more is ruled out, fails when such a drop is demonstrated, and is inconclusive
in between; both at the one-sided level alpha.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from qvlopt.scoring.intervals import Interval, cluster_bootstrap, tango, z_value

Verdict = Literal["pass", "fail", "inconclusive", "not_comparable", "error"]
OnInconclusive = Literal["fail", "warn", "pass"]

SEVERITY: tuple[Verdict, ...] = ("pass", "inconclusive", "fail", "not_comparable", "error")
"""From best to worst: of several the last one counts."""

FEW_FLIPS = 10
"""With fewer changed clusters than this a bootstrap sees too little; Tango's interval is used."""

POWER = 0.8

SEED = 0
"""Of the bootstrap. Fixed, so that nobody can look for a seed with a better verdict."""


@dataclass(frozen=True)
class MetricVerdict:
    """One metric's comparison over `n` items; scores are means in [0, 1], the other figures are in the same unit.

    `lost` and `gained` count items. `mde` is the smallest drop that this many items would show with 80 % power,
    `n_needed` how many items would show one of `margin`; both treat items as independent. `method` names the interval.
    """

    n: int
    base: float | None
    candidate: float | None
    delta: float | None
    ci_low: float | None
    ci_high: float | None
    margin: float
    lost: int
    gained: int
    mde: float | None
    n_needed: int | None
    verdict: Verdict
    method: str | None

    @property
    def drop_within_margin(self) -> bool:
        """A drop was demonstrated, but one smaller than the margin."""
        return self.verdict == "pass" and self.ci_high is not None and self.ci_high < 0


def judge(
    base: Mapping[str, float],
    candidate: Mapping[str, float],
    clusters: Mapping[str, str],
    *,
    margin: float,
    alpha: float,
    binary: bool,
) -> MetricVerdict:
    """Compares per-item scores in [0, 1] joined by id. `clusters` says which items share a picture.

    Scores of 0 and 1 (`binary`) on independent items get Tango's interval, all else a cluster bootstrap, or Tango over the
    clusters where few changed. Without items, or with ids that only one side has, the verdict is `not_comparable`.
    """
    if not base or base.keys() != candidate.keys():
        return MetricVerdict(len(base), None, None, None, None, None, margin, 0, 0, None, None, "not_comparable", None)
    pairs = _Pairs.joined(base, candidate, clusters)
    n = len(pairs.deltas)
    delta = math.fsum(pairs.deltas) / n
    method, interval = _interval(pairs, alpha=alpha, binary=binary)
    lost, gained = sum(d < 0 for d in pairs.deltas), sum(d > 0 for d in pairs.deltas)
    changing = max(lost + gained, 3) / n  # with no change seen, 3 / n is the 95 % bound of its rate
    reach = z_value(1 - alpha) + z_value(POWER)
    return MetricVerdict(
        n=n,
        base=math.fsum(base.values()) / n,
        candidate=math.fsum(candidate.values()) / n,
        delta=delta,
        ci_low=interval.low,
        ci_high=interval.high,
        margin=margin,
        lost=lost,
        gained=gained,
        mde=reach * math.sqrt(changing / n),
        n_needed=math.ceil(reach**2 * changing / margin**2) if margin > 0 else None,
        verdict="pass" if interval.low > -margin else "fail" if interval.high < -margin else "inconclusive",
        method=method,
    )


def worst(verdicts: Iterable[Verdict]) -> Verdict:
    """The worst of several; `pass` of none."""
    return max(verdicts, key=SEVERITY.index, default="pass")


def exit_status(verdict: Verdict, on_inconclusive: OnInconclusive) -> int:
    """The exit status of a command that ends with this verdict (docs/contract.md, section 2)."""
    if verdict == "inconclusive":
        return 3 if on_inconclusive == "fail" else 0
    return {"pass": 0, "fail": 1, "not_comparable": 4, "error": 5}[verdict]


class _Pairs(NamedTuple):
    """Differences candidate - base and the cluster of each item, in the order of the ids."""

    deltas: list[float]
    clusters: list[str]

    @classmethod
    def joined(cls, base: Mapping[str, float], candidate: Mapping[str, float], clusters: Mapping[str, str]) -> _Pairs:
        ids = sorted(base)
        return cls([candidate[id] - base[id] for id in ids], [clusters[id] for id in ids])


def _interval(pairs: _Pairs, *, alpha: float, binary: bool) -> tuple[str, Interval]:
    count = len(set(pairs.clusters))
    changed = {cluster for delta, cluster in zip(pairs.deltas, pairs.clusters, strict=True) if delta != 0}
    if binary and count == len(pairs.deltas):
        return "tango", _tango_over(pairs, count, alpha)
    if len(changed) < FEW_FLIPS:
        return "tango over clusters", _tango_over(pairs, count, alpha)
    return "cluster bootstrap", cluster_bootstrap(pairs.deltas, pairs.clusters, alpha=alpha, seed=SEED)


def _tango_over(pairs: _Pairs, count: int, alpha: float) -> Interval:
    """Tango's interval with `count` clusters as the sample and the lost and gained score as its flips.

    The score is scaled from items to clusters, which centres the interval on the mean difference. A change of less than
    1 is taken as that share of a flip: its square is smaller still, so the interval is wide enough. With one item a
    cluster and scores of 0 and 1 this is Tango's interval itself.
    """
    scale = count / len(pairs.deltas)
    lost = math.fsum(-delta for delta in pairs.deltas if delta < 0) * scale
    gained = math.fsum(delta for delta in pairs.deltas if delta > 0) * scale
    return tango(lost, gained, count, z_value(1 - alpha))
