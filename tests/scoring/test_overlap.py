"""BLEU and chrF pooled from items are sacrebleu's corpus values."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sacrebleu.metrics import BLEU, CHRF

from qvlopt.scoring.metrics.overlap import Overlap, bleu, chrf, corpus_bleu, corpus_chrf
from qvlopt.scoring.text import normalised

words = st.text("ab c", max_size=30).map(normalised).filter(bool)
pairs = st.lists(st.tuples(words, words, words), min_size=1, max_size=6)

Measure = Callable[[str, Sequence[str]], Overlap]


def summed(measure: Measure, rows: Sequence[tuple[str, str, str]]) -> list[float]:
    return [sum(column) for column in zip(*(measure(said, [first, second]).counts for said, first, second in rows), strict=True)]


@given(pairs)
def test_pooled_counts_give_sacrebleus_corpus_values(rows: list[tuple[str, str, str]]) -> None:
    said, *golds = (list(column) for column in zip(*rows, strict=True))
    assert 100 * (corpus_bleu(summed(bleu, rows)) or 0.0) == pytest.approx(BLEU().corpus_score(said, golds).score)
    assert 100 * (corpus_chrf(summed(chrf, rows)) or 0.0) == pytest.approx(CHRF().corpus_score(said, golds).score)


@given(words)
def test_a_gold_given_back_is_perfect(text: str) -> None:
    assert chrf(text, [text]).value == pytest.approx(1.0)
    assert bleu(text, [text]).value == pytest.approx(1.0)


@pytest.mark.parametrize("measure", [bleu, chrf])
@pytest.mark.parametrize(("said", "golds", "value"), [("", [""], 1.0), ("x", [""], 0.0), ("", ["x"], 0.0), ("", ["x", ""], 1.0)])
def test_only_silence_is_right_where_the_reference_is_empty(measure: Measure, said: str, golds: list[str], value: float) -> None:
    assert measure(said, golds).value == value


def test_nothing_has_no_corpus_value() -> None:
    assert corpus_bleu([]) is None
    assert corpus_chrf([]) is None
