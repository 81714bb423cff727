"""Properties of the metrics that hold for any text; worked values are in test_worked_examples."""

from __future__ import annotations

import jiwer
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qvlopt.scoring.metrics.anls import anls, anls_official
from qvlopt.scoring.metrics.cer import EditCounts, character_edits, error_rate, word_edits
from qvlopt.scoring.metrics.exact import exact_match
from qvlopt.scoring.metrics.ocrbench import ocrbench, ocrbench_official
from qvlopt.scoring.metrics.relaxed import relaxed_accuracy, relaxed_accuracy_official
from qvlopt.scoring.metrics.vqa import (
    normalise_answer,
    strip_punctuation,
    vqa_accuracy,
    vqa_accuracy_official,
    vqa_accuracy_textvqa,
    vqa_exact,
)
from qvlopt.scoring.text import normalised

any_text = st.text(max_size=40)


def humans(counts: dict[str, int]) -> list[str]:
    return [word for word, count in counts.items() for _ in range(count)]


@pytest.mark.parametrize(("prediction", "counts"), [("Yes", {"yes": 10}), ("yes.", {"yes": 10}), ("The Cat", {"cat": 10})])
def test_the_gated_variant_normalises_where_all_humans_agree(prediction: str, counts: dict[str, int]) -> None:
    assert vqa_accuracy(prediction, humans(counts)) == 1.0
    assert vqa_accuracy_official(prediction, humans(counts)) == 0.0


@pytest.mark.parametrize("golds", [["yes"], ["yes"] * 9, ["yes"] * 11, []])
@pytest.mark.parametrize("metric", [vqa_accuracy, vqa_accuracy_official, vqa_accuracy_textvqa])
def test_vqa_accuracy_needs_ten_humans(metric: object, golds: list[str]) -> None:
    with pytest.raises(ValueError, match="needs 10 human answers"):
        metric("yes", golds)  # type: ignore[operator]


@given(st.lists(st.sampled_from(["a", "b", "c"]), min_size=10, max_size=10), st.randoms())
def test_vqa_accuracy_depends_on_the_number_of_matches_only(golds: list[str], random: object) -> None:
    shuffled = list(golds)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    expected = [0.0, 0.3, 0.6, 0.9, 1.0][min(4, golds.count("b"))]
    assert vqa_accuracy("b", shuffled) == vqa_accuracy_official("b", golds) == pytest.approx(expected)


def test_at_most_32_periods_are_removed() -> None:
    assert strip_punctuation("." * 40) == "." * 8


@pytest.mark.parametrize(("text", "expected"), [("Im here", "im here"), ("its", "its"), ("isnt", "isn't"), ("somebody'd", "somebodyd")])
def test_contractions_are_the_official_table_with_its_quirks(text: str, expected: str) -> None:
    assert normalise_answer(text) == expected


def test_vqa_exact_takes_the_best_of_the_golds() -> None:
    assert vqa_exact("The Red.", ["blue", "red"]) == 1.0
    assert vqa_exact("reddish", ["blue", "red"]) == 0.0
    assert vqa_exact("cafe\u0301", ["café"]) == 1.0


@pytest.mark.parametrize(("prediction", "gold"), [("", "A"), ("the", ""), ("...", "")])
def test_vqa_exact_never_matches_silence_with_text(prediction: str, gold: str) -> None:
    assert normalise_answer(prediction) == normalise_answer(gold)
    assert vqa_exact(prediction, [gold]) == 0.0


@given(st.lists(st.tuples(st.text("ab c\u0301", min_size=1).filter(normalised), st.text("ab c\u0301")), min_size=1, max_size=5))
def test_error_rates_equal_jiwers(pairs: list[tuple[str, str]]) -> None:
    golds, predictions = [normalised(gold) for gold, _ in pairs], [normalised(prediction) for _, prediction in pairs]
    characters = [character_edits(prediction, [gold]) for gold, prediction in pairs]
    words = [word_edits(prediction, [gold]) for gold, prediction in pairs]
    assert error_rate(characters) == pytest.approx(jiwer.cer(golds, predictions))
    assert error_rate(words) == pytest.approx(jiwer.wer(golds, predictions))


def test_an_empty_reference_has_no_rate_of_its_own_and_adds_its_insertions_to_the_corpus() -> None:
    assert character_edits("a b", [""]) == EditCounts(edits=3, length=0)
    assert word_edits("a b", [""]) == EditCounts(edits=2, length=0)
    for prediction in ("", "abc"):
        assert error_rate([character_edits(prediction, ["  "])]) is None
    assert error_rate([character_edits("abc", [""]), character_edits("wxyz", ["wxyz"])]) == pytest.approx(3 / 4)
    assert error_rate([character_edits("", ["abc"])]) == 1.0


def test_the_nearest_of_several_references_is_taken() -> None:
    assert character_edits("abcd", ["xxxxxxxx", "abc"]) == EditCounts(1, 3)
    assert character_edits("", ["abc", ""]) == EditCounts(0, 0)


@pytest.mark.parametrize(("gold", "prediction", "expected"), [("", "", 1.0), ("", "abc", 0.0), ("abc", "", 0.0), ("  ", "abc", 0.0), ("  ", "", 1.0)])
def test_only_silence_is_right_where_the_reference_is_empty(gold: str, prediction: str, expected: float) -> None:
    assert exact_match(prediction, [gold]) == expected
    assert anls(prediction, [gold]) == expected
    assert vqa_exact(prediction, [gold]) == expected


@pytest.mark.parametrize(
    ("gold", "prediction", "are_equal"),
    [
        ("café", "cafe\u0301", True),
        ("café", "cafe", False),
        ("12", "\uff11\uff12", False),
        ("١٢", "12", False),
        ("ﬁne", "fine", False),
        ("\u017fun", "sun", False),
        ("בּ", "ב\u05bc", True),
        (" A1\r\n", "A1", True),
        ("a\r\nb", "a\nb", True),
        ("a  b", "a b", False),
        ("A1", "a1", False),
        ("漢字", "漢字", True),
    ],
)
def test_composed_and_decomposed_texts_are_equal_and_different_characters_are_not(gold: str, prediction: str, are_equal: bool) -> None:
    assert exact_match(prediction, [gold]) == float(are_equal)
    assert (character_edits(prediction, [gold]).edits == 0) is are_equal


def test_exact_match_takes_the_best_of_the_golds() -> None:
    assert exact_match("B", ["A", "B"]) == 1.0


@given(any_text, st.lists(any_text, min_size=1, max_size=4), st.randoms())
def test_scores_are_in_range_and_do_not_depend_on_the_order_of_golds(prediction: str, golds: list[str], random: object) -> None:
    shuffled = list(golds)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    for metric in (exact_match, anls, anls_official, vqa_exact, relaxed_accuracy, relaxed_accuracy_official, ocrbench, ocrbench_official):
        score = metric(prediction, golds)
        assert 0.0 <= score <= 1.0
        assert metric(prediction, shuffled) == score


@given(any_text, st.lists(any_text, max_size=3))
def test_a_gold_given_back_is_right(gold: str, others: list[str]) -> None:
    golds = [*others, gold]
    assert exact_match(gold, golds) == anls(gold, golds) == vqa_exact(gold, golds) == ocrbench(gold, golds) == 1.0
    assert vqa_accuracy_official(gold, [gold] * 10) == vqa_accuracy(gold, [gold] * 10) == 1.0
    assert character_edits(gold, [gold]).edits == 0


@pytest.mark.parametrize("prediction", ["nan", "🙂" * 5000, "x" * 10_000, "\0\x1b[31m", "\ud800", " \n\t "])
def test_strange_answers_are_scored_like_any_other(prediction: str) -> None:
    for metric in (exact_match, anls, vqa_exact, ocrbench, relaxed_accuracy):
        assert metric(prediction, ["B"]) == 0.0
    assert relaxed_accuracy(prediction, ["7"]) == 0.0
    assert vqa_accuracy(prediction, ["B"] * 10) == 0.0
