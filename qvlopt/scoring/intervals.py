"""Confidence intervals for the mean paired difference of scores, candidate minus base.

Each bound is one-sided at 1 - alpha, so the pair is a two-sided interval at 1 - 2 alpha.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

RESAMPLES = 10_000

DRAWN_AT_ONCE = 250_000
"""Clusters in one block of resamples: little memory, and it stays in the processor's cache."""


KINDS_ARE_FEW = 8
"""From this many clusters to one kind of them on, drawing counts of kinds is faster than drawing clusters."""


NO_NOISE = 1e-9
"""Variance of an item below which all of them changed by the same."""


class Interval(NamedTuple):
    """Bounds in score units, from -1 to 1."""

    low: float
    high: float


def z_value(probability: float) -> float:
    """Quantile of the standard normal distribution."""
    return NormalDist().inv_cdf(probability)


def tango(b: float, c: float, n: float, z: float) -> Interval:
    """Tango's score interval of (c - b) / n for `n` pairs of which `b` got worse and `c` better.

    Tango, "Equivalence test and confidence interval for the difference in proportions for the paired-sample design",
    Statistics in Medicine 17 (1998). Unlike Wald's or a bootstrap it has a width where nothing flipped: z^2 / (n + z^2).
    `b` and `c` may be fractions. Exchanging them mirrors the interval exactly.
    """
    if n <= 0 or b < 0 or c < 0 or b + c > n * (1 + 1e-9):
        raise ValueError(f"expected 0 <= b, c and b + c <= n with n > 0, got b={b}, c={c}, n={n}")
    return Interval(_tango_low(b, c, n, z), -_tango_low(c, b, n, z))


def tango_p_value(b: float, c: float, n: float, delta: float) -> float:
    """One-sided p-value of Tango's score test that the true difference is `delta` or more, against less.

    It is below 1 - Phi(z) where `delta` lies above the interval at z.
    """
    return NormalDist().cdf(tango_score(b, c, n, delta))


def tango_score(b: float, c: float, n: float, delta: float) -> float:
    """Tango's statistic T(delta): by how many standard deviations the difference lies above `delta`."""
    spread, distance = _spread(delta, b, c, n), float(c - b - n * delta)
    return distance / spread if spread else math.copysign(math.inf, distance) if distance else 0.0


def student_z(t: float, freedom: int) -> float:
    """The normal deviate with about the same tail as Student's `t` (Abramowitz and Stegun 26.7.8)."""
    return t * (1 - 1 / (4 * freedom)) / math.sqrt(1 + t * t / (2 * freedom)) if math.isfinite(t) else t


def student_quantile(z: float, freedom: int) -> float:
    """The inverse of `student_z`; infinite beyond what that can reach."""
    rest = (1 - 1 / (4 * freedom)) ** 2 - z * z / (2 * freedom)
    return z / math.sqrt(rest) if rest > 0 else math.copysign(math.inf, z)


def sign_p_value(lost: int, gained: int) -> float:
    """McNemar's exact test (the sign test), one-sided: P(that many lost or more) if losing and gaining were equally likely."""
    flips = lost + gained
    return float(sum(math.comb(flips, k) for k in range(lost, flips + 1)) / 2**flips)


def bootstrap_means(deltas: Sequence[float], clusters: Sequence[str], *, seed: int, resamples: int = RESAMPLES) -> np.ndarray:
    """Means of `deltas` [resamples] when whole clusters (items about one picture) are drawn again.

    Neither the order of the items nor the names of the clusters matter.
    """
    sums, sizes = cluster_totals(deltas, clusters)
    source = np.random.default_rng(seed)
    kinds, numbers = np.unique(np.stack((sums, sizes)), axis=1, return_counts=True)
    if KINDS_ARE_FEW * len(numbers) <= len(sums):
        # clusters of equal sum and size are interchangeable, so that only the count of each kind has to be drawn
        counts = source.multinomial(len(sums), numbers / len(sums), size=resamples)
        means: np.ndarray = (counts @ kinds[0]) / (counts @ kinds[1])
        return means
    return np.concatenate([_drawn_means(sums, sizes, source, rows) for rows in _blocks(resamples, len(sums))])


def cluster_bootstrap(deltas: Sequence[float], clusters: Sequence[str], *, alpha: float, seed: int, resamples: int = RESAMPLES) -> Interval:
    """Percentile interval of the mean of `deltas` over resampled clusters."""
    return percentiles(bootstrap_means(deltas, clusters, seed=seed, resamples=resamples), alpha)


def percentiles(means: np.ndarray, alpha: float) -> Interval:
    """The interval between the alpha and 1 - alpha quantiles of resampled means."""
    low, high = np.quantile(means, [alpha, 1 - alpha])
    return Interval(float(low), float(high))


def clustered_tango(deltas: Sequence[float], clusters: Sequence[str], *, alpha: float, margin: float) -> tuple[Interval, float]:
    """Tango's interval for clustered and graded differences, and the one-sided p-value of a drop beyond `margin`.

    The flips and their number are scaled by the design effect, so that the variance is that of the clusters' totals (Rao and
    Scott, "A simple method for the analysis of clustered binary data", Biometrics 48, 1992), with Student's quantile for the
    clusters that changed. A resampled interval is too narrow on the side of few losses, since the variance is estimated from
    the same few; this one takes the variance at the bound.
    """
    sums, sizes = cluster_totals(deltas, clusters)
    changes = np.asarray(deltas)
    n, mean = len(changes), math.fsum(deltas) / len(deltas)
    as_flips = math.fsum(np.abs(changes)) - n * mean**2
    between = math.fsum((sums - mean * sizes) ** 2) * len(sums) / max(1, len(sums) - 1)
    # questions of one picture that balance each other are no evidence of less noise
    noise = max(between, math.fsum((changes - mean) ** 2))
    scale = as_flips / noise if noise > NO_NOISE * n else effective_clusters(clusters) / n
    lost, gained = (math.fsum(np.abs(changes[side])) * scale for side in (changes < 0, changes > 0))
    freedom = max(2, len(changed_clusters(deltas, clusters)) - 1)
    z = z_value(1 - alpha)
    found = tango(lost, gained, n * scale, student_quantile(z, freedom))
    return found, NormalDist().cdf(student_z(tango_score(lost, gained, n * scale, -margin), freedom))


def effective_clusters(clusters: Sequence[str]) -> float:
    """How many clusters of equal size weigh as much as these: (sum of sizes)^2 / sum of squared sizes (Kish 1965, section 11.7).

    It is their number where all have one size, and near 1 where one of them holds most items.
    """
    sizes = Counter(clusters).values()
    return sum(sizes) ** 2 / sum(size**2 for size in sizes)


def _tango_low(b: float, c: float, n: float, z: float) -> float:
    """The delta <= (c - b) / n at which the score statistic equals z, by bisection to the last bit."""
    below, above = -1.0, (c - b) / n
    while True:
        middle = (below + above) / 2
        if middle in (below, above):
            return below
        if _exceeds(middle, b, c, n, z):
            below = middle
        else:
            above = middle


def _exceeds(delta: float, b: float, c: float, n: float, z: float) -> bool:
    """Whether T(delta) = (c - b - n delta) / spread > z, with p in the spread the constrained estimate of P(worse)."""
    return c - b - n * delta > z * _spread(delta, b, c, n)


def _spread(delta: float, b: float, c: float, n: float) -> float:
    """Standard deviation of c - b if the true difference were `delta`: sqrt(n (2 p + delta (1 - delta)))."""
    linear = -(b + c) + delta * (2 * n + b - c)
    constant = -b * delta * (1 - delta)
    p = (math.sqrt(max(0.0, linear**2 - 8 * n * constant)) - linear) / (4 * n)
    return math.sqrt(max(0.0, n * (2 * p + delta * (1 - delta))))


def _blocks(resamples: int, count: int) -> list[int]:
    """Numbers of resamples that add up to `resamples`, each drawing about DRAWN_AT_ONCE of `count` clusters."""
    rows = max(1, DRAWN_AT_ONCE // count)
    return [min(rows, resamples - start) for start in range(0, resamples, rows)]


def _drawn_means(sums: np.ndarray, sizes: np.ndarray, source: np.random.Generator, rows: int) -> np.ndarray:
    drawn = source.integers(0, len(sums), size=(rows, len(sums)), dtype=np.min_scalar_type(len(sums)))
    means: np.ndarray = sums.take(drawn).sum(axis=1) / sizes.take(drawn).sum(axis=1)
    return means


def changed_clusters(deltas: Sequence[float], clusters: Sequence[str]) -> set[str]:
    """Clusters in which some item changed."""
    return {cluster for delta, cluster in zip(deltas, clusters, strict=True) if delta != 0}


def cluster_totals(deltas: Sequence[float], clusters: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """Sum of differences and number of items of each cluster, both [C], sorted, so that no order shows in them."""
    members: dict[str, list[float]] = {}
    for delta, cluster in zip(deltas, clusters, strict=True):
        members.setdefault(cluster, []).append(delta)
    totals = sorted((math.fsum(values), len(values)) for values in members.values())
    return np.array([total for total, _ in totals]), np.array([size for _, size in totals], dtype=float)
