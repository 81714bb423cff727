"""Which metrics a task is scored by: one that decides, the others for information."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from qvlopt.data.samples import Sample
from qvlopt.errors import ItemError, RunError, UsageError
from qvlopt.scoring.metrics.anls import anls, anls_official
from qvlopt.scoring.metrics.cer import EditCounts, character_edits, word_edits
from qvlopt.scoring.metrics.choice import choice_accuracy, is_readable
from qvlopt.scoring.metrics.exact import exact_match
from qvlopt.scoring.metrics.grounding import Size, point_in_box, point_in_box_screenspot
from qvlopt.scoring.metrics.ocrbench import ocrbench, ocrbench_official
from qvlopt.scoring.metrics.overlap import BLEU_SIGNATURE, CHRF_SIGNATURE, Overlap, bleu, chrf, corpus_bleu, corpus_chrf
from qvlopt.scoring.metrics.relaxed import relaxed_accuracy, relaxed_accuracy_official
from qvlopt.scoring.metrics.vqa import HUMANS, vqa_accuracy, vqa_accuracy_official, vqa_accuracy_textvqa, vqa_exact


class Part(NamedTuple):
    """One item's share of a corpus value, which is the sum of `amount` over the sum of `of` unless the metric pools `counts`.

    `is_parsed` is false where no answer could be read out of what was said; such an item scores 0.
    """

    amount: float
    of: float
    counts: tuple[float, ...] = ()
    is_parsed: bool = True

    @property
    def value(self) -> float | None:
        """The item's own value; None where it has none (an error rate without reference text)."""
        return self.amount / self.of if self.of else None


@dataclass(frozen=True)
class Metric:
    """`measure(prediction, sample)` gives an item's part. `variant` says by which rule, for the reports.

    `is_binary`: every item scores 0 or 1. `pool` makes the corpus value of summed counts, where it is no mean.
    """

    name: str
    variant: str
    measure: Callable[[str, Sample], Part]
    is_binary: bool = False
    is_error_rate: bool = False
    pool: Callable[[Sequence[float]], float | None] | None = None

    def failed(self, sample: Sample) -> Part:
        """What an item is worth that the engine gave no answer to: nothing, or every character of it missing."""
        if self.is_error_rate:
            return self.measure("", sample)
        return Part(0.0, 1.0, self.measure("", sample).counts if self.pool else ())

    def corpus(self, parts: Iterable[Part]) -> float | None:
        """The value over several items; None of none."""
        if self.pool is None:
            return corpus_value(parts)
        return self.pool([sum(column) for column in zip(*(part.counts for part in parts), strict=True)])


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
    """The sum of the amounts over the sum of what they are of; None of none."""
    amount = of = 0.0
    for part in parts:
        amount, of = amount + part.amount, of + part.of
    return amount / of if of else None


def task_metrics(task: str, samples: Sequence[Sample]) -> TaskMetrics:
    """The metrics for these samples of one task: VQA accuracy needs ten answers to every question.

    Raises UsageError for an unknown task, RunError for right answers that the task's metrics cannot read.
    """
    if task not in TASKS:
        raise UsageError(f"task {task}: there is no such task", hint=f"use {', '.join(TASKS)}")
    if task == "grounding":
        _check_boxes(samples)
    if task == "choice":
        _check_choices(samples)
    if task == "vqa" and all(len(sample.answers) == HUMANS for sample in samples):
        return TEN_ANSWERS
    return TASKS[task]


def _check_boxes(samples: Sequence[Sample]) -> None:
    """A gold that is no box would stop the scoring after all the work."""
    for sample in samples:
        try:
            point_in_box("[0, 0]", sample.answers, (1, 1))
        except ValueError as error:
            raise RunError(f"{sample.origin}: item {sample.id}: {error}", hint="see docs/data.md, grounding") from error
        if len(sample.images) != 1:
            raise RunError(f"{sample.origin}: item {sample.id} has {len(sample.images)} pictures, grounding needs one", hint="split the item")


def _check_choices(samples: Sequence[Sample]) -> None:
    """A gold that is none of the options would be wrong for ever."""
    for sample in samples:
        for gold in sample.answers:
            if not is_readable(gold, question=sample.question, choices=sample.choices):
                listed = ", ".join(sample.choices) or "those that the question lists"
                raise RunError(
                    f"{sample.origin}: item {sample.id}: the right answer {gold[:60]!r} is none of the options: {listed[:200]}",
                    hint="give its letter, its text, or yes or no",
                )


def _score(function: Callable[[str, Sequence[str]], float]) -> Callable[[str, Sample], Part]:
    return lambda prediction, sample: Part(function(prediction, sample.answers), 1.0)


def _edits(function: Callable[[str, Sequence[str]], EditCounts]) -> Callable[[str, Sample], Part]:
    def measure(prediction: str, sample: Sample) -> Part:
        edits, length = function(prediction, sample.answers)
        return Part(float(edits), float(length))

    return measure


def _overlap(function: Callable[[str, Sequence[str]], Overlap]) -> Callable[[str, Sample], Part]:
    def measure(prediction: str, sample: Sample) -> Part:
        found = function(prediction, sample.answers)
        return Part(found.value, 1.0, found.counts)

    return measure


def _parsed(value: float | None) -> Part:
    return Part(value or 0.0, 1.0, is_parsed=value is not None)


def _choice(prediction: str, sample: Sample) -> Part:
    return _parsed(choice_accuracy(prediction, sample.answers, question=sample.question, choices=sample.choices))


def _ocrbench(function: Callable[..., float]) -> Callable[[str, Sample], Part]:
    return lambda prediction, sample: Part(function(prediction, sample.answers, dataset=sample.dataset or sample.stratum), 1.0)


def _grounding(function: Callable[[str, Sequence[str], Size], float | None]) -> Callable[[str, Sample], Part]:
    def measure(prediction: str, sample: Sample) -> Part:
        try:
            size = sample.images[0].header().size
        except ItemError:
            return Part(0.0, 1.0)  # it was there before the run; the item is failed or wrong, not a reason to lose the report
        return _parsed(function(prediction, sample.answers, size))

    return measure


EXACT = Metric("exact_match", "whole text, NFC and strip", _score(exact_match), is_binary=True)
ANLS = Metric("anls", "RRC rule, threshold 0.5, NFC and strip", _score(anls))
ANLS_OFFICIAL = Metric("anls_official", "RRC to the letter", _score(anls_official))
CER = Metric("cer", "corpus, NFC and strip, spaces count", _edits(character_edits), is_error_rate=True)
WER = Metric("wer", "corpus, NFC and strip, case and punctuation count", _edits(word_edits), is_error_rate=True)
BLEU = Metric("bleu", f"sacrebleu, {BLEU_SIGNATURE}", _overlap(bleu), pool=corpus_bleu)
CHRF = Metric("chrf", f"sacrebleu, {CHRF_SIGNATURE}", _overlap(chrf), pool=corpus_chrf)
VQA_EXACT = Metric("vqa_exact", "best gold, always normalised", _score(vqa_exact), is_binary=True)
VQA_ACCURACY = Metric("vqa_accuracy", "ten humans, always normalised", _score(vqa_accuracy))
VQA_OFFICIAL = Metric("vqa_accuracy_official", "VQAv2 to the letter: raw where all humans agree", _score(vqa_accuracy_official))
VQA_TEXTVQA = Metric("vqa_accuracy_textvqa", "TextVQA (MMF) to the letter", _score(vqa_accuracy_textvqa))
RELAXED = Metric("relaxed_accuracy", "pix2struct rule, NFC and strip", _score(relaxed_accuracy), is_binary=True)
RELAXED_OFFICIAL = Metric("relaxed_accuracy_official", "pix2struct to the letter", _score(relaxed_accuracy_official), is_binary=True)
OCRBENCH = Metric("ocrbench", "v1 containment, NFC, share of items", _ocrbench(ocrbench), is_binary=True)
OCRBENCH_OFFICIAL = Metric("ocrbench_official", "v1 to the letter, share of items", _ocrbench(ocrbench_official), is_binary=True)
POINT = Metric("point_in_box", "answers in thousandths of the sides", _grounding(point_in_box), is_binary=True)
SCREENSPOT = Metric("point_in_box_screenspot", "VLMEvalKit: answers in pixels or fractions", _grounding(point_in_box_screenspot), is_binary=True)
CHOICE = Metric("choice_accuracy", "stated option only, unparsed is wrong", _choice, is_binary=True)

TASKS = {
    "ocr": TaskMetrics(EXACT, (CER, WER, ANLS), max_new_tokens=128),
    "vqa": TaskMetrics(VQA_EXACT, (), max_new_tokens=32),
    "doc": TaskMetrics(ANLS, (ANLS_OFFICIAL, EXACT), max_new_tokens=64),
    "chart": TaskMetrics(RELAXED, (RELAXED_OFFICIAL, EXACT), max_new_tokens=32),
    "ocrbench": TaskMetrics(OCRBENCH, (OCRBENCH_OFFICIAL,), max_new_tokens=128),
    "grounding": TaskMetrics(POINT, (SCREENSPOT,), max_new_tokens=64),
    "choice": TaskMetrics(CHOICE, (), max_new_tokens=64),
    "text": TaskMetrics(EXACT, (CHRF, BLEU, CER, WER), max_new_tokens=256),
}
TEN_ANSWERS = TaskMetrics(VQA_ACCURACY, (VQA_OFFICIAL, VQA_TEXTVQA, VQA_EXACT), max_new_tokens=32)
