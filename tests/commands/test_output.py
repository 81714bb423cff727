"""Where commands write."""

from __future__ import annotations

from pathlib import Path

import pytest

from qvlopt.commands.output import as_root, is_very_folder, output_folder
from qvlopt.recipe.load import load_recipe

RECIPE = {"name": "mine", "model": {"path": "x"}}


def test_a_section_has_a_sub_folder_of_the_recipes_output() -> None:
    loaded = load_recipe({**RECIPE, "output": "there"})
    assert output_folder(loaded, "calibrate") == Path("there/calibrate")
    assert output_folder(load_recipe(RECIPE), "awq") == Path("out/mine/awq")
    assert output_folder(load_recipe(RECIPE, overrides=["output=other"]), "awq") == Path("other/awq")


def test_the_option_names_the_very_folder() -> None:
    loaded = load_recipe({**RECIPE, "output": "there"}, flags={"output": "here"})
    assert is_very_folder(loaded)
    assert output_folder(loaded, "awq") == Path("here")


def test_to_run_the_option_names_the_root_of_all_sections() -> None:
    loaded = as_root(load_recipe(RECIPE, flags={"output": "here"}))
    assert not is_very_folder(loaded)
    assert output_folder(loaded, "awq") == Path("here/awq")
    assert output_folder(loaded, "evaluate") == Path("here/evaluate")


def test_a_tilde_in_a_recipe_is_the_users_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert output_folder(load_recipe({**RECIPE, "output": "~/there"}), "awq") == Path("/home/me/there/awq")
