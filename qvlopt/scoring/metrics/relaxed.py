"""Relaxed accuracy of ChartQA: numbers may be off by 5 %, everything else must be equal.

Methani et al., "PlotQA" (2020); the rule is that of google-research/pix2struct (metrics.py), which Qwen-VL, lmms-eval and
VLMEvalKit took over word for word.
"""

from __future__ import annotations

from collections.abc import Sequence

from qvlopt.scoring.text import normalised

TOLERANCE = 0.05
"""Largest relative error of a number that still counts as right."""


def relaxed_accuracy(prediction: str, golds: Sequence[str]) -> float:
    """The official rule on texts after `text.normalised`, as VLMEvalKit strips too. 1.0 or 0.0, the best of the golds."""
    return relaxed_accuracy_official(normalised(prediction), [normalised(gold) for gold in golds])


def relaxed_accuracy_official(prediction: str, golds: Sequence[str]) -> float:
    """To the letter: a gold of zero is compared as text, commas and currencies are no numbers, nothing is stripped."""
    return float(any(_matches(prediction, gold) for gold in golds))


def _matches(prediction: str, gold: str) -> bool:
    said, expected = _number(prediction), _number(gold)
    if said is not None and expected:
        return abs(said - expected) / abs(expected) <= TOLERANCE
    return prediction.lower() == gold.lower()


def _number(text: str) -> float | None:
    """As Python reads it, with a trailing per cent sign for hundredths; None where it is no number."""
    try:
        return float(text.rstrip("%")) / 100 if text.endswith("%") else float(text)
    except ValueError:
        return None
