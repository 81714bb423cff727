"""Intervals against published values, a slow reference and simulation."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from qvlopt.scoring.intervals import (
    bootstrap_means,
    cluster_bootstrap,
    clustered_tango,
    effective_clusters,
    sign_p_value,
    student_quantile,
    student_z,
    tango,
    tango_p_value,
    z_value,
)

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


@pytest.mark.parametrize(("b", "c", "p"), [(5, 0, 0.03125), (4, 0, 0.0625), (60, 40, 0.028444), (0, 0, 1.0), (0, 7, 1.0)])
def test_the_sign_test_has_the_published_values(b: int, c: int, p: float) -> None:
    assert sign_p_value(b, c) == pytest.approx(p, abs=5e-7)


@pytest.mark.parametrize(("b", "c", "two_sided"), [(10, 2, 0.038574), (30, 20, 0.202639), (60, 40, 0.056888), (15, 5, 0.041389)])
def test_the_sign_test_is_half_of_mcnemars_exact_test(b: int, c: int, two_sided: float) -> None:
    assert 2 * sign_p_value(b, c) == pytest.approx(two_sided, abs=5e-7)


@given(st.integers(0, 40), st.integers(0, 40), st.integers(1, 300), st.integers(-200, 200).map(lambda thousandths: thousandths / 1000))
def test_a_value_above_tangos_interval_has_a_small_p_value(b: int, c: int, extra: int, delta: float) -> None:
    n = b + c + extra
    low, high = tango(b, c, n, Z)
    p = tango_p_value(b, c, n, delta)
    assert (p < 0.05) == (delta > high) or delta == pytest.approx(high, abs=1e-9)
    assert (p > 0.95) == (delta < low) or delta == pytest.approx(low, abs=1e-9)


@pytest.mark.parametrize("freedom", [9, 20, 60, 400])
@pytest.mark.parametrize("probability", [0.9, 0.95, 0.983])
def test_students_quantile_is_near_and_not_below_the_exact_one(freedom: int, probability: float) -> None:
    exact = float(stats.t.ppf(probability, freedom))
    found = student_quantile(z_value(probability), freedom)
    assert exact - 1e-4 <= found <= exact * 1.02
    assert student_z(found, freedom) == pytest.approx(z_value(probability))
    assert student_quantile(-z_value(probability), freedom) == -found


@pytest.mark.parametrize(
    ("clusters", "effective"),
    [(list("abcd"), 4), (list("aabbcc"), 3), (["a"] * 6, 1), (["a"] * 5 + list("bcdef"), 100 / 30)],
)
def test_unequal_clusters_count_as_fewer_equal_ones(clusters: list[str], effective: float) -> None:
    assert effective_clusters(clusters) == pytest.approx(effective)


def test_for_independent_flips_the_clustered_interval_is_tangos_with_students_quantile() -> None:
    deltas = [-1.0] * 30 + [1.0] * 20 + [0.0] * 950
    (low, high), p = clustered_tango(deltas, [str(i) for i in range(1000)], alpha=0.05, margin=0.01)
    assert (low, high) == pytest.approx(tango(30, 20, 1000, student_quantile(Z, 49)), abs=2e-5)
    assert p == pytest.approx(tango_p_value(30, 20, 1000, -0.01), abs=0.005)


def test_clusters_that_change_as_a_whole_are_one_observation_each() -> None:
    deltas = [-1.0] * 60 + [1.0] * 40 + [0.0] * 900
    (low, high), _ = clustered_tango(deltas, [str(i // 5) for i in range(1000)], alpha=0.05, margin=0.01)
    assert (low, high) == pytest.approx(tango(12, 8, 200, student_quantile(Z, 19)), abs=3e-4)


def test_small_changes_make_a_narrower_interval_than_flips_of_the_same_sum() -> None:
    graded, flips = [-0.1] * 100 + [0.0] * 900, [-1.0] * 10 + [0.0] * 990
    ids = [str(i) for i in range(1000)]
    (low, high), _ = clustered_tango(graded, ids, alpha=0.05, margin=0.01)
    (wide_low, wide_high), _ = clustered_tango(flips, ids, alpha=0.05, margin=0.01)
    assert wide_low < low < -0.01 < high < wide_high


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


def test_drawing_kinds_of_clusters_is_drawing_clusters() -> None:
    """Few distinct (sum, size) take the short way, many the long one: the same distribution."""
    deltas, clusters = paired(200, 3, seed=5)
    short = bootstrap_means(deltas, clusters, seed=0, resamples=20_000)
    nudged = [delta + 1e-9 * i for i, delta in enumerate(deltas)]
    long = bootstrap_means(nudged, clusters, seed=1, resamples=20_000)
    levels = [0.01, 0.05, 0.5, 0.95, 0.99]
    assert np.quantile(short, levels) == pytest.approx(np.quantile(long, levels), abs=0.0012)


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
