"""Answers in the forms that other harnesses read, so that anyone can score them again.

lmms-eval: JSON lines of samples as its `--log_samples` writes them. VLMEvalKit: the set's TSV with a column `prediction`, as its
`run.py --mode eval` reads it. A failed item has an empty prediction, so that no row is missing.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from qvlopt.data.columns import LETTERS
from qvlopt.data.samples import Sample
from qvlopt.report.write import jsonl_text
from qvlopt.runtime.engine import Answer
from qvlopt.scoring.compare import Comparison

LETTER_ANSWERS = frozenset((letter,) for letter in LETTERS)


def lmms_eval_rows(samples: Sequence[Sample], answers: Mapping[str, Answer]) -> Iterator[dict[str, Any]]:
    """One row a sample, in their order. `answers` by id; the model's text is raw.

    Beside the keys of lmms-eval (`doc_id, doc, target, resps, filtered_resps`) stand the plain `id, question, prediction, answers`.
    """
    for number, sample in enumerate(samples):
        prediction = _prediction(answers, sample)
        golds = list(sample.answers)
        plain = {"id": sample.id, "question": sample.question, "prediction": prediction, "answers": golds}
        doc = {"question_id": sample.id, "question": sample.question, "answers": golds}
        yield plain | {"doc_id": number, "doc": doc, "target": golds, "resps": [[prediction]], "filtered_resps": [prediction]}


def vlmevalkit_tsv(samples: Sequence[Sample], answers: Mapping[str, Answer]) -> str:
    """A table with a header line: index, question, answer (a list as Python spells it), prediction, and options where there are any."""
    options = LETTERS[: max((len(sample.choices) for sample in samples), default=0)]
    has_category = any(sample.stratum is not None for sample in samples)
    text = io.StringIO()
    writer = csv.writer(text, delimiter="\t", lineterminator="\n")
    writer.writerow(["index", "question", *options, "answer", *(["category"] if has_category else []), "prediction"])
    for sample in samples:
        # its sets of choices hold the letter itself; the others a list, which VLMEvalKit evaluates: repr makes it a plain literal
        golds = sample.answers[0] if sample.answers in LETTER_ANSWERS else repr(list(sample.answers))
        padded = [*sample.choices, *[""] * (len(options) - len(sample.choices))]
        category = [sample.stratum or ""] if has_category else []
        writer.writerow([sample.id, sample.question, *padded, golds, *category, _prediction(answers, sample)])
    return text.getvalue()


def prediction_files(comparisons: Sequence[Comparison]) -> dict[str, str]:
    """Text by file name of every candidate's answers to every set, the candidates numbered where there are several."""
    files: dict[str, str] = {}
    for number, comparison in enumerate(comparisons, 1):
        run = comparison.runs[1]
        for result in comparison.sets:
            name = f"predictions-{result.each.name}" + (f"-{number}" if len(comparisons) > 1 else "")
            answers = run.answered[result.each.name].answers
            files[f"{name}.jsonl"] = jsonl_text(lmms_eval_rows(result.each.chosen, answers))
            files[f"{name}.tsv"] = vlmevalkit_tsv(result.each.chosen, answers)
    return files


def _prediction(answers: Mapping[str, Answer], sample: Sample) -> str:
    answer = answers.get(sample.id)
    return "" if answer is None or answer.error is not None else answer.text
