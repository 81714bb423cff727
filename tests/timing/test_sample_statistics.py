"""Statistics are properties of the raw values, equal to numpy's, and absent where there is too little."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qvlopt.timing.samples import FEWEST_FOR_P99, Samples, joined

VALUES = st.lists(st.floats(1e-6, 1e3), min_size=2, max_size=40)


@given(VALUES)
def test_statistics_are_numpys(values: list[float]) -> None:
    samples = Samples(tuple(values))
    assert samples.median == pytest.approx(np.median(values))
    assert samples.p90 == pytest.approx(np.percentile(values, 90))
    assert samples.mean == pytest.approx(np.mean(values))
    assert samples.sd == pytest.approx(np.std(values, ddof=1), abs=1e-9)
    assert samples.minimum == min(values)


def test_nothing_is_said_without_values() -> None:
    empty = Samples(())
    assert [empty.median, empty.p90, empty.p99, empty.mean, empty.sd, empty.cv, empty.minimum] == [None] * 7
    assert (empty.n, empty.outliers) == (0, 0)


def test_one_value_has_no_spread() -> None:
    assert (Samples((2.0,)).median, Samples((2.0,)).sd, Samples((2.0,)).cv) == (2.0, None, None)


def test_a_99th_percentile_needs_a_hundred_values() -> None:
    assert Samples(tuple(map(float, range(FEWEST_FOR_P99 - 1)))).p99 is None
    assert Samples(tuple(map(float, range(FEWEST_FOR_P99)))).p99 == pytest.approx(np.percentile(range(FEWEST_FOR_P99), 99))


def test_a_value_far_from_the_others_is_counted_and_kept() -> None:
    samples = Samples((1.0, 1.1, 0.9, 1.05, 0.95, 30.0))
    assert samples.outliers == 1
    assert samples.n == 6
    assert samples.median == pytest.approx(1.025)


def test_equal_values_have_no_outliers() -> None:
    assert Samples((1.0,) * 9).outliers == 0


def test_json_has_the_contracts_statistics() -> None:
    assert {"median", "p90", "n", "unit"} <= set(Samples((1.0, 2.0)).to_json())


def test_joining_keeps_order_and_unit() -> None:
    assert joined([(1.0, 2.0), (), (3.0,)], "bytes") == Samples((1.0, 2.0, 3.0), "bytes")
