"""Confidence intervals for the mean paired difference of scores, candidate minus base.

Each bound is one-sided at 1 - alpha, so the pair is a two-sided interval at 1 - 2 alpha.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

RESAMPLES = 10_000

DRAWN_AT_ONCE = 250_000
"""Clusters in one block of resamples: little memory, and it stays in the processor's cache."""


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


def cluster_bootstrap(deltas: Sequence[float], clusters: Sequence[str], *, alpha: float, seed: int, resamples: int = RESAMPLES) -> Interval:
    """Percentile interval of the mean of `deltas` when whole clusters (items about one picture) are drawn again.

    Neither the order of the items nor the names of the clusters matter.
    """
    sums, sizes = _cluster_totals(deltas, clusters)
    count, source = len(sums), np.random.default_rng(seed)
    means: list[np.ndarray] = []
    at_once = max(1, DRAWN_AT_ONCE // count)
    for start in range(0, resamples, at_once):
        drawn = source.integers(0, count, size=(min(at_once, resamples - start), count), dtype=np.min_scalar_type(count))
        means.append(sums.take(drawn).sum(axis=1) / sizes.take(drawn).sum(axis=1))
    low, high = np.quantile(np.concatenate(means), [alpha, 1 - alpha])
    return Interval(float(low), float(high))


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
    """Whether T(delta) = (c - b - n delta) / sqrt(n (2 p + delta (1 - delta))) > z, p the constrained estimate of P(worse)."""
    linear = -(b + c) + delta * (2 * n + b - c)
    constant = -b * delta * (1 - delta)
    p = (math.sqrt(max(0.0, linear**2 - 8 * n * constant)) - linear) / (4 * n)
    return c - b - n * delta > z * math.sqrt(max(0.0, n * (2 * p + delta * (1 - delta))))


def _cluster_totals(deltas: Sequence[float], clusters: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """Sum of differences and number of items of each cluster, both [C], sorted, so that no order shows in them."""
    members: dict[str, list[float]] = {}
    for delta, cluster in zip(deltas, clusters, strict=True):
        members.setdefault(cluster, []).append(delta)
    totals = sorted((math.fsum(values), len(values)) for values in members.values())
    return np.array([total for total, _ in totals]), np.array([size for _, size in totals], dtype=float)
