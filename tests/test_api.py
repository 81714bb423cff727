"""The commands as functions: how keywords become a recipe, and what reaches a command."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from qvlopt import api
from qvlopt.errors import RecipeProblems, UsageError
from qvlopt.recipe.load import LoadedRecipe


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the command `calibrate` was called with, in place of calibrating."""
    called: dict[str, Any] = {}
    stand_in = ModuleType("qvlopt.commands.calibrate")

    def calibrate(loaded: LoadedRecipe, **way: Any) -> str:
        called.update(loaded=loaded, **way)
        return "result"

    stand_in.calibrate = calibrate  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "qvlopt.commands.calibrate", stand_in)
    return called


def test_a_function_returns_what_its_command_returns(seen: dict[str, Any]) -> None:
    assert api.calibrate() == "result"
    assert seen["loaded"].source == "demo.yaml"
    assert {key: seen[key] for key in ("overwrite", "resume", "dry_run", "progress")} == {
        "overwrite": False,
        "resume": False,
        "dry_run": False,
        "progress": None,
    }


def test_keywords_override_the_recipe(seen: dict[str, Any], tmp_path: Path) -> None:
    api.calibrate("demo", model="x", output=tmp_path, threads=2, seed=3, calibrate={"samples": 9}, settings=["calibrate.batch=4"], dry_run=True)
    recipe = seen["loaded"].recipe
    assert (recipe.model.path, recipe.output, recipe.hardware.threads, recipe.seed) == ("x", str(tmp_path), 2, 3)
    assert (recipe.calibrate.samples, recipe.calibrate.batch, recipe.calibrate.data) == (9, 4, "builtin:nano")
    assert seen["dry_run"] is True


def test_keywords_that_are_none_change_nothing(seen: dict[str, Any]) -> None:
    api.calibrate("demo", model=None, output=None, threads=None)
    assert seen["loaded"].recipe.model.path == "builtin:nano"


def test_a_none_inside_a_section_is_a_value(seen: dict[str, Any]) -> None:
    api.calibrate("demo", calibrate={"split": None})
    assert seen["loaded"].recipe.calibrate.split is None


def test_a_dict_is_a_recipe(seen: dict[str, Any]) -> None:
    api.calibrate({"model": {"path": "x"}, "calibrate": {"samples": 3}})
    assert seen["loaded"].recipe.calibrate.samples == 3


def test_an_unknown_keyword_is_an_unknown_key(seen: dict[str, Any]) -> None:
    with pytest.raises(RecipeProblems, match="mdoel: unknown key; did you mean model"):
        api.calibrate("demo", mdoel="x")  # type: ignore[call-arg]
    assert seen == {}


def test_overwrite_and_resume_exclude_each_other(seen: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="exclude each other"):
        api.calibrate(overwrite=True, resume=True)
    assert seen == {}


def test_the_functions_of_the_contract_are_there() -> None:
    for name in ("calibrate", "quantize_awq", "quantize_int8", "export", "evaluate", "bench", "run", "doctor"):
        assert callable(getattr(api, name))
