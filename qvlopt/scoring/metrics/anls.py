"""ANLS: average normalised Levenshtein similarity of DocVQA and InfographicVQA, zero below 0.5.

Biten et al., "Scene Text Visual Question Answering" (2019); the rule is that of the RRC's official script.
"""

from __future__ import annotations

from collections.abc import Sequence

from rapidfuzz.distance import Levenshtein

from qvlopt.scoring.text import normalised

THRESHOLD = 0.5
"""A similarity below this counts as wrong; exactly this much is kept."""


def anls(prediction: str, golds: Sequence[str]) -> float:
    """The official rule on texts after `text.normalised`, so that an answer of spaces earns nothing. In [0, 1]."""
    return anls_official(normalised(prediction), [normalised(gold) for gold in golds])


def anls_official(prediction: str, golds: Sequence[str]) -> float:
    """The RRC's rule to the letter: lower case, white space collapsed, but divided by the length of the raw texts."""
    best = max((_similarity(prediction, gold) for gold in golds), default=0.0)
    return best if best >= THRESHOLD else 0.0


def _similarity(prediction: str, gold: str) -> float:
    longest = max(len(gold), len(prediction))
    if longest == 0:
        return 1.0
    edits = Levenshtein.distance(" ".join(gold.strip().lower().split()), " ".join(prediction.strip().lower().split()))
    return 1 - edits / longest
