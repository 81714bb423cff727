"""Verdicts: a slowdown that is there is found, one that is not is not, and too little data is said to be that."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from qvlopt.timing.comparison import FEWEST, Pace, Ratio, Series, Verdict, compare_engines, compare_series, unlike, verdict_of

NAME = ("int8", "64x64", "e2e")


def series(mean: float, *, n: int = 10, spread: float = 0.02, seed: int = 0, rounds: int = 2) -> Series:
    random = Random(seed)
    values = [mean * random.lognormvariate(0, spread) for _ in range(n)]
    return Series(tuple(tuple(values[n * number // rounds : n * (number + 1) // rounds]) for number in range(rounds)))


def verdict(base: Series, other: Series, tolerance: float = 0.1) -> Verdict | None:
    ratio = compare_series(NAME, base, other, tolerance=tolerance)
    assert ratio is not None
    return ratio.verdict


@pytest.mark.parametrize(("factor", "expected"), [(0.5, "pass"), (1.0, "pass"), (1.05, "pass"), (1.3, "fail"), (3.0, "fail")])
def test_what_is_clear_is_said(factor: float, expected: str) -> None:
    assert verdict(series(1.0), series(factor, seed=1)) == expected


def test_what_is_at_the_limit_is_inconclusive() -> None:
    assert verdict(series(1.0, spread=0.1), series(1.1, spread=0.1, seed=1)) == "inconclusive"


def test_noise_is_inconclusive_not_a_pass() -> None:
    assert verdict(series(1.0, spread=0.6), series(1.0, spread=0.6, seed=1)) == "inconclusive"


@pytest.mark.parametrize("n", [1, 2, FEWEST - 1])
def test_fewer_than_nine_samples_claim_nothing(n: int) -> None:
    ratio = compare_series(NAME, series(1.0, n=n), series(5.0, n=n, seed=1), tolerance=0.1)
    assert ratio is not None
    assert ratio.verdict == "inconclusive"
    assert ratio.reason == f"{n} samples, 9 are needed"


def test_nine_samples_a_side_are_enough() -> None:
    assert verdict(series(1.0, n=FEWEST), series(2.0, n=FEWEST, seed=1)) == "fail"


def test_a_slowdown_of_one_process_alone_is_no_regression() -> None:
    base = series(1.0, n=20)
    half_slow = Series((series(0.97, n=3, seed=1, rounds=1).values, series(2.0, n=17, seed=2, rounds=1).values))
    ratio = compare_series(NAME, base, half_slow, tolerance=0.1)
    assert ratio is not None
    assert ratio.ci_low is not None
    assert ratio.ci_low > 1.1
    assert (ratio.verdict, ratio.reason) == ("inconclusive", "not every process was slower than every process of the base")


def test_a_busy_machine_is_not_a_slower_program() -> None:
    slow, busy = series(3.0, seed=1), replace(series(3.0, seed=1), waited=0.4)
    assert verdict(series(1.0), slow) == "fail"
    ratio = compare_series(NAME, series(1.0), busy, tolerance=0.1)
    assert ratio is not None
    assert ratio.verdict == "inconclusive"
    assert ratio.reason == "the engine's threads waited for a processor 40 % of the time, which may be the difference"
    assert verdict(series(1.0), replace(slow, waited=0.05)) == "fail"


def test_a_difference_that_the_waiting_may_have_made_decides_nothing() -> None:
    slower, faster = series(1.17, spread=0.005, seed=1), series(1.06, spread=0.005, seed=1)
    base = series(1.0, spread=0.005)
    assert [verdict(base, replace(slower, waited=waited)) for waited in (None, 0.0, 0.03, 0.08)] == ["fail", "fail", "fail", "inconclusive"]
    assert [verdict(replace(base, waited=waited), faster) for waited in (None, 0.0, 0.02, 0.08)] == ["pass", "pass", "pass", "inconclusive"]


def test_nothing_passes_against_a_base_that_was_slow_because_the_machine_was_busy() -> None:
    assert verdict(replace(series(3.0), waited=0.4), series(1.5, seed=1)) == "inconclusive"
    assert verdict(series(1.0), replace(series(0.9, seed=1), waited=0.4)) == "pass"


def test_two_runs_of_the_same_hardly_ever_fail() -> None:
    verdicts = [verdict(series(1.0, spread=0.15, seed=seed), series(1.0, spread=0.15, seed=seed + 1000)) for seed in range(200)]
    assert verdicts.count("fail") == 0
    assert verdicts.count("pass") > 60


def test_a_real_slowdown_is_found_in_noise_of_that_size() -> None:
    verdicts = [verdict(series(1.0, spread=0.15, seed=seed), series(1.5, spread=0.15, seed=seed + 1000)) for seed in range(100)]
    assert verdicts.count("fail") > 90


def test_sizes_are_compared_as_they_are() -> None:
    base, more = Series(((100.0, 101.0),), "bytes", is_exact=True), Series(((130.0,),), "bytes", is_exact=True)
    assert verdict(base, more) == "fail"
    assert verdict(base, base) == "pass"


def test_what_a_side_lacks_is_not_compared() -> None:
    found = compare_engines("x", {("c", "e2e"): series(1.0), ("c", "vision"): Series(())}, {("c", "e2e"): series(1.0)}, tolerance=0.1)
    assert [ratio.metric for ratio in found] == ["e2e"]
    assert compare_series(NAME, series(1.0), Series(()), tolerance=0.1) is None


def ratio_of(metric: str, verdict: Verdict) -> Ratio:
    return Ratio("x", "c", metric, "s", 1, 1, 1, None, None, None, 1, 1, verdict, "")


def test_the_worst_gated_quantity_decides() -> None:
    assert verdict_of([ratio_of("e2e", "pass"), ratio_of("ttft", "inconclusive"), ratio_of("tpot", "fail")]) == "fail"
    assert verdict_of([ratio_of("e2e", "pass"), ratio_of("ttft", "inconclusive")]) == "inconclusive"
    assert verdict_of([ratio_of("e2e", "pass"), ratio_of("vision", "fail"), ratio_of("load", "fail")]) == "pass"


def test_nothing_in_common_is_not_comparable() -> None:
    assert verdict_of([ratio_of("vision", "pass")]) == "not_comparable"


def test_what_differs_is_named_and_the_unknown_is_not_held_against_it() -> None:
    base, other = {"cpu_model": "A", "threads": 2, "gpu": None}, {"cpu_model": "B", "threads": 2, "gpu": "H200"}
    assert unlike(base, other, ("cpu_model", "threads", "gpu")) == ("cpu_model was A, is B",)


def test_a_machine_that_changed_its_pace_decides_nothing_that_the_pace_explains() -> None:
    base, slower, faster = series(1.0, spread=0.005), series(1.3, spread=0.005, seed=1), series(1.0, spread=0.005, seed=2)
    pace = Pace.between([{"float32": 100.0, "bytes": 30.0, "int8": 5.0}], [{"float32": 100.0, "bytes": 24.0}])
    assert (round(pace.slower, 2), pace.faster) == (1.25, 1.0)
    held = compare_series(NAME, base, slower, tolerance=0.1, pace=pace)
    assert held is not None
    assert (held.verdict, held.reason) == ("inconclusive", "the machine itself was up to 1.25 times as slow as then")
    assert verdict(base, slower) == "fail"
    back = compare_series(NAME, base, faster, tolerance=0.1, pace=Pace(faster=1.25))
    assert back is not None
    assert (back.verdict, back.reason) == ("inconclusive", "the machine itself was up to 1.25 times as fast as then")
    assert verdict(base, faster) == "pass"
    worse = compare_series(NAME, base, series(2.0, spread=0.005, seed=3), tolerance=0.1, pace=pace)
    assert worse is not None
    assert worse.verdict == "fail"


def test_the_pace_that_changed_most_counts_from_any_time_of_both_runs() -> None:
    then = [{"float32": 90.0, "python": 7.0}, {"float32": 100.0, "python": 7.0}, {}]
    now = [{"float32": 95.0, "python": 7.0, "bytes": 3.0}, {"float32": 120.0, "python": 5.0}]
    assert Pace.between(then, now) == Pace(slower=7 / 5, faster=120 / 90)
    assert Pace.between(now, then) == Pace(slower=120 / 90, faster=7 / 5)


def test_rates_that_are_missing_are_not_held_against_a_run() -> None:
    assert Pace.between([], [{"float32": 1.0}]) == Pace.between([{}], [{"float32": 1.0}]) == Pace(1.0, 1.0)
