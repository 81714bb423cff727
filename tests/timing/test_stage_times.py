"""Stages on a clock that the test moves: what each is given, and what the whole is."""

from __future__ import annotations

import json

import pytest

from qvlopt.timing.stages import CallTimes, Entry, StageRecorder, call_from_json, call_times
from tests.clock import FakeClock


def test_each_stage_has_the_time_between_entering_and_leaving() -> None:
    clock = FakeClock(100.0)
    recorder = StageRecorder(clock)
    recorder.start()
    clock.pass_(0.5)
    with recorder("vision"):
        clock.pass_(2.0)
    with recorder("prefill"):
        clock.pass_(3.0)
    assert recorder.entries == [Entry("vision", 0.5, 2.5), Entry("prefill", 2.5, 5.5)]
    assert recorder.elapsed() == 5.5


def test_a_stage_that_fails_is_recorded() -> None:
    clock = FakeClock()
    recorder = StageRecorder(clock)
    recorder.start()

    def fails() -> None:
        with recorder("vision"):
            clock.pass_(1.0)
            raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError):
        fails()
    assert recorder.entries == [Entry("vision", 0.0, 1.0)]


def test_starting_again_forgets() -> None:
    clock = FakeClock()
    recorder = StageRecorder(clock)
    recorder.start()
    with recorder("vision"):
        clock.pass_(1.0)
    recorder.start()
    assert recorder.entries == []
    assert recorder.elapsed() == 0.0


ENTRIES = (Entry("preprocess", 0, 1), Entry("vision", 1, 3), Entry("prefill", 3, 4), Entry("decode", 4, 4.5), Entry("decode", 4.5, 5.25))


def test_the_moments_of_a_request() -> None:
    times = call_times(ENTRIES, 5.5, [3])
    assert times.ttft == (4.0,)
    assert times.e2e == (5.5,)
    assert times.tpot == ((5.5 - 4.0) / 2,)
    assert times.stages["decode"] == (0.5, 0.75)
    assert times.coverage == pytest.approx(5.25 / 5.5)


def test_one_token_has_no_time_per_token() -> None:
    assert call_times(ENTRIES[:3], 4.0, [1]).tpot == ()


def test_several_requests_at_once_have_no_time_per_token_of_their_own() -> None:
    times = call_times(ENTRIES, 5.5, [3, 3])
    assert (times.tpot, times.tokens, times.requests) == ((), 6, 2)
    assert times.ttft == (4.0,)


def test_requests_that_an_engine_takes_one_after_the_other_wait_for_those_before_them() -> None:
    second = tuple(Entry(entry.stage, entry.began + 5.5, entry.ended + 5.5) for entry in ENTRIES[1:])
    assert call_times((*ENTRIES, *second), 11.0, [3, 3]).ttft == (4.0, 9.5)


def test_without_a_prefill_nothing_is_known_of_the_first_token() -> None:
    assert call_times((), 1.0, [2]).ttft == ()


def test_a_call_comes_back_from_json_as_it_was() -> None:
    times = call_times(ENTRIES, 5.5, [3])
    stored = json.loads(json.dumps({"round": 0, "index": 3, **times.to_json()}))
    assert call_from_json(stored) == times


def test_a_failed_call_keeps_its_reason() -> None:
    failed = CallTimes(1.0, 1, 0, (), (), error="an answer without a single token")
    assert call_from_json(failed.to_json()).error == "an answer without a single token"
