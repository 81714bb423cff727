"""Tokens are drawn evenly over pictures, by seed, and never more than asked."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qvlopt.model.token_draw import drawn_tokens, even_shares, is_held_out


@given(tokens=st.lists(st.integers(1, 500), max_size=30), most=st.integers(1, 3000))
def test_shares_are_as_even_as_the_pictures_allow(tokens: list[int], most: int) -> None:
    shares = even_shares(tokens, most)
    assert sum(shares) == min(most, sum(tokens))
    assert all(0 <= share <= count for share, count in zip(shares, tokens, strict=True))
    cut = [share for share, count in zip(shares, tokens, strict=True) if share < count]
    if cut:
        assert max(cut) - min(cut) <= 1
        whole = [share for share, count in zip(shares, tokens, strict=True) if share == count]
        assert max(whole, default=0) <= max(cut) + 1


def test_a_small_picture_gives_all_it_has_and_the_rest_goes_to_the_others() -> None:
    assert even_shares([10, 1000, 1000], 210) == [10, 100, 100]
    assert even_shares([1000, 10, 1000], 211) == [101, 10, 100]


@given(tokens=st.integers(1, 300), share=st.integers(0, 400), seed=st.integers(0, 99), picture=st.integers(0, 99))
def test_places_are_different_tokens_in_order(tokens: int, share: int, seed: int, picture: int) -> None:
    places = drawn_tokens(tokens, share, seed=seed, picture=picture)
    if share >= tokens:
        assert places is None
        return
    assert places is not None
    assert len(places) == share
    assert bool((places.diff() > 0).all())
    assert share == 0 or 0 <= int(places[0]) <= int(places[-1]) < tokens
    again = drawn_tokens(tokens, share, seed=seed, picture=picture)
    assert again is not None
    assert torch.equal(again, places)


def test_the_draw_depends_on_seed_and_picture_and_is_fair() -> None:
    one, other, third = (drawn_tokens(100, 50, seed=s, picture=p) for s, p in ((0, 0), (1, 0), (0, 1)))
    assert one is not None
    assert other is not None
    assert third is not None
    assert not torch.equal(one, other)
    assert not torch.equal(one, third)
    counts = torch.zeros(40)
    for picture in range(500):
        places = drawn_tokens(40, 10, seed=0, picture=picture)
        assert places is not None
        counts[places] += 1
    assert float(counts.min()) > 125 - 5 * 97**0.5  # 500 draws of probability 1/4: five standard deviations
    assert float(counts.max()) < 125 + 5 * 97**0.5


@pytest.mark.parametrize("count", [4, 40])
def test_a_quarter_of_the_pictures_is_held_out(count: int) -> None:
    assert sum(map(is_held_out, range(count))) == count // 4
