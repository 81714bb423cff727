"""Is B slower than A, by how much, and how sure is that: Mann-Whitney's test and the interval that belongs to it.

Times are skewed and have outliers, so ranks are compared, not means. The interval is for the typical ratio of a value of B
to a value of A: the Hodges-Lehmann estimate on logarithms, between order statistics of all pairs' ratios (Hollander, Wolfe
and Chicken, Nonparametric Statistical Methods, 3rd ed., section 4.3), so that test and interval never contradict each other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from statistics import NormalDist
from typing import NamedTuple

EXACT_PAIRS = 1600
"""Up to so many pairs (40 values a side) the distribution of U is counted out; beyond, the normal approximation is used."""


class RatioInterval(NamedTuple):
    """Typical ratio and its bounds, each one-sided at level alpha; a bound is None where no interval of that level exists."""

    ratio: float
    low: float | None
    high: float | None


def p_greater(base: Sequence[float], other: Sequence[float]) -> float:
    """One-sided p-value of Mann-Whitney's test that values of `other` tend to be greater than those of `base`.

    Exact without ties and up to EXACT_PAIRS pairs; else normal with tie and continuity correction. 1.0 when a side is empty.
    """
    pairs = len(base) * len(other)
    if not pairs:
        return 1.0
    u = sum((b > a) + 0.5 * (b == a) for a in base for b in other)
    if pairs <= EXACT_PAIRS and len({*base, *other}) == len(base) + len(other):
        return sum(_frequencies(len(base), len(other))[int(u) :]) / math.comb(len(base) + len(other), len(base))
    spread = _spread(base, other)
    return 1 - NormalDist().cdf((u - pairs / 2 - 0.5) / spread) if spread > 0 else 1.0


def ratio_interval(base: Sequence[float], other: Sequence[float], *, alpha: float) -> RatioInterval:
    """The typical ratio other / base with one-sided bounds at level `alpha` each. All values are positive; ValueError otherwise."""
    if not base or not other or min(*base, *other) <= 0:
        raise ValueError("a ratio needs positive values on both sides")
    ratios = sorted(b / a for a in base for b in other)
    middle = (math.log(ratios[(len(ratios) - 1) // 2]) + math.log(ratios[len(ratios) // 2])) / 2
    place = _bound_place(len(base), len(other), alpha)
    if place == 0:
        return RatioInterval(math.exp(middle), None, None)
    return RatioInterval(math.exp(middle), ratios[place - 1], ratios[-place])


def _bound_place(n: int, m: int, alpha: float) -> int:
    """The largest k with P(U < k) <= alpha: the k-th smallest ratio is the lower bound. 0 when there is none."""
    pairs = n * m
    if pairs > EXACT_PAIRS:
        spread = math.sqrt(pairs * (n + m + 1) / 12)
        return max(0, math.floor(pairs / 2 + NormalDist().inv_cdf(alpha) * spread))
    total, sum_below = math.comb(n + m, n), 0
    for k, count in enumerate(_frequencies(n, m)):
        sum_below += count
        if sum_below > alpha * total:
            return k
    return pairs


@cache
def _frequencies(n: int, m: int) -> tuple[int, ...]:
    """How many arrangements of n and m distinct values have U = 0, 1, ..., n * m (Mann and Whitney 1947, by their recurrence)."""
    counts = [1] + [0] * (n * m)
    for size in range(1, n + 1):  # the Gaussian binomial coefficient: multiply by (1 - q^(m + size)), divide by (1 - q^size)
        for index in range(n * m, m + size - 1, -1):
            counts[index] -= counts[index - m - size]
        for index in range(size, n * m + 1):
            counts[index] += counts[index - size]
    return tuple(counts)


def _spread(base: Sequence[float], other: Sequence[float]) -> float:
    """Standard deviation of U under no difference, ties counted."""
    everything = sorted((*base, *other))
    n, m, total = len(base), len(other), len(everything)
    ties = [everything.count(value) for value in set(everything)]
    correction = sum(t**3 - t for t in ties) / (total * (total - 1)) if total > 1 else 0.0
    return math.sqrt(n * m / 12 * max(0.0, total + 1 - correction))
