"""Beginnings of prompts: what tells them apart, where prompts are cut, and which one is taken."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from qvlopt.runtime.prompt_cache import CHUNK, Prefix, PromptCache, picture_spans, plan_chunks, prefixes

PICTURE = 9
IDS = (1, 2, PICTURE, PICTURE, 3, PICTURE, PICTURE, PICTURE, 4, 5)
SPANS = [(2, 4), (5, 8)]


@given(st.integers(0, 2000), st.integers(0, 3000), st.lists(st.integers(0, 5000), max_size=5), st.integers(1, 700))
def test_chunks_cover_every_token_once_and_never_cross_a_cut(start: int, length: int, cuts: list[int], size: int) -> None:
    end = start + length
    chunks = plan_chunks(start, end, cuts, size)
    assert [token for begin, stop in chunks for token in range(begin, stop)] == list(range(start, end))
    assert all(0 < stop - begin <= size for begin, stop in chunks)
    assert not [cut for cut in cuts for begin, stop in chunks if begin < cut < stop]


@given(st.integers(1, 3000), st.lists(st.integers(1, 2999), min_size=1, max_size=4), st.data())
def test_going_on_from_a_cut_is_the_rest_of_the_whole_plan(end: int, cuts: list[int], data: st.DataObject) -> None:
    """This is what makes a warm answer equal to a cold one to the bit: the same runs."""
    begin = data.draw(st.sampled_from([cut for cut in cuts if cut < end] or [0]))
    whole = plan_chunks(0, end, cuts)
    assert plan_chunks(begin, end, cuts) == [chunk for chunk in whole if chunk[0] >= begin]


def test_a_run_is_512_tokens() -> None:
    assert plan_chunks(0, 1100, [301]) == [(0, 301), (301, 301 + CHUNK), (301 + CHUNK, 1100)]


def test_pictures_stand_where_their_tokens_are_even_side_by_side() -> None:
    assert picture_spans(IDS, PICTURE, [2, 3]) == SPANS
    assert picture_spans((PICTURE,) * 5, PICTURE, [2, 3]) == [(0, 2), (2, 5)]
    assert picture_spans((1, 2), PICTURE, []) == []


def test_beginnings_end_with_a_picture() -> None:
    assert [(prefix.length, prefix.pictures) for prefix in prefixes(IDS, SPANS, ["a", "b"], "m")] == [(4, 1), (8, 2)]


def test_a_key_is_the_model_the_tokens_and_the_pictures() -> None:
    first, both = prefixes(IDS, SPANS, ["a", "b"], "m")
    same = prefixes((*IDS[:8], 77, 78, 79), SPANS, ["a", "b"], "m")
    assert [first.key, both.key] == [prefix.key for prefix in same]
    others = [
        prefixes(IDS, SPANS, ["a", "b"], "other model"),
        prefixes(IDS, SPANS, ["c", "b"], "m"),
        prefixes((8, *IDS[1:]), SPANS, ["a", "b"], "m"),
    ]
    keys = [prefix.key for found in others for prefix in found] + [first.key, both.key]
    assert len(set(keys)) == len(keys)
    later = prefixes(IDS, SPANS, ["a", "c"], "m")
    assert later[0].key == first.key
    assert later[1].key != both.key


def test_the_longest_known_beginning_is_taken_and_is_then_the_newest() -> None:
    cache = PromptCache(100)
    first, both = prefixes(IDS, SPANS, ["a", "b"], "m")
    assert cache.longest([first, both]) is None
    cache.put(first, np.zeros(10, np.float32))
    assert cache.longest([first, both]) == (first, cache.memory.get(first.key))
    cache.put(both, np.ones(10, np.float32))
    found = cache.longest([first, both])
    assert found is not None
    assert found[0] == both
    cache.longest([first])
    cache.put(Prefix(1, 1, "third"), np.zeros(10, np.float32))  # 120 bytes: the oldest goes
    assert first.key in cache.memory
    assert both.key not in cache.memory
    assert not cache.would_keep(101)
