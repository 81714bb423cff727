"""Worked examples of every metric, computed with the official code where a row says so.

`official`: the value comes from the named source's own code. `variant`: ours, or another tool's rule that ours follows; it
differs from the official one on purpose.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import jiwer
import pytest
import sacrebleu

from qvlopt.scoring.metrics.anls import anls, anls_official
from qvlopt.scoring.metrics.cer import character_edits, error_rate, word_edits
from qvlopt.scoring.metrics.exact import exact_match
from qvlopt.scoring.metrics.grounding import point_in_box, point_in_box_screenspot
from qvlopt.scoring.metrics.ocrbench import ocrbench, ocrbench_official
from qvlopt.scoring.metrics.overlap import bleu, corpus_bleu
from qvlopt.scoring.metrics.relaxed import relaxed_accuracy, relaxed_accuracy_official
from qvlopt.scoring.metrics.vqa import normalise_textvqa, strip_punctuation, vqa_accuracy, vqa_accuracy_official, vqa_accuracy_textvqa

Score = Callable[[str, list[str]], float | None]


class Row(NamedTuple):
    """`number` is the row's in the sheet of worked examples."""

    number: int
    tag: Literal["official", "variant"]
    metric: Score
    golds: list[str]
    prediction: str
    expected: float | None


def word_rate(prediction: str, golds: list[str]) -> float | None:
    return error_rate([word_edits(prediction, golds)])


def character_rate(prediction: str, golds: list[str]) -> float | None:
    return error_rate([character_edits(prediction, golds)])


def formula(prediction: str, golds: list[str]) -> float:
    return ocrbench_official(prediction, golds, dataset="HME100k")


def one_sentence_bleu(prediction: str, golds: list[str]) -> float | None:
    """The corpus value of one sentence, without effective order, in the sheet's per cent."""
    return 100 * (corpus_bleu(bleu(prediction, golds).counts) or 0.0)


def item_bleu(prediction: str, golds: list[str]) -> float:
    return 100 * bleu(prediction, golds).value


def screenspot(prediction: str, golds: list[str]) -> float | None:
    return point_in_box_screenspot(prediction, golds, (1000, 2000))


def thousandths(prediction: str, golds: list[str]) -> float | None:
    return point_in_box(prediction, golds, (500, 2000))


def humans(**counts: int) -> list[str]:
    return [word.strip("_").replace("_", " ") for word, count in counts.items() for _ in range(count)]


# number, prediction, the ten humans, VQAv2 official, TextVQA (MMF); both in per cent
VQA: list[tuple[int, str, list[str], int, int]] = [
    (1, "yes", humans(yes=10), 100, 100),
    (2, "Yes", humans(yes=10), 0, 100),
    (3, "yes.", humans(yes=10), 0, 100),
    (4, "cat", humans(cat=1, dog=9), 30, 30),
    (5, "cat", humans(cat=2, dog=8), 60, 60),
    (6, "cat", humans(cat=3, dog=7), 90, 90),
    (7, "cat", humans(cat=4, dog=6), 100, 100),
    (8, "The Cat", humans(cat=3, dog=7), 90, 90),
    (9, "two", humans(_2=6, _3=4), 100, 100),
    (10, "none", humans(_0=6, _1=4), 100, 100),
    (11, "1,000", humans(_1000=6, _100=4), 100, 100),
    (12, "t-shirt", humans(t_shirt=6, shirt=4), 100, 100),
    (13, "3.", humans(_3=6, _4=4), 100, 100),
    (14, "u.s.", humans(us=6, usa=4), 100, 100),
    (15, "dont", ["don't"] * 6 + ["no"] * 4, 100, 100),
    (16, "red\n", humans(red=6, blue=4), 100, 100),
    (17, "", humans(the=6, blue=4), 100, 100),
    (18, "", humans(red=6, blue=4), 0, 0),
    (19, "red, blue", humans(red_blue=6, red=4), 100, 100),
    (20, "eleven", humans(_11=6, eleven=4), 100, 100),
]
# lmms-eval and VLMEvalKit normalise where all humans agree too, and so does what we gate on
VQA_ROWS = [
    row
    for number, prediction, golds, official, textvqa in VQA
    for row in (
        Row(number, "official", vqa_accuracy_official, golds, prediction, official / 100),
        Row(number, "official", vqa_accuracy_textvqa, golds, prediction, textvqa / 100),
        Row(number, "variant", vqa_accuracy, golds, prediction, 1.0 if number in (2, 3) else official / 100),
    )
]

ANLS_ROWS = [
    Row(21, "official", anls_official, ["Hello"], "hello", 1.0),
    Row(22, "official", anls_official, ["hello"], "helo", 0.8),
    Row(23, "official", anls_official, ["abcd"], "ab", 0.5),
    Row(24, "official", anls_official, ["abcd"], "axyz", 0.0),
    Row(25, "official", anls_official, ["$1,234.50"], "1234.50", 0.777778),
    Row(26, "official", anls_official, ["University of California"], "university  of california", 1.0),
    Row(27, "official", anls_official, ["yes", "yes, it is"], "yes it is", 0.9),
    Row(28, "official", anls_official, ["42"], "The answer is 42", 0.0),
    Row(29, "official", anls_official, ["a"], "   ", 0.666667),
    Row(29, "variant", anls, ["a"], "   ", 0.0),
    Row(30, "official", anls_official, [""], "", 1.0),
    Row(31, "official", anls_official, ["straße"], "STRASSE", 0.714286),
]


def chart(number: int, gold: str, prediction: str, official: bool, variant: bool | None = None) -> list[Row]:
    """`variant`: with both sides stripped, as VLMEvalKit does, where that differs."""
    ours = official if variant is None else variant
    return [
        Row(number, "official", relaxed_accuracy_official, [gold], prediction, float(official)),
        Row(number, "variant", relaxed_accuracy, [gold], prediction, float(ours)),
    ]


CHART_ROWS = [
    *chart(32, "100", "95", True),
    *chart(32, "100", "94.9", False),
    *chart(33, "100", "105", True),
    *chart(33, "100", "105.0001", False),
    *chart(34, "1", "1.05", False),
    *chart(34, "20", "21", True),
    *chart(34, "2", "2.1", False),
    *chart(35, "0", "0.0", False),
    *chart(35, "0", "0", True),
    *chart(36, "5%", "0.05", True),
    *chart(36, "5%", "5", False),
    *chart(37, "1,000", "1000", False),
    *chart(38, "Yes", "yes", True),
    *chart(38, "Yes", "yes.", False),
    *chart(39, "yes", "yes ", False, variant=True),
    *chart(40, "2015", "1920", True),
    *chart(41, "-10", "-10.5", True),
]

OCRBENCH_ROWS = [
    Row(42, "official", ocrbench_official, ["CENTRE"], 'The word is "Centre".', 1.0),
    Row(43, "official", ocrbench_official, ["1"], "21", 1.0),
    Row(44, "official", ocrbench_official, ["NEW YORK"], "NEW\nYORK", 1.0),
    Row(44, "official", ocrbench_official, ["NEW YORK"], "NEWYORK", 0.0),
    Row(45, "official", ocrbench_official, ["NEW  YORK"], "NEW YORK", 0.0),
    Row(46, "official", formula, ["y _ { 2 } = - 1\n"], "y_{2}=-1", 1.0),
    Row(47, "official", formula, ["y _ { 2 }"], "Y_{2}", 0.0),
    Row(4, "official", ocrbench_official, [""], "anything", 1.0),  # of section 0: an empty gold is always right
    Row(4, "variant", ocrbench, [""], "anything", 0.0),
]

RATE_ROWS = [
    Row(52, "official", word_rate, ["hello world"], "hello duck", 0.5),
    Row(52, "official", character_rate, ["hello world"], "hello duck", 0.454545),
    Row(53, "official", word_rate, ["hello world"], "hello  world", 0.0),
    Row(53, "official", character_rate, ["hello world"], "hello  world", 0.090909),
    Row(54, "official", word_rate, ["a b c"], "a x y z b c", 1.0),
    Row(55, "variant", word_rate, [""], "a b", None),  # jiwer: the number of insertions, 2 and 3
    Row(55, "variant", character_rate, [""], "a b", None),
    Row(57, "official", character_rate, ["kitten"], "sitting", 0.5),
    Row(58, "official", character_rate, ["ab cd"], "abcd", 0.2),
]

BLEU_ROWS = [
    Row(59, "official", one_sentence_bleu, ["the cat"], "the cat", 0.0),
    Row(59, "official", item_bleu, ["the cat"], "the cat", 100.0),
    Row(60, "official", one_sentence_bleu, ["the cat sat on the mat"], "the cat sat on mat", 57.893),
    Row(61, "official", one_sentence_bleu, ["the cat sat on the mat."], "The cat sat on the mat.", 80.9107),
]

POINT_ROWS = [
    # ScreenSpot's box [42, 1102, 197, 70] of corner and size in pixels
    Row(64, "official", screenspot, ["[42, 1102, 238, 1171] px"], "(238, 1150)", 1.0),
    Row(64, "official", screenspot, ["[42, 1102, 238, 1171] px"], "(239, 1150)", 0.0),
    Row(64, "variant", thousandths, ["[42, 1102, 238, 1171] px"], "[476, 575]", 1.0),
    Row(64, "variant", thousandths, ["[42, 1102, 238, 1171] px"], "[478, 575]", 0.0),
]

ROWS = [*VQA_ROWS, *ANLS_ROWS, *CHART_ROWS, *OCRBENCH_ROWS, *RATE_ROWS, *BLEU_ROWS, *POINT_ROWS]


def name(row: Row) -> str:
    return f"{row.number}-{row.tag}-{getattr(row.metric, '__name__', '')}-{row.prediction.strip()[:12]}"


@pytest.mark.parametrize("row", ROWS, ids=name)
def test_a_worked_example_has_its_value(row: Row) -> None:
    found = row.metric(row.prediction, row.golds)
    assert found == (None if row.expected is None else pytest.approx(row.expected, abs=5e-5 if row.expected > 1 else 5e-7))


def test_every_row_of_the_sheet_for_these_metrics_is_there() -> None:
    numbers = {row.number for row in ROWS}
    # 48 to 51, 62 and 63 are OCRBench v2's, TEDS and a hierarchical F1, which no task has; 56 is the next test; 65 on are the gate's
    assert numbers == {*range(1, 48), 52, 53, 54, 55, 57, 58, 59, 60, 61, 64}


def test_row_56_a_corpus_rate_pools_and_is_no_mean_of_rates() -> None:
    golds, predictions = ["a b c d", "e"], ["a b c d", "f"]
    assert error_rate(word_edits(said, [gold]) for gold, said in zip(golds, predictions, strict=True)) == pytest.approx(0.2)
    assert jiwer.wer(golds, predictions) == pytest.approx(0.2)


def test_row_61_case_is_the_only_difference() -> None:
    assert sacrebleu.corpus_bleu(["The cat sat on the mat."], [["the cat sat on the mat."]], lowercase=True).score == pytest.approx(100.0)


def test_row_6_a_repeated_answer_is_left_out_once_and_not_by_its_text() -> None:
    assert vqa_accuracy_official("cat", humans(cat=3, dog=7)) == pytest.approx(0.9)  # by text it would be 0.7


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a/b", "a b"),
        ("what?", "what "),
        ("x, y", "x y"),
        ("t- shirt", "t shirt"),
        ("1,000-2", "10002"),
        (".5", ".5"),
        ("3.5", "3.5"),
        ("it's", "it's"),
    ],
)
def test_punctuation_is_stripped_as_vqav2s_code_does(text: str, expected: str) -> None:
    assert strip_punctuation(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [("it's", "it 's"), ("dog's", "dog 's"), ("A Cat", "cat"), ("Two dogs", "2 dogs"), ("U.S.A.", "usa"), ("10:30", "10:30")],
)
def test_textvqa_normalises_as_mmfs_processor_does(text: str, expected: str) -> None:
    assert normalise_textvqa(text) == expected


def test_exact_match_compares_as_written() -> None:
    cases: Sequence[tuple[str, str, float]] = [("A1", "A1", 1.0), ("A1", "a1", 0.0), (" A1\n", "A1", 1.0), ("a  b", "a b", 0.0)]
    assert [exact_match(prediction, [gold]) for prediction, gold, _ in cases] == [expected for _, _, expected in cases]
