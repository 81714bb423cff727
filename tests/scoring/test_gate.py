"""The gate's table of verdicts, and what must hold for any scores."""

from __future__ import annotations

import random
from collections.abc import Mapping

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qvlopt.scoring.gate import MetricVerdict, Verdict, exit_status, judge, worst
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


@pytest.mark.slow
@pytest.mark.parametrize("n", [300, 1000])
def test_a_drop_of_the_margin_passes_no_more_often_than_alpha(n: int) -> None:
    """The true difference is exactly -1 point; 4.3 to 4.8 % passes are expected at alpha = 5 %."""
    source, runs, passes = np.random.default_rng(n), 1500, 0
    known: dict[tuple[int, int], bool] = {}
    for _ in range(runs):
        lost, gained, _rest = source.multinomial(n, [0.02, 0.01, 0.97])
        if (lost, gained) not in known:
            known[lost, gained] = tango(lost, gained, n, Z).low > -0.01
        passes += known[lost, gained]
    assert passes / runs <= 0.07


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
