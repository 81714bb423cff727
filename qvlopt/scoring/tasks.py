"""Which metrics a task is scored by: one that decides, the others for information."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from qvlopt.data.samples import Sample
from qvlopt.errors import UsageError
from qvlopt.scoring.metrics.anls import anls
from qvlopt.scoring.metrics.cer import EditCounts, character_edits, word_edits
from qvlopt.scoring.metrics.exact import exact_match
from qvlopt.scoring.metrics.vqa import HUMANS, vqa_accuracy, vqa_accuracy_official, vqa_accuracy_textvqa, vqa_exact


class Part(NamedTuple):
    """One item's share of a corpus value, which is the sum of `amount` over the sum of `of`."""

    amount: float
    of: float

    @property
    def value(self) -> float | None:
        """The item's own value; None where it has none (an error rate without reference text)."""
        return self.amount / self.of if self.of else None


@dataclass(frozen=True)
class Metric:
    """`measure(prediction, golds)` gives an item's part. `is_binary`: every item scores 0 or 1."""

    name: str
    measure: Callable[[str, Sequence[str]], Part]
    is_binary: bool = False
    is_error_rate: bool = False

    def failed(self, golds: Sequence[str]) -> Part:
        """What an item is worth that the engine gave no answer to: nothing, or every character of it missing."""
        return self.measure("", golds) if self.is_error_rate else Part(0.0, 1.0)


@dataclass(frozen=True)
class TaskMetrics:
    """The metric that the gate looks at, those that inform, and how long an answer may be."""

    primary: Metric
    others: tuple[Metric, ...]
    max_new_tokens: int

    @property
    def all(self) -> tuple[Metric, ...]:
        return (self.primary, *self.others)


def corpus_value(parts: Iterable[Part]) -> float | None:
    """The value over several items; None of none."""
    amount = of = 0.0
    for part in parts:
        amount, of = amount + part.amount, of + part.of
    return amount / of if of else None


def task_metrics(task: str, samples: Sequence[Sample]) -> TaskMetrics:
    """The metrics for these samples of one task: VQA accuracy needs ten answers to every question.

    Raises UsageError for a task of a later version.
    """
    if task not in TASKS:
        raise UsageError(f"task {task}: not scored in this version", hint=f"use {', '.join(TASKS)}")
    if task == "vqa" and all(len(sample.answers) == HUMANS for sample in samples):
        return TEN_ANSWERS
    return TASKS[task]


def _score(function: Callable[[str, Sequence[str]], float]) -> Callable[[str, Sequence[str]], Part]:
    return lambda prediction, golds: Part(function(prediction, golds), 1.0)


def _edits(function: Callable[[str, Sequence[str]], EditCounts]) -> Callable[[str, Sequence[str]], Part]:
    return lambda prediction, golds: Part(*map(float, function(prediction, golds)))


EXACT = Metric("exact_match", _score(exact_match), is_binary=True)
ANLS = Metric("anls", _score(anls))
CER = Metric("cer", _edits(character_edits), is_error_rate=True)
WER = Metric("wer", _edits(word_edits), is_error_rate=True)
VQA_EXACT = Metric("vqa_exact", _score(vqa_exact), is_binary=True)

TASKS = {
    "ocr": TaskMetrics(EXACT, (CER, WER, ANLS), max_new_tokens=128),
    "vqa": TaskMetrics(VQA_EXACT, (), max_new_tokens=32),
    "doc": TaskMetrics(ANLS, (EXACT,), max_new_tokens=64),
}
TEN_ANSWERS = TaskMetrics(
    Metric("vqa_accuracy", _score(vqa_accuracy)),
    (Metric("vqa_accuracy_official", _score(vqa_accuracy_official)), Metric("vqa_accuracy_textvqa", _score(vqa_accuracy_textvqa)), VQA_EXACT),
    max_new_tokens=32,
)
