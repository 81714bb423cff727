"""What ships with the package: every recipe is right, and names find their folders."""

from __future__ import annotations

import re

import pytest

from qvlopt.errors import UsageError
from qvlopt.recipe.load import load_recipe
from qvlopt.recipe.shipped import builtin, shipped_names, shipped_recipe, shipped_root

SHIPPED = shipped_names("recipes")


def test_the_recipes_that_the_contract_names_ship() -> None:
    assert {"demo", "4090d", "3090", "a100", "orin"} <= set(SHIPPED)


@pytest.mark.parametrize("name", SHIPPED)
def test_every_shipped_recipe_is_right(name: str) -> None:
    assert load_recipe(name).sections


@pytest.mark.parametrize("name", SHIPPED)
def test_the_first_line_is_the_command_that_runs_it(name: str) -> None:
    path = shipped_recipe(name)
    assert path is not None
    first = path.read_text(encoding="utf-8").splitlines()[0]
    assert first in (f"# qvlopt run --recipe {name}", f"# qvlopt run --recipe recipes/{name}.yaml")


@pytest.mark.parametrize("name", ["3090", "4090d", "a100", "orin"])
def test_a_recipe_for_hardware_says_where_its_numbers_come_from(name: str) -> None:
    path = shipped_recipe(name)
    assert path is not None
    text = path.read_text(encoding="utf-8")
    for key in ("samples", "group_size", "grid: 20", "batch: [0-9]+ ", "margin"):
        (line,) = [line for line in text.splitlines() if re.search(rf"\b{key}", line)]
        assert re.search(r"#.*(measured|unmeasured|quoted|chosen)", line), line


def test_demo_needs_nothing_but_what_ships() -> None:
    recipe = load_recipe("demo").recipe
    paths = [recipe.model.path, recipe.calibrate.data, *(entry.path for entry in recipe.evaluate.data)]
    assert all(path.startswith("builtin:") for path in paths)
    assert [entry.limit for entry in recipe.evaluate.data] == [None, None, None]
    assert recipe.evaluate.gate.margin == 0.02


def test_the_4090d_recipe_keeps_lm_head_in_float16() -> None:
    awq = load_recipe("4090d").recipe.quantize_awq
    assert (awq.bits, awq.group_size, awq.format, awq.dtype, awq.keep) == (4, 128, "awq", "float16", ("lm_head",))


def test_the_default_calibration_set_ships() -> None:
    recipe = load_recipe("4090d").recipe
    assert builtin(recipe.calibrate.data, "calib") == shipped_root("calib") / "general"


@pytest.mark.parametrize(("path", "kind"), [("builtin:nano", "assets"), ("builtin:nano", "calib"), ("builtin:nano-eval", "calib")])
def test_builtin_names_find_their_folders(path: str, kind: str) -> None:
    folder = builtin(path, kind)  # type: ignore[arg-type]
    assert folder == shipped_root(kind) / path.removeprefix("builtin:")  # type: ignore[arg-type]
    assert any(folder.iterdir())


@pytest.mark.parametrize("path", ["builtin:nono", "builtin:../recipes", "builtin:", "builtin:/etc", "builtin:nano/../nano"])
def test_a_builtin_name_that_does_not_exist_is_a_usage_error(path: str) -> None:
    with pytest.raises(UsageError, match="there is no set"):
        builtin(path, "calib")
