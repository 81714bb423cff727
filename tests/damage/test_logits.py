"""Distances of next-token distributions against values worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch

from qvlopt.damage.logits import agreement, first_divergence, kl_divergence


def logits(*probabilities: float) -> torch.Tensor:
    return torch.tensor([probabilities]).log()


def test_the_published_value_and_its_reverse() -> None:
    p, q = logits(0.5, 0.5), logits(0.9, 0.1)
    assert kl_divergence(p, q).item() == pytest.approx(0.510826, abs=1e-6)
    assert kl_divergence(q, p).item() == pytest.approx(0.368064, abs=1e-6)


def test_equal_logits_are_at_no_distance_at_all() -> None:
    x = torch.randn(5, 1000, generator=torch.Generator().manual_seed(0)) * 30
    assert kl_divergence(x, x.clone()).tolist() == [0.0] * 5
    assert kl_divergence(x, x + 7).tolist() == pytest.approx([0.0] * 5, abs=1e-10)  # a shift of all logits is the same distribution


def test_the_distance_grows_with_the_noise() -> None:
    source = torch.Generator().manual_seed(0)
    x, noise = torch.randn(20, 500, generator=source), torch.randn(20, 500, generator=source)
    means = [float(kl_divergence(x, x + share * noise).mean()) for share in (0.01, 0.1, 0.5, 1.0)]
    assert means == sorted(means)
    assert means[0] > 0


def test_logits_that_are_not_finite_are_infinitely_far() -> None:
    assert kl_divergence(logits(0.5, 0.5), torch.tensor([[math.nan, 0.0]])).item() == math.inf


def test_unlike_vocabularies_are_not_compared() -> None:
    with pytest.raises(ValueError, match="one shape"):
        kl_divergence(logits(0.5, 0.5), logits(0.2, 0.3, 0.5))


def test_agreement_is_of_the_best_token() -> None:
    base, candidate = torch.tensor([[1.0, 2.0], [3.0, 0.0]]), torch.tensor([[0.0, 0.1], [0.0, 0.1]])
    assert agreement(base, candidate).tolist() == [True, False]


@pytest.mark.parametrize(
    ("base", "candidate", "index"),
    [((1, 2, 3, 4), (1, 2, 9, 4), 2), ((1, 2, 3), (9, 1, 2, 3), 0), ((1, 2), (1, 2, 3), 2), ((1, 2), (1, 2), None), ((), (), None)],
)
def test_where_two_answers_part(base: tuple[int, ...], candidate: tuple[int, ...], index: int | None) -> None:
    assert first_divergence(base, candidate) == index
