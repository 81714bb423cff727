from __future__ import annotations

import pytest

from qvlopt.errors import ItemError, NotComparableError, Problem, QvloptError, RecipeProblems, RunError, UsageError, worst_exit_code


@pytest.mark.parametrize(
    ("error", "code"),
    [(QvloptError("x"), 5), (UsageError("x"), 2), (RecipeProblems([Problem("a:1", "b")]), 2), (NotComparableError("x"), 4), (RunError("x"), 5)],
)
def test_every_error_carries_the_exit_status_of_the_contract(error: QvloptError, code: int) -> None:
    assert error.exit_code == code


def test_an_error_shows_its_hint() -> None:
    assert str(UsageError("no such folder", "give another")) == "no such folder (give another)"


def test_recipe_problems_lists_every_problem_with_its_place() -> None:
    error = RecipeProblems([Problem("r.yaml:3", "bits: wrong"), Problem("--set a=b", "a: unknown")])
    assert error.message.splitlines() == ["2 problems in the recipe", "r.yaml:3: bits: wrong", "--set a=b: a: unknown"]


def test_an_item_error_is_not_an_error_of_the_command() -> None:
    assert not isinstance(ItemError("cut short"), QvloptError)


@pytest.mark.parametrize(
    ("codes", "worst"), [([], 0), ([0, 0], 0), ([0, 3], 3), ([3, 1], 1), ([1, 4], 4), ([4, 5], 5), ([0, 1, 3, 4, 5], 5), ([5, 130], 130)]
)
def test_several_statuses_give_the_worst_in_the_order_of_the_contract(codes: list[int], worst: int) -> None:
    assert worst_exit_code(codes) == worst


def test_an_unknown_status_is_not_swallowed() -> None:
    with pytest.raises(ValueError, match="not in tuple"):
        worst_exit_code([7])
