"""Answers become scores by id; what is not an answer is counted and never a gap."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
import sacrebleu
from PIL import Image

from qvlopt.data.samples import ImageRef, Sample
from qvlopt.errors import RunError, UsageError
from qvlopt.recipe.schema import Task
from qvlopt.runtime.engine import Answer
from qvlopt.scoring.score import ScoreTable, score_answers
from qvlopt.scoring.tasks import TASKS, TEN_ANSWERS, Part, corpus_value, task_metrics


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


PRIMARY = {
    "ocr": "exact_match",
    "vqa": "vqa_exact",
    "doc": "anls",
    "chart": "relaxed_accuracy",
    "ocrbench": "ocrbench",
    "grounding": "point_in_box",
    "choice": "choice_accuracy",
    "text": "exact_match",
}


def test_each_task_of_the_recipes_has_the_contracts_primary_metric() -> None:
    assert set(PRIMARY) == set(TASKS) == set(get_args(Task))
    assert {task: metrics.primary.name for task, metrics in TASKS.items()} == PRIMARY


def test_every_metric_names_its_variant_once() -> None:
    every = {metric.name: metric for metrics in [*TASKS.values(), TEN_ANSWERS] for metric in metrics.all}
    assert all(metric.variant for metric in every.values())
    assert all(metric == every[metric.name] for metrics in [*TASKS.values(), TEN_ANSWERS] for metric in metrics.all)


def test_an_unknown_task_is_refused_by_name() -> None:
    with pytest.raises(UsageError, match="task video: there is no such task"):
        task_metrics("video", [])


def test_answers_that_state_no_choice_are_wrong_and_counted() -> None:
    samples = [replace(sample(id, "B", task="choice"), choices=("x", "y")) for id in "abcd"]
    answers = [answer("a", "(B)"), answer("b", "A"), answer("c", "who knows"), answer("d", None)]
    table = score_answers(samples, answers, task_metrics("choice", samples).all)
    assert table.mean("choice_accuracy", IDS) == 0.25
    assert (table.unparsed, table.n_unparsed, list(table.failed)) == (frozenset("c"), 1, ["d"])


def test_a_gold_that_is_no_option_is_refused_before_the_run() -> None:
    with pytest.raises(RunError, match="x:a: item a: the right answer 'C' is none of the options: x, y"):
        task_metrics("choice", [replace(sample("a", "C", task="choice"), choices=("x", "y"))])


def shown(tmp_path: Path, *answers: str) -> Sample:
    Image.new("RGB", (200, 100)).save(tmp_path / "p.png")
    return replace(sample("a", *answers, task="grounding"), images=(ImageRef("p.png", tmp_path),))


def test_grounding_looks_at_the_size_of_the_picture(tmp_path: Path) -> None:
    item = shown(tmp_path, "[20, 10, 100, 50] px")
    metrics = task_metrics("grounding", [item]).all
    for said, value, unparsed in (("[100, 100]", 1.0, 0), ("[900, 900]", 0.0, 0), ("over there", 0.0, 1)):
        table = score_answers([item], [answer("a", said)], metrics)
        assert (table.mean("point_in_box", ["a"]), table.n_unparsed) == (value, unparsed)


def test_a_gold_that_is_no_box_is_refused_before_the_run(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="x:a: item a: 'the button' is no box"):
        task_metrics("grounding", [shown(tmp_path, "the button")])
    with pytest.raises(RunError, match="has 0 pictures, grounding needs one"):
        task_metrics("grounding", [sample("a", "[0, 0, 1, 1]", task="grounding")])


@pytest.mark.parametrize("where", ["dataset", "stratum"])
def test_formulas_of_ocrbench_are_known_by_their_source_or_category(where: str) -> None:
    source = {"dataset": "HME100k", "stratum": "Handwritten Mathematical Expression Recognition"}[where]
    formula, words = sample("a", "x ^ { 2 }", task="ocrbench"), sample("b", "x ^ { 2 }", task="ocrbench")
    table = score_answers([replace(formula, **{where: source}), words], [answer("a", "x^{2}"), answer("b", "x^{2}")], TASKS["ocrbench"].all)
    assert table.values("ocrbench", ["a", "b"]) == table.values("ocrbench_official", ["a", "b"]) == {"a": 1.0, "b": 0.0}


def test_the_corpus_value_of_bleu_is_pooled_and_counts_failed_items() -> None:
    samples = [sample("a", "the cat sat on the mat", task="text"), sample("b", "a dog barks at it", task="text")]
    table = score_answers(samples, [answer("a", "the cat sat on the mat"), answer("b", None)], TASKS["text"].all)
    expected = sacrebleu.corpus_bleu(["the cat sat on the mat", ""], [[each.answers[0] for each in samples]]).score
    assert table.mean("bleu", ["a", "b"]) == pytest.approx(expected / 100)
    assert table.values("bleu", ["a", "b"]) == {"a": pytest.approx(1.0), "b": 0.0}
    assert table.mean("bleu", []) is None
