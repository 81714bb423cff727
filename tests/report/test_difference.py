"""Pieces of a difference put both texts together again, and show the smallest change that makes sense."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from qvlopt.report.difference import Piece, difference

TEXTS = st.text(alphabet="ab 1,\n扫é", max_size=40)


@given(TEXTS, TEXTS)
def test_the_pieces_are_both_texts(first: str, second: str) -> None:
    pieces = difference(first, second)
    assert "".join(text for side, text in pieces if side != "second") == first
    assert "".join(text for side, text in pieces if side != "first") == second
    assert all(text for _, text in pieces)
    assert all(one.side != two.side for one, two in itertools.pairwise(pieces))


def test_equal_texts_have_one_piece() -> None:
    assert difference("A 17", "A 17") == [Piece("both", "A 17")]
    assert difference("", "") == []


def test_a_letter_that_was_misread_is_marked_alone() -> None:
    assert difference("departs 17:30", "departs 11:30") == [
        Piece("both", "departs 1"),
        Piece("first", "7"),
        Piece("second", "1"),
        Piece("both", ":30"),
    ]


def test_words_that_have_nothing_in_common_are_marked_whole() -> None:
    assert difference("a red car", "a bus") == [Piece("both", "a "), Piece("first", "red car"), Piece("second", "bus")]


def test_long_texts_are_compared_by_words() -> None:
    long = "word " * 400
    pieces = difference(long + "cat", long + "dog")
    assert pieces[-2:] == [Piece("first", "cat"), Piece("second", "dog")]


def test_texts_that_repeat_themselves_are_shown_whole_between_their_equal_ends() -> None:
    old, new = "start " + "the and " * 300 + "end", "start " + "and the the " * 200 + "end"
    pieces = difference(old, new)
    assert [side for side, _ in pieces] == ["both", "first", "second", "both"]
    assert pieces[0].text == "start "
    assert pieces[-1].text.endswith("end")
