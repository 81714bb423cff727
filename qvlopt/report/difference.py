"""Where two texts differ, in pieces that a page can colour: words first, then letters inside words that are alike."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from difflib import SequenceMatcher
from typing import Literal, NamedTuple

Side = Literal["both", "first", "second"]

WORDS = re.compile(r"\s+|[^\W_]+|[\W_]", re.UNICODE)
"""White space, runs of letters and digits, single signs: joined they are the text again."""

ALIKE = 0.5
"""Share of equal letters from which two stretches are compared letter by letter; below it they are shown whole."""

MOST_LETTERS = 140
"""Longer stretches are not compared letter by letter."""

MOST_PAIRS = 20_000
"""Words of one text times words of the other, ends that are equal apart, up to which they are compared: texts of a model
that repeats itself take longer than the square."""


class Piece(NamedTuple):
    """A stretch of text that both texts have, or only the first, or only the second."""

    side: Side
    text: str


def difference(first: str, second: str) -> list[Piece]:
    """Pieces in reading order. Those of `both` and `first` joined are `first`, those of `both` and `second` are `second`."""
    pieces: list[Piece] = []
    for old, new in _stretches(WORDS.findall(first), WORDS.findall(second)):
        if old == new:
            pieces.append(Piece("both", "".join(old)))
        else:
            pieces += _letters("".join(old), "".join(new))
    return [piece for piece in _joined(pieces) if piece.text]


def _letters(old: str, new: str) -> list[Piece]:
    whole = [Piece("first", old), Piece("second", new)]
    if not old or not new or max(len(old), len(new)) > MOST_LETTERS:
        return whole
    if SequenceMatcher(None, old, new, autojunk=False).ratio() < ALIKE:
        return whole
    pieces: list[Piece] = []
    for before, after in _stretches(old, new):
        if before == after:
            pieces.append(Piece("both", "".join(before)))
        else:
            pieces += [Piece("first", "".join(before)), Piece("second", "".join(after))]
    return pieces


def _stretches(old: Sequence[str], new: Sequence[str]) -> Iterator[tuple[Sequence[str], Sequence[str]]]:
    """Stretches of both that belong together; equal ones are the same. Equal ends are taken off first."""
    head = 0
    while head < min(len(old), len(new)) and old[head] == new[head]:
        head += 1
    tail = 0
    while tail < min(len(old), len(new)) - head and old[-1 - tail] == new[-1 - tail]:
        tail += 1
    before, after = old[head : len(old) - tail], new[head : len(new) - tail]
    yield old[:head], new[:head]
    if len(before) * len(after) > MOST_PAIRS:
        yield before, after
    else:
        for _, i, j, k, m in SequenceMatcher(None, before, after, autojunk=False).get_opcodes():
            yield before[i:j], after[k:m]
    yield old[len(old) - tail :], new[len(new) - tail :]


def _joined(pieces: Sequence[Piece]) -> list[Piece]:
    """Neighbours of one side become one piece; of a run of changes what the first text has goes first."""
    joined: list[Piece] = []
    held: dict[Side, str] = {"both": "", "first": "", "second": ""}
    for side, text in [*(piece for piece in pieces if piece.text), Piece("both", "")]:
        if side == "both" and (held["first"] or held["second"]):
            joined += [Piece("both", held["both"]), Piece("first", held["first"]), Piece("second", held["second"])]
            held = {"both": "", "first": "", "second": ""}
        held[side] += text
    return [*joined, Piece("both", held["both"])]
