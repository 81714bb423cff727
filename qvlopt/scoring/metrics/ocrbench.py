"""OCRBench v1: an answer is right when it contains one of the right texts.

Liu et al., "OCRBench: On the Hidden Mystery of OCR in Large Multimodal Models" (2024), example.py of
Yuliang-Liu/MultimodalOCR. It is a generous rule: `1` is found in `21`.
"""

from __future__ import annotations

from collections.abc import Sequence

from qvlopt.scoring.text import normalised

FORMULA_SETS = frozenset({"HME100k", "Handwritten Mathematical Expression Recognition"})
"""The source whose items are formulas, and its category's name in VLMEvalKit's file: case counts there, spaces do not."""

FULL = 1000
"""Items of the whole benchmark; its headline figure is the number of right ones, which no subset may claim."""


def ocrbench(prediction: str, golds: Sequence[str], *, dataset: str | None = None) -> float:
    """The official rule after NFC on both sides; where the right text is empty, only an empty answer is right. 1.0 or 0.0."""
    answer, right = normalised(prediction), [normalised(gold) for gold in golds]
    if not answer or "" in right:
        return float(answer in right)
    return ocrbench_official(answer, right, dataset=dataset)


def ocrbench_official(prediction: str, golds: Sequence[str], *, dataset: str | None = None) -> float:
    """To the letter: an empty right text is contained in every answer. `dataset` is the item's source, such as HME100k."""
    plain = _formula if dataset in FORMULA_SETS else _words
    answer = plain(prediction)
    return float(any(plain(gold) in answer for gold in golds))


def _words(text: str) -> str:
    return text.lower().strip().replace("\n", " ")


def _formula(text: str) -> str:
    return text.strip().replace("\n", " ").replace(" ", "")
