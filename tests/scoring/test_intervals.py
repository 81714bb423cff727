"""Intervals against published values, a slow reference and simulation."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qvlopt.scoring.intervals import cluster_bootstrap, tango, z_value

Z = z_value(0.95)


@pytest.mark.parametrize(
    ("b", "c", "n", "low", "high"),
    [
        (0, 0, 100, -2.634, 2.634),
        (0, 0, 299, -0.897, 0.897),
        (30, 20, 1000, -2.211, 0.167),
        (60, 10, 1000, -6.443, -3.712),
        (60, 40, 5000, -0.738, -0.072),
        (2, 1, 200, -2.54, 1.32),
        (30, 20, 5349, -0.415, 0.031),
        (40, 5, 1000, -4.70, -2.49),
    ],
)
def test_tango_has_the_published_bounds_in_points(b: int, c: int, n: int, low: float, high: float) -> None:
    assert [100 * bound for bound in tango(b, c, n, Z)] == pytest.approx([low, high], abs=0.006)


@given(st.integers(0, 60), st.integers(0, 60), st.integers(1, 400), st.sampled_from([1.0, Z, 2.576]))
def test_exchanging_the_sides_mirrors_tango_exactly(b: int, c: int, extra: int, z: float) -> None:
    low, high = tango(b, c, b + c + extra, z)
    assert tango(c, b, b + c + extra, z) == (-high, -low)


@given(st.integers(1, 10_000))
def test_without_flips_tango_is_its_closed_form(n: int) -> None:
    assert tango(0, 0, n, Z).high == pytest.approx(Z**2 / (n + Z**2), rel=1e-9)


@given(st.floats(0, 50), st.floats(0, 50), st.floats(0, 500))
def test_tango_holds_the_estimate_and_stays_in_range(b: float, c: float, extra: float) -> None:
    n = b + c + extra + 1
    low, high = tango(b, c, n, Z)
    assert -1 <= low <= (c - b) / n <= high <= 1


@pytest.mark.parametrize(("b", "c", "n"), [(3, 1, 40), (0, 5, 30), (12, 12, 60), (7, 0, 7)])
def test_tango_inverts_the_score_test_with_the_constrained_maximum_likelihood(b: int, c: int, n: int) -> None:
    low, high = tango(b, c, n, Z)
    for delta, z in ((low, Z), (high, -Z)):
        if -1 < delta < 1:
            assert _score_statistic(delta, b, c, n) == pytest.approx(z, abs=2e-3)


def _score_statistic(delta: float, b: int, c: int, n: int) -> float:
    """T(delta) with the nuisance probability found by search over the multinomial likelihood."""
    grid = np.linspace(max(0.0, -delta), (1 - delta) / 2, 400_001)
    with np.errstate(divide="ignore", invalid="ignore"):
        logs = [np.where(count > 0, count * np.log(p), 0.0) for count, p in ((b, grid), (c, grid + delta), (n - b - c, 1 - 2 * grid - delta))]
    best = grid[np.nanargmax(sum(logs))]
    return float((c - b - n * delta) / math.sqrt(n * (2 * best + delta * (1 - delta))))


@pytest.mark.parametrize(("b", "c", "n"), [(-1, 0, 5), (0, -1, 5), (3, 3, 5), (0, 0, 0)])
def test_tango_refuses_impossible_counts(b: int, c: int, n: int) -> None:
    with pytest.raises(ValueError, match="expected 0 <= b, c"):
        tango(b, c, n, Z)


def paired(n_clusters: int, size: int, seed: int, rate: float = 0.05) -> tuple[list[float], list[str]]:
    source = random.Random(seed)
    deltas = [source.choice([-1.0, -0.5, 1.0]) if source.random() < rate else 0.0 for _ in range(n_clusters * size)]
    return deltas, [f"picture {i // size}" for i in range(n_clusters * size)]


def test_the_bootstrap_does_not_depend_on_the_order_or_the_names() -> None:
    deltas, clusters = paired(100, 3, seed=1)
    expected = cluster_bootstrap(deltas, clusters, alpha=0.05, seed=7)
    order = list(range(300))
    random.Random(2).shuffle(order)
    shuffled = cluster_bootstrap([deltas[i] for i in order], ["x" + clusters[i] for i in order], alpha=0.05, seed=7)
    assert shuffled == expected
    graded = [delta * (1 + i / 1000) for i, delta in enumerate(deltas)]
    first, second = (cluster_bootstrap(graded, clusters, alpha=0.05, seed=seed) for seed in (7, 8))
    assert first != second


def test_the_bootstrap_is_the_plain_one_over_clusters() -> None:
    deltas, clusters = paired(60, 4, seed=3, rate=0.2)
    sums = np.reshape(deltas, (60, 4)).sum(axis=1)
    means = sums[np.random.default_rng(0).integers(0, 60, (40_000, 60))].sum(axis=1) / 240
    found = cluster_bootstrap(deltas, clusters, alpha=0.05, seed=0, resamples=40_000)
    assert found == pytest.approx(np.quantile(means, [0.05, 0.95]), abs=0.002)


def test_clusters_of_unequal_size_weigh_by_their_items() -> None:
    deltas = [-1.0] * 30 + [0.0] * 30
    clusters = ["big"] * 30 + [f"small {i}" for i in range(30)]
    low, high = cluster_bootstrap(deltas, clusters, alpha=0.05, seed=0)
    assert low < -0.7
    assert high == 0.0


def test_a_mean_without_changes_has_no_width_in_the_bootstrap() -> None:
    assert cluster_bootstrap([0.0] * 50, [str(i) for i in range(50)], alpha=0.05, seed=0) == (0.0, 0.0)


@pytest.mark.slow
def test_clustered_data_need_the_cluster_bootstrap() -> None:
    """Five questions a picture that tend to flip together: a nominal 90 % interval covers only when pictures are drawn."""
    runs, covered_clusters, covered_items = 200, 0, 0
    for run in range(runs):
        source = np.random.default_rng(run)
        shift = source.choice([-1, 0, 1], p=[0.1, 0.8, 0.1], size=100)
        follows = source.random((100, 5)) < 0.7
        deltas = (shift[:, None] * follows).ravel().astype(float).tolist()
        clusters = [str(i // 5) for i in range(500)]
        by_picture = cluster_bootstrap(deltas, clusters, alpha=0.05, seed=run, resamples=1000)
        by_item = cluster_bootstrap(deltas, [str(i) for i in range(500)], alpha=0.05, seed=run, resamples=1000)
        covered_clusters += by_picture.low <= 0 <= by_picture.high
        covered_items += by_item.low <= 0 <= by_item.high
    assert covered_clusters / runs >= 0.85
    assert covered_items / runs <= 0.72
