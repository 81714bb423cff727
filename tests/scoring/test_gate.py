"""The gate's table of verdicts, and what must hold for any scores."""

from __future__ import annotations

import random
from collections.abc import Mapping

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qvlopt.scoring.gate import MetricVerdict, Verdict, exit_status, hold_together, judge, worst
from qvlopt.scoring.intervals import tango, z_value

Z = z_value(0.95)


def flipped(b: int, c: int, n: int) -> tuple[dict[str, float], dict[str, float], dict[str, str]]:
    """Binary scores of n independent items: b lost, c gained, half of the others right on both sides."""
    base = {f"{i:06}": 1.0 if i < b else 0.0 if i < b + c else float(i % 2) for i in range(n)}
    candidate = {f"{i:06}": 0.0 if i < b else 1.0 if i < b + c else float(i % 2) for i in range(n)}
    return base, candidate, {id: id for id in base}


def judged(b: int, c: int, n: int, margin: float) -> MetricVerdict:
    return judge(*flipped(b, c, n), margin=margin, alpha=0.05, binary=True)


@pytest.mark.parametrize(
    ("b", "c", "n", "margin", "verdict"),
    [
        (0, 0, 100, 0.01, "inconclusive"),
        (0, 0, 267, 0.01, "inconclusive"),
        (0, 0, 268, 0.01, "pass"),
        (0, 0, 299, 0.01, "pass"),
        (0, 0, 132, 0.02, "inconclusive"),
        (0, 0, 133, 0.02, "pass"),
        (0, 0, 538, 0.005, "inconclusive"),
        (0, 0, 539, 0.005, "pass"),
        (2, 1, 200, 0.01, "inconclusive"),
        (30, 20, 1000, 0.01, "inconclusive"),
        (30, 20, 1000, 0.025, "pass"),
        (30, 20, 5349, 0.01, "pass"),
        (30, 20, 5349, 0.003, "inconclusive"),
        (60, 40, 5000, 0.01, "pass"),
        (60, 10, 1000, 0.01, "fail"),
        (60, 10, 1000, 0.05, "inconclusive"),
        (60, 10, 1000, 0.07, "pass"),
        (40, 5, 1000, 0.01, "fail"),
    ],
)
def test_verdicts_of_the_table(b: int, c: int, n: int, margin: float, verdict: Verdict) -> None:
    assert judged(b, c, n, margin).verdict == verdict


def test_a_demonstrated_drop_within_the_margin_passes_and_is_said() -> None:
    assert judged(60, 40, 5000, 0.01).drop_within_margin
    assert not judged(30, 20, 5349, 0.01).drop_within_margin
    assert not judged(40, 5, 1000, 0.01).drop_within_margin


@pytest.mark.parametrize("n", [10, 100, 200])
def test_identical_answers_on_few_items_prove_nothing(n: int) -> None:
    assert judged(0, 0, n, 0.01).verdict == "inconclusive"


def test_the_figures_of_one_comparison() -> None:
    found = judged(2, 1, 200, 0.01)
    assert (found.n, found.lost, found.gained, found.method) == (200, 2, 1, "tango")
    assert found.delta == pytest.approx(-0.005)
    assert (found.ci_low, found.ci_high) == tango(2, 1, 200, Z)
    assert found.n_needed == 928
    assert judged(50, 0, 1000, 0.01).n_needed == pytest.approx(3090, abs=2)
    assert judged(50, 0, 1000, 0.01).mde == pytest.approx(0.0176, abs=1e-4)


@given(st.integers(0, 30), st.integers(0, 30), st.integers(0, 50))
def test_delta_is_gain_rate_minus_loss_rate(b: int, c: int, rest: int) -> None:
    n = b + c + rest + 1
    found = judged(b, c, n, 0.05)
    assert (found.lost, found.gained) == (b, c)
    assert found.delta == (c - b) / n
    assert found.base is not None
    assert found.candidate == pytest.approx(found.base + (c - b) / n)


def clustered(losses: Mapping[int, float], *, pictures: int, questions: int) -> tuple[dict[str, float], dict[str, float], dict[str, str]]:
    """Scores of `pictures` x `questions` items; `losses` gives the change of single items by number."""
    ids = [f"{i:06}" for i in range(pictures * questions)]
    base = dict.fromkeys(ids, 0.5)
    candidate = {id: 0.5 + losses.get(i, 0.0) for i, id in enumerate(ids)}
    return base, candidate, {id: str(i // questions) for i, id in enumerate(ids)}


def test_questions_about_one_picture_are_not_independent_evidence() -> None:
    base, candidate, clusters = flipped(0, 0, 300)
    alone = judge(base, candidate, clusters, margin=0.01, alpha=0.05, binary=True)
    shared = {id: id[:-1] for id in base}
    together = judge(base, candidate, shared, margin=0.01, alpha=0.05, binary=True)
    assert (alone.verdict, together.verdict) == ("pass", "inconclusive")
    assert together.ci_high == tango(0, 0, 30, Z).high
    assert together.method == "tango over clusters"


def test_few_flips_in_clusters_are_centred_on_the_difference() -> None:
    """Nine lost items of a thousand are no demonstrated drop of two points, however few the pictures."""
    losses = {i * 5: -0.5 for i in range(9)}
    found = judge(*clustered(losses, pictures=200, questions=5), margin=0.02, alpha=0.05, binary=False)
    assert found.delta == pytest.approx(-0.0045)
    assert found.delta is not None
    assert found.ci_low is not None
    assert found.ci_high is not None
    assert found.ci_low < found.delta < found.ci_high
    assert found.ci_low < tango(0, 0, 200, Z).low
    assert found.verdict != "fail"


def test_many_flips_in_one_picture_are_one_observation() -> None:
    losses = dict.fromkeys(range(40), -0.5)
    found = judge(*clustered(losses, pictures=50, questions=40), margin=0.02, alpha=0.05, binary=False)
    assert found.method == "tango over clusters"
    assert found.verdict == "inconclusive"


@pytest.mark.parametrize("binary", [True, False])
def test_many_changed_clusters_are_bootstrapped(binary: bool) -> None:
    losses = {i * 4: -0.5 for i in range(20)}
    found = judge(*clustered(losses, pictures=100, questions=4), margin=0.02, alpha=0.05, binary=binary)
    assert found.method == "cluster bootstrap"
    assert found.delta == pytest.approx(-0.025)
    assert found.ci_low is not None
    assert found.ci_low == pytest.approx(-0.0325, abs=0.004)


def test_graded_scores_of_independent_items_are_bootstrapped() -> None:
    losses = dict.fromkeys(range(10), -0.5)
    found = judge(*clustered(losses, pictures=400, questions=1), margin=0.02, alpha=0.05, binary=False)
    assert found.method == "cluster bootstrap"
    assert judge(*clustered({0: -0.5}, pictures=400, questions=1), margin=0.02, alpha=0.05, binary=False).method == "tango over clusters"


def test_the_order_of_the_items_does_not_matter() -> None:
    losses = {i * 4: -0.3 for i in range(20)} | {i * 4 + 1: 0.1 for i in range(9)}
    base, candidate, clusters = clustered(losses, pictures=100, questions=4)
    order = list(base)
    random.Random(0).shuffle(order)
    first, second = ({id: scores[id] for id in order} for scores in (base, candidate))
    expected = judge(base, candidate, clusters, margin=0.02, alpha=0.05, binary=False)
    assert judge(first, second, clusters, margin=0.02, alpha=0.05, binary=False) == expected


@pytest.mark.parametrize(("base", "candidate"), [({}, {}), ({"a": 1.0}, {"b": 1.0}), ({"a": 1.0, "b": 0.0}, {"a": 1.0})])
def test_scores_of_different_items_are_not_compared(base: dict[str, float], candidate: dict[str, float]) -> None:
    found = judge(base, candidate, {"a": "a", "b": "b"}, margin=0.02, alpha=0.05, binary=True)
    assert found.verdict == "not_comparable"
    assert found.delta is None


def test_all_items_lost_alike_is_a_demonstrated_drop() -> None:
    """Nothing varies, so neither resampling nor a design effect has anything to go by."""
    for change in (-1.0, -0.5):
        base, candidate, clusters = clustered(dict.fromkeys(range(60), change), pictures=20, questions=3)
        base = dict.fromkeys(base, 1.0)
        candidate = dict.fromkeys(base, 1.0 + change)
        assert judge(base, candidate, clusters, margin=0.02, alpha=0.05, binary=False).verdict == "fail"


def test_one_picture_with_most_questions_counts_as_few_pictures() -> None:
    base, candidate, _ = flipped(0, 0, 1000)
    clusters = {id: "big" if number < 500 else id for number, id in enumerate(base)}
    found = judge(base, candidate, clusters, margin=0.02, alpha=0.05, binary=True)
    assert found.n_clusters == 501
    assert found.verdict == "inconclusive"
    assert found.ci_high == pytest.approx(tango(0, 0, 1000**2 / (500**2 + 500), Z).high)


def test_what_clustered_items_could_show_follows_from_their_pictures() -> None:
    losses = {i * 5 + j: (-1.0 if i % 2 else 1.0) for i in range(20) for j in range(5)}
    together = judge(*clustered(losses, pictures=200, questions=5), margin=0.01, alpha=0.05, binary=True)
    alone = judge(*clustered(losses, pictures=1000, questions=1), margin=0.01, alpha=0.05, binary=True)
    assert alone.n_needed == 6183
    assert together.n_needed == pytest.approx(5 * 6183, abs=5)  # whole pictures flip: five items are worth one
    assert together.mde == pytest.approx(alone.mde * 5**0.5 if alone.mde else 0)


def with_p(p: float, verdict: Verdict = "fail") -> MetricVerdict:
    return MetricVerdict(100, 1.0, 0.9, -0.1, -0.2, -0.05, 0.02, 10, 0, 0.1, 100, verdict, "tango", 100, None, p, p)


@pytest.mark.parametrize(
    ("p_values", "kept"),
    [
        ([0.04], ["fail"]),
        ([0.04, 0.9], ["inconclusive", "pass"]),
        ([0.02, 0.9], ["fail", "pass"]),
        ([0.02, 0.04], ["fail", "fail"]),
        ([0.04, 0.03, 0.9], ["inconclusive", "inconclusive", "pass"]),
        ([0.016, 0.024, 0.049], ["fail", "fail", "fail"]),
        ([0.016, 0.026, 0.049], ["fail", "inconclusive", "inconclusive"]),
    ],
)
def test_several_metrics_fail_by_chance_no_more_often_than_one(p_values: list[float], kept: list[Verdict]) -> None:
    """Holm's step-down; a metric that passes on its own keeps passing."""
    verdicts = [with_p(p, "pass" if p > 0.5 else "fail") for p in p_values]
    found = hold_together(verdicts, 0.05)
    assert [each.verdict for each in found] == kept
    assert [each.fails_alone for each in found] == [verdict == "inconclusive" for verdict in kept]


def test_corrected_p_values_are_those_of_holm() -> None:
    found = hold_together([with_p(0.03), with_p(0.01), with_p(0.04), with_p(0.005)], 0.05)
    assert [each.p_drop_holm for each in found] == pytest.approx([0.06, 0.03, 0.06, 0.02])
    assert [each.p_drop for each in found] == [0.03, 0.01, 0.04, 0.005]


def test_metrics_without_a_comparison_are_left_as_they_are() -> None:
    nothing = judge({}, {}, {}, margin=0.02, alpha=0.05, binary=True)
    assert hold_together([nothing, with_p(0.04)], 0.05) == [nothing, with_p(0.04)]


def simulated(source: np.random.Generator, *, pictures: int, questions: int, share: float, drop: float, together: float) -> list[float]:
    """Differences of items of which `share` change and `drop` more are lost than gained; a picture's questions change alike with
    a correlation of `together`."""
    chances = [(share + drop) / 2, (share - drop) / 2, 1 - share]
    of_picture = np.repeat(source.choice([-1.0, 1.0, 0.0], p=chances, size=pictures), questions)
    own = source.choice([-1.0, 1.0, 0.0], p=chances, size=pictures * questions)
    follows = source.random(pictures * questions) < together**0.5
    return np.where(follows, of_picture, own).tolist()  # type: ignore[no-any-return]


def passes(runs: int, *, questions: int, drop: float, binary: bool = True, **shape: float) -> float:
    """Share of simulated comparisons that pass a margin of 2 points."""
    source, passed = np.random.default_rng(11), 0
    for _ in range(runs):
        changes = simulated(source, questions=questions, drop=drop, **shape)  # type: ignore[arg-type]
        ids = [str(number) for number in range(len(changes))]
        clusters = {id: str(number // questions) for number, id in enumerate(ids)}
        found = judge(dict.fromkeys(ids, 0.0), dict(zip(ids, changes, strict=True)), clusters, margin=0.02, alpha=0.05, binary=binary)
        passed += found.verdict == "pass"
    return passed / runs


SHAPES = [
    pytest.param({"pictures": 300, "questions": 1, "share": 0.03, "together": 0.0}, 2000, 0.56, id="300 independent"),
    pytest.param({"pictures": 1000, "questions": 1, "share": 0.05, "together": 0.0}, 1000, 0.87, id="1000 independent"),
    pytest.param({"pictures": 200, "questions": 5, "share": 0.05, "together": 0.6}, 500, 0.42, id="200 pictures of 5"),
    pytest.param({"pictures": 300, "questions": 3, "share": 0.03, "together": 0.3}, 500, 0.78, id="300 pictures of 3"),
]
"""Shapes, runs, and the power: how often no drop at all passes a margin of 2 points (docs/gate.md shows them)."""


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "runs", "power"), SHAPES)
def test_a_drop_of_the_margin_passes_no_more_often_than_alpha_and_a_point(shape: dict[str, float], runs: int, power: float) -> None:
    """The true drop is exactly the margin: at most 5 + 1 % may pass."""
    assert passes(runs, drop=0.02, **shape) <= 0.06  # type: ignore[arg-type]
    assert passes(runs // 4, drop=0.0, **shape) == pytest.approx(power, abs=0.08)  # type: ignore[arg-type]


def test_the_worst_verdict_counts() -> None:
    assert worst(["pass", "inconclusive"]) == "inconclusive"
    assert worst(["fail", "inconclusive", "pass"]) == "fail"
    assert worst(["not_comparable", "fail"]) == "not_comparable"
    assert worst(["error", "not_comparable"]) == "error"
    assert worst([]) == "pass"


@pytest.mark.parametrize(
    ("verdict", "policy", "status"),
    [
        ("pass", "fail", 0),
        ("fail", "pass", 1),
        ("inconclusive", "fail", 3),
        ("inconclusive", "warn", 0),
        ("inconclusive", "pass", 0),
        ("not_comparable", "pass", 4),
        ("error", "warn", 5),
    ],
)
def test_exit_statuses(verdict: Verdict, policy: str, status: int) -> None:
    assert exit_status(verdict, policy) == status  # type: ignore[arg-type]
