"""Character and word error rates, as counts, so that a corpus rate is the sum of edits over the sum of lengths.

A reference of no characters has no rate: its insertions count in the corpus, and a corpus without any reference
characters has no rate either. So text that was invented never counts as perfect.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from rapidfuzz.distance import Levenshtein

from qvlopt.scoring.text import normalised


class EditCounts(NamedTuple):
    """Substitutions, deletions and insertions together, and the length of the reference, in characters or words."""

    edits: int
    length: int


def character_edits(prediction: str, golds: Sequence[str]) -> EditCounts:
    """Edits from the nearest reference after `text.normalised`, in Unicode code points; white space inside counts."""
    return _nearest(list(normalised(prediction)), [list(normalised(gold)) for gold in golds])


def word_edits(prediction: str, golds: Sequence[str]) -> EditCounts:
    """Edits in words, split at single spaces after collapsing runs of white space, as jiwer's default does."""
    return _nearest(_words(prediction), [_words(gold) for gold in golds])


def error_rate(counts: Iterable[EditCounts]) -> float | None:
    """Edits over length, of one item or a corpus alike: 0.0 is perfect, above 1 is possible, None without reference text."""
    edits = length = 0
    for count in counts:
        edits, length = edits + count.edits, length + count.length
    return edits / length if length else None


def _words(text: str) -> list[str]:
    return [word for word in re.sub(r"\s\s+", " ", normalised(text)).split(" ") if word]


def _nearest(prediction: list[str], golds: list[list[str]]) -> EditCounts:
    """The reference with the lowest rate; an empty one only wins by being right."""
    counts = [EditCounts(Levenshtein.distance(gold, prediction), len(gold)) for gold in golds]
    return min(counts, key=lambda count: count.edits / count.length if count.length else float(count.edits))
