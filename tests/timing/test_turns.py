"""The order of the turns: interleaved, balanced, nothing measured twice, warm-ups apart."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from qvlopt.timing.plan import Case, Workload, cases_of

CASE = Case(64, 64, 16, 4)


def test_engines_take_turns_there_and_back() -> None:
    turns = list(Workload((CASE,), repeats=10, warmup=2, seed=0).turns(3))
    assert [(turn.engine, turn.round) for turn in turns] == [(0, 0), (1, 0), (2, 0), (2, 1), (1, 1), (0, 1)]


@given(st.integers(1, 30), st.integers(0, 4), st.integers(1, 4))
def test_every_engine_measures_every_iteration_once_and_warms_up_with_others(repeats: int, warmup: int, engines: int) -> None:
    workload = Workload((CASE,), repeats, warmup, seed=0)
    for engine in range(engines):
        turns = [turn for turn in workload.turns(engines) if turn.engine == engine]
        measured = [index for turn in turns for index in turn.measured]
        warmed = [index for turn in turns for index in turn.warmup]
        assert sorted(measured) == list(range(repeats))
        assert all(len(turn.warmup) == warmup and turn.measured for turn in turns)
        assert sorted(warmed) == list(range(repeats, workload.iterations))


def test_one_repeat_is_one_round() -> None:
    assert Workload((CASE,), 1, 0, 0).rounds == 1


def test_a_steady_drift_meets_all_engines_alike() -> None:
    """Where each turn is one step later than the one before, the mean time of every engine's turns is the same."""
    turns = list(Workload((CASE,), 10, 0, 0).turns(4))
    places = {engine: [place for place, turn in enumerate(turns) if turn.engine == engine] for engine in range(4)}
    assert {sum(each) / len(each) for each in places.values()} == {3.5}


def test_cases_are_all_combinations_and_the_first_is_the_plainest() -> None:
    cases = cases_of(["64x32", "128x64"], [16, 32], 8, [1, 4])
    assert cases[0] == Case(64, 32, 16, 8, 1)
    assert len(cases) == 8
    assert [case.name for case in cases[:2]] == ["64x32, 16 tokens", "128x64, 16 tokens"]
    assert cases[-1].name == "128x64, 32 tokens, 4 at once"


def test_a_case_named_twice_is_one() -> None:
    assert len(cases_of(["64x32", "64x32"], [16], 8, [1])) == 1
