"""Raw values of a measurement and what can be said of so many of them.

Nothing is thrown away: every statistic is a property of the values, in their unit, and one that needs more values than
there are is None.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

FEWEST_FOR_P99 = 100
"""With fewer values the 99th percentile is only the largest of them."""
OUTLIER_SCORE = 14.826
"""|x - median| / MAD above which hyperfine (src/outlier_detection.rs) calls a value an outlier: 10 robust standard deviations."""
NOISY_SPREAD = 0.05
"""A coefficient of variation above this is said to be noise."""


@dataclass(frozen=True)
class Samples:
    """Values in the order measured; `unit` is `s`, `bytes`, or a rate such as `tokens/s`."""

    values: tuple[float, ...]
    unit: str = "s"

    @property
    def n(self) -> int:
        return len(self.values)

    @property
    def minimum(self) -> float | None:
        return min(self.values, default=None)

    @property
    def median(self) -> float | None:
        return self.percentile(50)

    @property
    def p90(self) -> float | None:
        return self.percentile(90)

    @property
    def p99(self) -> float | None:
        return self.percentile(99) if self.n >= FEWEST_FOR_P99 else None

    @property
    def mean(self) -> float | None:
        return math.fsum(self.values) / self.n if self.values else None

    @property
    def sd(self) -> float | None:
        """Standard deviation with n - 1; None below two values."""
        if self.n < 2 or self.mean is None:
            return None
        return math.sqrt(math.fsum((value - self.mean) ** 2 for value in self.values) / (self.n - 1))

    @property
    def cv(self) -> float | None:
        """Standard deviation over mean."""
        return self.sd / self.mean if self.sd is not None and self.mean else None

    @property
    def outliers(self) -> int:
        """How many values are farther from the median than OUTLIER_SCORE median absolute deviations."""
        if self.median is None:
            return 0
        middle = self.median
        distances = Samples(tuple(abs(value - middle) for value in self.values))
        spread = distances.median or 0.0
        return sum(distance > OUTLIER_SCORE * spread for distance in distances.values) if spread else 0

    def percentile(self, percent: float) -> float | None:
        """Between the two nearest values, linearly (numpy's default); None without values."""
        if not self.values:
            return None
        ordered = sorted(self.values)
        place = (self.n - 1) * percent / 100
        low = math.floor(place)
        high = min(low + 1, self.n - 1)
        return ordered[low] + (ordered[high] - ordered[low]) * (place - low)

    def to_json(self) -> dict[str, Any]:
        """The statistics; the raw values are kept with the calls that they came from."""
        names = ("n", "unit", "median", "p90", "p99", "minimum", "mean", "sd", "cv", "outliers")
        return {name: getattr(self, name) for name in names}


def joined(parts: Sequence[Sequence[float]], unit: str = "s") -> Samples:
    """One series of several."""
    return Samples(tuple(value for part in parts for value in part), unit)
