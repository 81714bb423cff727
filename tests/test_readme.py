"""What README.md promises in commands and tables is so."""

from __future__ import annotations

import re
from pathlib import Path

from qvlopt.cli.app import VERBS
from qvlopt.errors import EXIT_ORDER
from qvlopt.recipe.load import load_recipe

CHECKOUT = Path(__file__).parents[1]
README = (CHECKOUT / "README.md").read_text(encoding="utf-8")


def test_ci_runs_the_readmes_test_command() -> None:
    command = next(line for line in README.splitlines() if line.startswith("pip install '.[dev]'"))
    install, pytest = command.split(" && ")
    script = (CHECKOUT / ".ci" / "run").read_text(encoding="utf-8").splitlines()
    assert f"{install.replace('install', 'install --quiet')} && {pytest}" in script


def test_every_status_is_in_the_table() -> None:
    assert {int(code) for code in re.findall(r"^\| (\d+) \|", README, re.MULTILINE)} == set(EXIT_ORDER)


def test_every_command_is_named() -> None:
    assert [verb.name for verb in VERBS if f"`{verb.name}" not in README] == []


def test_recipes_and_settings_of_the_examples_are_valid() -> None:
    examples = [line for line in README.splitlines() if line.startswith("qvlopt ")]
    settings = [setting for line in examples for setting in re.findall(r"--set (\S+)", line)]
    recipes = {name for line in examples for name in re.findall(r"--recipe (\S+)", line)}
    assert recipes == {"recipes/4090d.yaml"}
    assert load_recipe(CHECKOUT / "recipes" / "4090d.yaml", overrides=settings).sections
