"""A choice is read where it is stated, and nowhere else."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qvlopt.scoring.metrics.choice import choice_accuracy, stated_letter, stated_yes_no

OPTIONS = {"A": "a cat", "B": "a dog", "C": "3.5 m", "D": "none of them"}


@pytest.mark.parametrize(
    ("answer", "letter"),
    [
        ("Based on the picture, the answer is (C)", "C"),
        ("The best answer is B.", "B"),
        ("The", None),
        ("Based", None),
        ("A notice on the wall", None),
        ("A", "A"),
        ("c", "C"),
        ("(b)", "B"),
        ("D.", "D"),
        ("B. a dog", "B"),
        ("(B) a dog", "B"),
        ("B: a dog", "B"),
        ("a dog", "B"),
        ("A dog.", "B"),
        ("The answer is a dog.", "B"),
        ("Answer: 3.5 m", "C"),
        ("The answer is a notice.", None),
        ("The answer is A notice.", None),
        ("The answer is B because it barks.", "B"),
        ("Answer: A", "A"),
        ("**C**", "C"),
        (r"So the answer is $\boxed{D}$", "D"),
        (r"\boxed{\text{B}}", "B"),
        ("The answer is A. Wait, the answer is C.", "C"),
        ("(A) is wrong and (B) is wrong too", None),
        ("(A) is wrong.", None),
        ("(A) is wrong, so it is (B).", "B"),
        ("(A) or (B)", None),
        ("It barks, so it must be (B).", "B"),
        ("It is not (A).", None),
        ("The answer is not A.", None),
        ("The answer isn't (A).", None),
        ("B is the correct answer.", "B"),
        ("Option B", "B"),
        ("option b is wrong", None),
        ("It barks.\n\nB", "B"),
        ("It has four legs.\n(A)", "A"),
        ("The answer is E.", None),
        ("E", None),
        ("I choose option D", "D"),
        ("", None),
        ("   \n", None),
        ("Dogs bark.", None),
        ("A or B", None),
        ("I", None),
    ],
)
def test_letters(answer: str, letter: str | None) -> None:
    assert stated_letter(answer, OPTIONS) == letter


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ("Yes, a notice", "yes"),
        ("yes", "yes"),
        ("No.", "no"),
        ("NO", "no"),
        ("No, there is none.", "no"),
        ("Yes there is a dog", "yes"),
        ("notice", None),
        ("No dog barks here", None),
        ("There is no dog.", None),
        ("Nothing", None),
        ("Yesterday", None),
        ("Yes and no", None),
        ("The answer is no.", "no"),
        ("The answer is: **Yes**", "yes"),
        ("Yes. But looking closer, the answer is no.", "no"),
        ("The answer is no longer clear", None),
        ("I see a dog.\nYes", "yes"),
        ("Maybe", None),
        ("", None),
    ],
)
def test_yes_and_no(answer: str, said: str | None) -> None:
    assert stated_yes_no(answer) == said


def test_the_options_come_from_the_columns_or_from_the_question() -> None:
    question = "What is it?\nA. a cat\nB. a dog\n"
    assert choice_accuracy("a dog", ["B"], question=question) == 1.0
    assert choice_accuracy("C", ["B"], question=question) is None
    assert choice_accuracy("C", ["B"], question=question, choices=["x", "y", "z"]) == 0.0
    assert choice_accuracy("C", ["B"], question="What is it?") == 0.0


@pytest.mark.parametrize("gold", ["B", "b", "(B)", "B.", "a dog", "A dog"])
def test_a_gold_is_a_letter_or_the_text_of_an_option(gold: str) -> None:
    assert choice_accuracy("The answer is B", [gold], choices=list(OPTIONS.values())) == 1.0
    assert choice_accuracy("The answer is A", [gold], choices=list(OPTIONS.values())) == 0.0


def test_two_options_of_one_text_are_told_apart_by_letter_only() -> None:
    assert choice_accuracy("same", ["A"], choices=["same", "same"]) is None
    assert choice_accuracy("A", ["A"], choices=["same", "same"]) == 1.0


@pytest.mark.parametrize(("answer", "expected"), [("Yes, a notice", 1.0), ("No.", 0.0), ("notice", None), ("A", None)])
def test_yes_no_golds(answer: str, expected: float | None) -> None:
    assert choice_accuracy(answer, ["Yes"]) == expected


@given(st.text(max_size=200))
def test_any_text_gives_a_valid_letter_or_none(answer: str) -> None:
    assert stated_letter(answer, OPTIONS) in {*OPTIONS, None}
    assert stated_yes_no(answer) in {"yes", "no", None}


@given(st.sampled_from("ABCD"), st.text("xyz .,", max_size=30))
def test_a_stated_letter_is_found_whatever_is_around_it(letter: str, around: str) -> None:
    assert stated_letter(f"{around} The answer is ({letter}). {around}", OPTIONS) == letter
