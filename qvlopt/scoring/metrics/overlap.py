"""BLEU and chrF by sacrebleu, with what one item adds to a corpus, so that corpus values can be pooled from items.

Papineni et al., "BLEU" (2002); Popovic, "chrF" (2015); Post, "A Call for Clarity in Reporting BLEU Scores" (2018).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

from qvlopt.scoring.text import normalised

BLEU_SIGNATURE = "tok:13a|smooth:exp|case:mixed, items eff:yes, corpus eff:no"
CHRF_SIGNATURE = "chrF2, nc:6|nw:0|space:no|eff:yes|case:mixed"


class Overlap(NamedTuple):
    """`value` of one item in [0, 1]; `counts` add up over items to what the corpus value is made of."""

    value: float
    counts: tuple[float, ...]


def bleu(prediction: str, golds: Sequence[str]) -> Overlap:
    """Sentence BLEU with effective order after `text.normalised`; counts: matches and totals of orders 1 to 4, both lengths."""
    answer, right = normalised(prediction), [normalised(gold) for gold in golds]
    score = _bleu().sentence_score(answer, right)
    counts = (*score.counts, *score.totals, score.sys_len, score.ref_len)
    return Overlap(_value(score.score, answer, right), tuple(map(float, counts)))


def corpus_bleu(counts: Sequence[float]) -> float | None:
    """BLEU in [0, 1] of the summed counts of `bleu`, without effective order, as sacrebleu's corpus_score; None of nothing."""
    if not counts:
        return None
    matches, totals, (said, expected) = counts[:4], counts[4:8], counts[8:]
    whole = [[int(count) for count in group] for group in (matches, totals)]
    score = type(_bleu()).compute_bleu(*whole, sys_len=int(said), ref_len=int(expected), smooth_method="exp")
    return float(score.score) / 100


def chrf(prediction: str, golds: Sequence[str]) -> Overlap:
    """Sentence chrF2 after `text.normalised`; counts: n-grams of the answer, of the nearest gold and in both, orders 1 to 6."""
    answer, right = normalised(prediction), [normalised(gold) for gold in golds]
    metric = _chrf()
    # sacrebleu's own resampling pools this way; the tests compare the sums with corpus_score
    counts = metric._extract_corpus_statistics([answer], [[gold] for gold in right])[0]
    return Overlap(_value(metric._compute_score_from_stats(counts).score, answer, right), tuple(map(float, counts)))


def corpus_chrf(counts: Sequence[float]) -> float | None:
    """chrF2 in [0, 1] of the summed counts of `chrf`, as sacrebleu's corpus_score; None of nothing."""
    return float(_chrf()._compute_score_from_stats([int(count) for count in counts]).score) / 100 if counts else None


def _value(score: float, answer: str, right: Sequence[str]) -> float:
    """Where a right text is empty there is nothing to overlap with: only an empty answer is right."""
    if not answer or "" in right:
        return float(answer in right)
    return min(1.0, score / 100)  # rounding makes 100.00000000000004 of a perfect one


@functools.cache
def _bleu() -> Any:
    from sacrebleu.metrics import BLEU

    return BLEU(effective_order=True)


@functools.cache
def _chrf() -> Any:
    from sacrebleu.metrics import CHRF

    return CHRF()
