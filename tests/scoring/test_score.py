"""Answers become scores by id; what is not an answer is counted and never a gap."""

from __future__ import annotations

import pytest

from qvlopt.data.samples import Sample
from qvlopt.errors import UsageError
from qvlopt.runtime.engine import Answer
from qvlopt.scoring.score import ScoreTable, score_answers
from qvlopt.scoring.tasks import TASKS, Part, corpus_value, task_metrics


def sample(id: str, *answers: str, task: str = "ocr") -> Sample:
    return Sample(id, (), "q", answers, task, id, f"x:{id}")


def answer(id: str, text: str | None, stop: str = "eos") -> Answer:
    if text is None:
        return Answer(id, (), "", "error", 3, "out of memory")
    return Answer(id, (1, 2), text, stop, 3)  # type: ignore[arg-type]


SAMPLES = [sample("a", "AB12"), sample("b", "X"), sample("c", ""), sample("d", "Y")]
ANSWERS = [answer("c", "x"), answer("a", "AB1Z"), answer("d", None), answer("b", " \n", "length")]
IDS = ["a", "b", "c", "d"]


def scored() -> ScoreTable:
    return score_answers(SAMPLES, ANSWERS, TASKS["ocr"].all)


def test_scores_are_joined_by_id() -> None:
    assert scored().values("exact_match", IDS) == {"a": 0.0, "b": 0.0, "c": 0.0, "d": 0.0}
    assert scored().values("anls", IDS) == {"a": 0.75, "b": 0.0, "c": 0.0, "d": 0.0}


def test_the_order_of_samples_and_answers_does_not_matter() -> None:
    assert score_answers(SAMPLES[::-1], ANSWERS[::-1], TASKS["ocr"].all) == scored()


def test_what_is_beside_the_scores_is_counted() -> None:
    table = scored()
    assert (table.n, table.n_empty, table.n_truncated, table.n_empty_ref) == (4, 1, 1, 1)
    assert table.failed == {"d": "out of memory"}


def test_the_corpus_error_rate_pools_and_counts_invented_and_missing_text() -> None:
    table = scored()
    assert table.parts["cer"] == {"a": Part(1, 4), "b": Part(1, 1), "c": Part(1, 0), "d": Part(1, 1)}
    assert table.mean("cer", IDS) == pytest.approx(4 / 6)
    assert table.values("cer", IDS) == {"a": 0.25, "b": 1.0, "d": 1.0}


def test_an_engine_failure_is_wrong_even_where_silence_would_be_right() -> None:
    table = score_answers([sample("a", "")], [answer("a", None)], TASKS["ocr"].all)
    assert table.mean("exact_match", ["a"]) == 0.0
    assert table.mean("cer", ["a"]) is None


def test_nothing_has_no_mean() -> None:
    assert corpus_value([]) is None
    assert scored().mean("exact_match", []) is None


@pytest.mark.parametrize(
    "answers",
    [ANSWERS[:3], [*ANSWERS, answer("a", "x")], [*ANSWERS[:3], answer("z", "x")], []],
)
def test_each_sample_needs_exactly_one_answer(answers: list[Answer]) -> None:
    with pytest.raises(ValueError, match="one answer to each of 4 samples"):
        score_answers(SAMPLES, answers, TASKS["ocr"].all)


def test_vqa_accuracy_decides_only_with_ten_answers_everywhere() -> None:
    ten, one = sample("a", *["yes"] * 10, task="vqa"), sample("b", "yes", task="vqa")
    assert task_metrics("vqa", [ten, ten]).primary.name == "vqa_accuracy"
    assert "vqa_accuracy_official" in [metric.name for metric in task_metrics("vqa", [ten]).others]
    assert task_metrics("vqa", [ten, one]).primary.name == "vqa_exact"


@pytest.mark.parametrize(("task", "primary"), [("ocr", "exact_match"), ("doc", "anls"), ("vqa", "vqa_exact")])
def test_each_task_has_the_contracts_primary_metric(task: str, primary: str) -> None:
    assert task_metrics(task, [sample("a", "x", task=task)]).primary.name == primary


def test_tasks_of_later_versions_are_refused_by_name() -> None:
    with pytest.raises(UsageError, match="task chart: not scored in this version"):
        task_metrics("chart", [])
