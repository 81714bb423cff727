"""Mann-Whitney's test against scipy and against counting, and the interval against the test that it inverts."""

from __future__ import annotations

import math
from itertools import combinations
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import mannwhitneyu

from qvlopt.timing.rank_test import EXACT_PAIRS, _frequencies, p_greater, ratio_interval

SIDE = st.lists(st.floats(0.1, 10), min_size=1, max_size=8)


@given(SIDE, SIDE)
def test_the_p_value_is_scipys(base: list[float], other: list[float]) -> None:
    distinct = len({*base, *other}) == len(base) + len(other)
    if len({*base, *other}) == 1:
        assert p_greater(base, other) == 1.0
        return
    expected = mannwhitneyu(other, base, alternative="greater", method="exact" if distinct else "asymptotic").pvalue
    assert p_greater(base, other) == pytest.approx(min(1.0, expected), abs=1e-9)


@pytest.mark.parametrize(("n", "m"), [(1, 1), (2, 3), (4, 2), (4, 5)])
def test_the_distribution_of_u_is_that_of_all_arrangements(n: int, m: int) -> None:
    counts = [0] * (n * m + 1)
    for places in combinations(range(n + m), n):
        counts[sum(place - rank for rank, place in enumerate(places))] += 1
    assert list(_frequencies(n, m)) == counts
    assert sum(counts) == math.comb(n + m, n)


def test_many_samples_use_the_normal_approximation_and_agree_with_scipy() -> None:
    random = Random(0)
    base, other = ([random.gauss(mean, 1) + 10 for _ in range(60)] for mean in (0.0, 0.4))
    assert len(base) * len(other) > EXACT_PAIRS
    assert p_greater(base, other) == pytest.approx(mannwhitneyu(other, base, alternative="greater", method="asymptotic").pvalue, rel=1e-6)


@given(SIDE, st.floats(0.2, 5))
def test_a_side_scaled_by_a_factor_has_that_ratio(base: list[float], factor: float) -> None:
    found = ratio_interval(base, [factor * value for value in base], alpha=0.05)
    assert found.ratio == pytest.approx(factor)
    if found.low is not None and found.high is not None:
        assert found.low <= found.ratio * (1 + 1e-12)
        assert found.high >= found.ratio * (1 - 1e-12)


def test_swapping_the_sides_mirrors_the_interval() -> None:
    base, other = [1.0, 1.2, 0.9, 1.1, 1.3], [1.5, 1.4, 1.7, 1.45, 2.0]
    there, back = ratio_interval(base, other, alpha=0.05), ratio_interval(other, base, alpha=0.05)
    assert there.ratio == pytest.approx(1 / back.ratio)
    assert there.low is not None
    assert back.high is not None
    assert there.low == pytest.approx(1 / back.high)


@given(st.integers(0, 500))
def test_the_bounds_are_where_the_test_turns(seed: int) -> None:
    """Just below the lower bound the base, scaled up, is shown to be smaller; just above it is not."""
    random = Random(seed)
    base, other = ([random.lognormvariate(0, 0.3) for _ in range(7)] for _ in range(2))
    low = ratio_interval(base, other, alpha=0.05).low
    assert low is not None
    assert p_greater([value * low * (1 - 1e-9) for value in base], other) <= 0.05
    assert p_greater([value * low * (1 + 1e-9) for value in base], other) > 0.05


@pytest.mark.parametrize(("n", "m"), [(1, 1), (2, 2)])
def test_too_few_values_have_no_bounds(n: int, m: int) -> None:
    found = ratio_interval([1.0] * n, [2.0] * m, alpha=0.05)
    assert (found.ratio, found.low, found.high) == (pytest.approx(2.0), None, None)


def test_the_interval_holds_the_true_ratio_as_often_as_it_says() -> None:
    """Two one-sided bounds at 5 %: at least 90 % of intervals hold the truth; exact levels are a little wider."""
    random, held = Random(1), 0
    for _ in range(400):
        base, other = ([random.lognormvariate(shift, 0.2) for _ in range(10)] for shift in (0.0, math.log(1.1)))
        found = ratio_interval(base, other, alpha=0.05)
        assert found.low is not None
        assert found.high is not None
        held += found.low <= 1.1 <= found.high
    assert 0.88 <= held / 400 <= 0.96


@pytest.mark.parametrize("values", [([], [1.0]), ([1.0], []), ([0.0], [1.0]), ([1.0], [-1.0])])
def test_a_ratio_needs_positive_values(values: tuple[list[float], list[float]]) -> None:
    with pytest.raises(ValueError, match="positive"):
        ratio_interval(*values, alpha=0.05)


def test_an_empty_side_shows_nothing() -> None:
    assert p_greater([], [1.0]) == 1.0
