"""The command on a model card asks for the very same result."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from qvlopt.recipe.command_line import GIVEN, command_line
from qvlopt.recipe.load import LoadedRecipe, load_recipe

AWQ = ("calibrate", "quantize_awq")


def again(line: str) -> LoadedRecipe:
    """What the command line asks for."""
    program, _, option, recipe, *words = shlex.split(line)
    assert (program, option) == ("qvlopt", "--recipe")
    flags: dict[str, object] = {}
    overrides = []
    for name, value in zip(words[::2], words[1::2], strict=True):
        key = {"--model": "model.path", "--threads": "hardware.threads"}.get(name)
        if key is None:
            assert name == "--set"
            overrides.append(value)
        else:
            flags[key] = int(value) if value.isdecimal() else value
    return load_recipe(recipe, overrides=overrides, flags=flags)


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["quantize_awq.group_size=64", "quantize_awq.search.compensate=true", "calibrate.split=null", "seed=3"],
        ["quantize_awq.keep=[lm_head, 'blocks.0.*']", "pixels={min: 1024, max: 4096}"],
        ["calibrate.data=/a folder/of $PICTURES", "model.revision='1e5'", "quantize_awq.statistics='no'"],
    ],
)
def test_it_gives_the_recipe_that_it_was_made_from(overrides: list[str]) -> None:
    loaded = load_recipe("demo", overrides=overrides, flags={"model.path": "some/model", "hardware.threads": 2})
    line = command_line(loaded, "quantize-awq", sections=AWQ)
    assert line.startswith("qvlopt quantize-awq --recipe demo ")
    assert again(line).recipe == loaded.recipe


def test_without_anything_beside_the_file_it_is_the_file_alone(tmp_path: Path) -> None:
    assert command_line(load_recipe("4090d"), "export", sections=("export",)) == "qvlopt export --recipe 4090d"
    mine = tmp_path / "mine.yaml"
    mine.write_text("model: {path: builtin:nano}\nquantize_awq: {bits: 4}\n")
    assert command_line(load_recipe(mine), "quantize-awq", sections=AWQ) == "qvlopt quantize-awq --recipe mine.yaml"


def test_a_recipe_from_python_is_said_to_be_one() -> None:
    assert GIVEN in command_line(load_recipe({"model": {"path": "builtin:nano"}, "seed": 1}), "quantize-awq", sections=AWQ)


def test_what_the_result_does_not_depend_on_is_left_out() -> None:
    loaded = load_recipe("demo", overrides=["evaluate.limit=3", "quantize_awq.bits=4"], flags={"output": "/somewhere"})
    assert command_line(loaded, "quantize-awq", sections=AWQ) == "qvlopt quantize-awq --recipe demo --set quantize_awq.bits=4"
