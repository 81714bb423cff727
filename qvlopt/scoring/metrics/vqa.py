"""VQA accuracy: the official rule of VQAv2, TextVQA's, the variant that always normalises, and exact match for fewer golds.

Sources: vqaEval.py of GT-Vision-Lab/VQA and the EvalAIAnswerProcessor of facebookresearch/mmf; their quirks are kept where
a function says "official". Word lists are theirs (vqa_tables.json, with its notice).
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Sequence
from importlib import resources
from typing import NamedTuple

from qvlopt.scoring.text import normalised

HUMANS = 10
"""The accuracies are defined for exactly this many human answers."""

FULL_MARKS = 3
"""An answer that this many other humans gave is right."""

MOST_PERIODS = 32
"""The official code passes the flag re.UNICODE, whose value is 32, where the count of replacements belongs."""


class _Tables(NamedTuple):
    contractions: dict[str, str]
    number_words: dict[str, str]
    articles: frozenset[str]
    punctuation: tuple[str, ...]


def vqa_exact(prediction: str, golds: Sequence[str]) -> float:
    """1.0 when the answer equals one of the golds after NFC and VQA normalisation of both, else 0.0.

    Silence and text never match, though `A` or `the` would normalise to nothing.
    """
    answer = normalised(prediction)
    return float(any(_are_equal(answer, normalised(gold)) for gold in golds))


def vqa_accuracy(prediction: str, golds: Sequence[str]) -> float:
    """VQA accuracy that normalises both sides always, after NFC. In [0, 1]; ValueError unless there are ten golds."""
    clean = [normalise_answer(normalised(gold)) for gold in golds]
    return _leave_one_out(normalise_answer(normalised(prediction)), clean)


def vqa_accuracy_official(prediction: str, golds: Sequence[str]) -> float:
    """VQAv2 to the letter: nothing is normalised where all ten humans agree, so `Yes` is wrong for ten times `yes`."""
    answer, clean = _one_line(prediction), [_one_line(gold) for gold in golds]
    if len(set(clean)) > 1:
        answer, clean = normalise_answer(answer), [normalise_answer(gold) for gold in clean]
    return _leave_one_out(answer, clean)


def vqa_accuracy_textvqa(prediction: str, golds: Sequence[str]) -> float:
    """TextVQA's accuracy to the letter: always normalised, commas and question marks go first, `'s` is a word."""
    return _leave_one_out(normalise_textvqa(prediction), [normalise_textvqa(gold) for gold in golds])


def normalise_answer(text: str) -> str:
    """VQAv2's processPunctuation and processDigitArticle on one line of text."""
    return _plain_words(strip_punctuation(_one_line(text)))


def normalise_textvqa(text: str) -> str:
    """MMF's EvalAIAnswerProcessor."""
    lowered = text.lower().replace(",", "").replace("?", "").replace("'s", " 's").strip()
    return _plain_words(strip_punctuation(_one_line(lowered)))


def strip_punctuation(text: str) -> str:
    """Deletes or spaces out punctuation, by what stands around it anywhere in the text; periods go unless a digit follows."""
    has_grouped_digits = re.search(r"\d,\d", text) is not None
    result = text
    for mark in _tables().punctuation:
        touches_space = f"{mark} " in text or f" {mark}" in text
        result = result.replace(mark, "" if touches_space or has_grouped_digits else " ")
    return re.sub(r"\.(?!\d)", "", result, count=MOST_PERIODS)


def _are_equal(answer: str, gold: str) -> bool:
    return bool(answer) == bool(gold) and normalise_answer(answer) == normalise_answer(gold)


def _one_line(text: str) -> str:
    return text.replace("\n", " ").replace("\t", " ").strip()


def _plain_words(text: str) -> str:
    """Lower case, number words as digits, no articles, contractions with their apostrophe, single spaces."""
    tables = _tables()
    numbered = [tables.number_words.get(word, word) for word in text.lower().split()]
    return " ".join(tables.contractions.get(word, word) for word in numbered if word not in tables.articles)


def _leave_one_out(answer: str, golds: Sequence[str]) -> float:
    """Mean over the ten humans of min(1, matches among the other nine / 3); left out by index, not by text."""
    if len(golds) != HUMANS:
        raise ValueError(f"VQA accuracy needs {HUMANS} human answers, got {len(golds)}; use vqa_exact")
    total = sum(gold == answer for gold in golds)
    agreeing, others = min(1.0, (total - 1) / FULL_MARKS), min(1.0, total / FULL_MARKS)
    return (total * agreeing + (HUMANS - total) * others) / HUMANS


@functools.cache
def _tables() -> _Tables:
    text = resources.files("qvlopt.scoring.metrics").joinpath("vqa_tables.json").read_text(encoding="utf-8")
    data = json.loads(text)
    return _Tables(data["contractions"], data["number_words"], frozenset(data["articles"]), tuple(data["punctuation"]))
