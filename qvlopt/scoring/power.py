"""What a paired comparison of so many items could see, and how many items it would take."""

from __future__ import annotations

import math
from collections.abc import Sequence

from qvlopt.scoring.intervals import cluster_totals, effective_clusters, z_value

POWER = 0.8

UNSEEN = 3.0
"""Changes that seeing none still allows: the 95 % bound of a count ("rule of three"). Fewer are never taken for granted."""


def item_variance(deltas: Sequence[float], clusters: Sequence[str]) -> float:
    """n times the variance of the mean of the differences `deltas` [n] where there is none in truth.

    For scores of 0 and 1 on independent items it is the share of items that changed, at least 3 / n. Differences within a
    cluster are added up first, so that questions about one picture which change together count as the one thing they are.
    """
    n = len(deltas)
    sums, _ = cluster_totals(deltas, clusters)
    together, alone = math.fsum(float(total) ** 2 for total in sums), math.fsum(delta**2 for delta in deltas)
    floor = UNSEEN * (n / effective_clusters(clusters)) ** 2
    return max(together, alone, floor) / n


def smallest_drop(variance: float, n: int, alpha: float) -> float:
    """The drop that n items show at the one-sided level alpha with 80 % power, at a variance from `item_variance`."""
    return _reach(alpha) * math.sqrt(variance / n)


def items_needed(variance: float, margin: float, alpha: float) -> int:
    """Items that rule out a drop of `margin` with 80 % power where there is none, clustered as those seen."""
    return math.ceil(_reach(alpha) ** 2 * variance / margin**2)


def _reach(alpha: float) -> float:
    return z_value(1 - alpha) + z_value(POWER)
