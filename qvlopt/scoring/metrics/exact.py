"""Exact match of the whole answer."""

from __future__ import annotations

from collections.abc import Sequence

from qvlopt.scoring.text import normalised


def exact_match(prediction: str, golds: Sequence[str]) -> float:
    """1.0 when the answer equals one of the right ones after `text.normalised`, else 0.0. Case and inner spaces count."""
    answer = normalised(prediction)
    return float(any(answer == normalised(gold) for gold in golds))
