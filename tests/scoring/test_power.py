"""How many items it takes, against the published table and by counting."""

from __future__ import annotations

import pytest

from qvlopt.scoring.power import item_variance, items_needed, smallest_drop


def independent(share: float, n: int = 10_000) -> float:
    """The variance of items of which that share changed."""
    changed = round(share * n)
    deltas = [-1.0] * (changed // 2) + [1.0] * (changed - changed // 2) + [0.0] * (n - changed)
    return item_variance(deltas, [str(i) for i in range(n)])


@pytest.mark.parametrize(
    ("share", "margin", "n"),
    [(0.02, 0.01, 1235), (0.05, 0.01, 3090), (0.10, 0.01, 6181), (0.15, 0.01, 9272), (0.02, 0.02, 308), (0.05, 0.02, 771), (0.05, 0.005, 12364)],
)
def test_items_needed_are_the_published_ones(share: float, margin: float, n: int) -> None:
    """The published table was made with rounded quantiles: two items fewer."""
    assert items_needed(independent(share), margin, 0.05) == pytest.approx(n, abs=2)


@pytest.mark.parametrize(("n", "points"), [(100, 5.6), (200, 3.9), (500, 2.5), (1000, 1.8), (2500, 1.1), (5000, 0.8), (5349, 0.76)])
def test_the_smallest_drop_is_the_published_one(n: int, points: float) -> None:
    assert 100 * smallest_drop(0.05, n, 0.05) == pytest.approx(points, abs=0.05)


def test_no_change_is_taken_for_three() -> None:
    assert item_variance([0.0] * 600, [str(i) for i in range(600)]) == pytest.approx(3 / 600)
    assert item_variance([0.0] * 600, [str(i // 6) for i in range(600)]) == pytest.approx(3 * 36 / 600)


def test_questions_that_flip_together_are_one_observation() -> None:
    deltas = [-1.0] * 50 + [1.0] * 50 + [0.0] * 900
    assert item_variance(deltas, [str(i) for i in range(1000)]) == pytest.approx(0.1)
    assert item_variance(deltas, [str(i // 10) for i in range(1000)]) == pytest.approx(1.0)


def test_questions_that_balance_each_other_are_no_better_than_independent_ones() -> None:
    deltas = [-1.0, 1.0] * 50 + [0.0] * 900
    assert item_variance(deltas, [str(i // 2) for i in range(1000)]) == pytest.approx(0.1)
