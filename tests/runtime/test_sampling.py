"""The best token, or one drawn by its chance; transformers' warpers are the oracle."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from qvlopt.errors import UsageError
from qvlopt.runtime.sampling import Sampling, best, draw


@given(st.integers(0, 10**6), st.floats(0.1, 3), st.none() | st.integers(1, 30), st.floats(0.05, 1))
def test_chances_are_those_of_transformers(seed: int, temperature: float, top_k: int | None, top_p: float) -> None:
    logits = np.random.default_rng(seed).normal(size=20).astype(np.float32)
    scores = torch.from_numpy(logits.astype(np.float64))[None]
    ids = torch.zeros((1, 1), dtype=torch.int64)
    scores = TemperatureLogitsWarper(temperature)(ids, scores)
    scores = TopKLogitsWarper(top_k)(ids, scores) if top_k else scores
    scores = TopPLogitsWarper(top_p)(ids, scores) if top_p < 1 else scores
    expected = scores.softmax(-1)[0].numpy()
    got = Sampling(temperature, top_k, top_p).probabilities(logits)
    assert np.allclose(got, expected, atol=1e-12)


def test_draws_follow_the_chances_and_the_seed() -> None:
    logits = np.log(np.array([0.5, 0.3, 0.2], np.float32))
    sampling = Sampling(seed=3)
    drawn = [draw(logits, sampling, sampling.generator(str(number)))[0] for number in range(2000)]
    assert np.allclose(np.bincount(drawn) / 2000, [0.5, 0.3, 0.2], atol=0.04)
    assert drawn == [draw(logits, sampling, sampling.generator(str(number)))[0] for number in range(2000)]
    other = Sampling(seed=4)
    assert drawn != [draw(logits, other, other.generator(str(number)))[0] for number in range(2000)]


def test_the_best_is_the_first_of_equals_and_shows_what_is_not_finite() -> None:
    assert best(np.array([1, 3, 3], np.float32)) == (1, 3)
    assert np.isnan(best(np.array([1, np.nan, 3], np.float32))[1])
    assert best(np.array([1, np.inf], np.float32)) == (1, np.inf)
    random = Sampling().generator("x")
    assert np.isnan(draw(np.array([1, np.nan, 3], np.float32), Sampling(), random)[1])


@pytest.mark.parametrize("values", [{"temperature": 0.0}, {"temperature": float("nan")}, {"top_k": 0}, {"top_p": 0.0}, {"top_p": 1.1}])
def test_values_that_leave_nothing_to_draw_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(values))):
        Sampling(**values)
