"""Decides from paired scores whether a candidate lost quality, and says when the data cannot tell.

A metric passes when a drop of `margin` or more is ruled out, fails when such a drop is demonstrated, and is inconclusive
in between; both at the one-sided level alpha.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from qvlopt.scoring.intervals import (
    Interval,
    bootstrap_means,
    changed_clusters,
    clustered_tango,
    effective_clusters,
    percentiles,
    sign_p_value,
    tango,
    tango_p_value,
    z_value,
)
from qvlopt.scoring.power import item_variance, items_needed, smallest_drop

Verdict = Literal["pass", "fail", "inconclusive", "not_comparable", "error"]
OnInconclusive = Literal["fail", "warn", "pass"]

SEVERITY: tuple[Verdict, ...] = ("pass", "inconclusive", "fail", "not_comparable", "error")
"""From best to worst: of several the last one counts."""

FEW_FLIPS = 10
"""With fewer changed clusters than this a bootstrap sees too little; Tango's interval is used."""

SEED = 0
"""Of the bootstrap. Fixed, so that nobody can look for a seed with a better verdict."""


@dataclass(frozen=True)
class MetricVerdict:
    """One metric's comparison over `n` items about `n_clusters` pictures; scores are means in [0, 1], and so are differences.

    `lost` and `gained` count items. `mde` is the smallest drop that these items would show with 80 % power, `n_needed` how
    many items, clustered like these, would rule out one of `margin`. `method` names the interval. `p_lost` is the sign
    test's one-sided p-value for more lost than gained, for information. `p_drop` is that of a drop beyond the margin;
    `p_drop_holm` is it after Holm's correction for the metrics that were judged together (`hold_together`).
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
    n_clusters: int = 0
    p_lost: float | None = None
    p_drop: float | None = None
    p_drop_holm: float | None = None

    @property
    def drop_within_margin(self) -> bool:
        """A drop was demonstrated, but one smaller than the margin."""
        return self.verdict == "pass" and self.ci_high is not None and self.ci_high < 0

    @property
    def fails_alone(self) -> bool:
        """It would have failed if no other metric had been judged."""
        return self.verdict == "inconclusive" and self.ci_high is not None and self.ci_high < -self.margin


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
    evidence = _evidence(pairs, margin=margin, alpha=alpha, binary=binary)
    lost, gained = sum(d < 0 for d in pairs.deltas), sum(d > 0 for d in pairs.deltas)
    variance = item_variance(pairs.deltas, pairs.clusters)
    return MetricVerdict(
        n=n,
        base=math.fsum(base.values()) / n,
        candidate=math.fsum(candidate.values()) / n,
        delta=math.fsum(pairs.deltas) / n,
        ci_low=evidence.interval.low,
        ci_high=evidence.interval.high,
        margin=margin,
        lost=lost,
        gained=gained,
        mde=smallest_drop(variance, n, alpha),
        n_needed=items_needed(variance, margin, alpha) if margin > 0 else None,
        verdict=_verdict(evidence.interval, margin),
        method=evidence.method,
        n_clusters=len(set(pairs.clusters)),
        p_lost=sign_p_value(lost, gained),
        p_drop=evidence.p_drop,
    )


def hold_together(verdicts: Sequence[MetricVerdict], alpha: float) -> list[MetricVerdict]:
    """The verdicts of metrics that are judged together, corrected so that all of them fail by chance with at most alpha.

    "All must pass" needs no correction, since one metric that is really worse keeps the whole from passing. "Any may fail"
    does: ten sound metrics at 5 % fail in 40 % of the runs. Holm's step-down (Scandinavian Journal of Statistics 6, 1979)
    decides which failures stay; the others are inconclusive.
    """
    judged = [index for index, verdict in enumerate(verdicts) if verdict.p_drop is not None]
    corrected = list(verdicts)
    worst_so_far = 0.0
    for rank, index in enumerate(sorted(judged, key=lambda index: verdicts[index].p_drop or 0.0)):
        each = verdicts[index]
        worst_so_far = min(1.0, max(worst_so_far, (len(judged) - rank) * (each.p_drop or 0.0)))
        verdict: Verdict = "inconclusive" if each.verdict == "fail" and worst_so_far > alpha else each.verdict
        corrected[index] = replace(each, p_drop_holm=worst_so_far, verdict=verdict)
    return corrected


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


class _Evidence(NamedTuple):
    """How it was judged, the interval of the mean difference, and the p-value of a drop beyond the margin."""

    method: str
    interval: Interval
    p_drop: float


def _verdict(interval: Interval, margin: float) -> Verdict:
    return "pass" if interval.low > -margin else "fail" if interval.high < -margin else "inconclusive"


def _evidence(pairs: _Pairs, *, margin: float, alpha: float, binary: bool) -> _Evidence:
    are_independent = len(set(pairs.clusters)) == len(pairs.deltas)
    if binary and are_independent:
        return _by_tango("tango", pairs, margin, alpha)
    if len(changed_clusters(*pairs)) < FEW_FLIPS:
        return _by_tango("tango over clusters", pairs, margin, alpha)
    return _by_bootstrap(pairs, margin, alpha)


def _by_bootstrap(pairs: _Pairs, margin: float, alpha: float) -> _Evidence:
    """The wider bounds of the cluster bootstrap and of Tango's interval for clusters: alone the bootstrap passes too often."""
    means = bootstrap_means(*pairs, seed=SEED)
    drawn, p_drawn = percentiles(means, alpha), (int((means >= -margin).sum()) + 1) / (len(means) + 1)
    scored, p_scored = clustered_tango(*pairs, alpha=alpha, margin=margin)
    wider = Interval(min(drawn.low, scored.low), max(drawn.high, scored.high))
    return _Evidence("cluster bootstrap", wider, max(p_drawn, p_scored))


def _by_tango(method: str, pairs: _Pairs, margin: float, alpha: float) -> _Evidence:
    """Tango's interval with the clusters as the sample and the lost and gained score as its flips.

    The score is scaled from items to clusters, which centres the interval on the mean difference. A change of less than
    1 is taken as that share of a flip: its square is smaller still, so the interval is wide enough. Clusters of unequal
    size count as fewer of equal size. With one item a cluster and scores of 0 and 1 this is Tango's interval itself.
    """
    count = effective_clusters(pairs.clusters)
    scale = count / len(pairs.deltas)
    lost = math.fsum(-delta for delta in pairs.deltas if delta < 0) * scale
    gained = math.fsum(delta for delta in pairs.deltas if delta > 0) * scale
    return _Evidence(method, tango(lost, gained, count, z_value(1 - alpha)), tango_p_value(lost, gained, count, -margin))
