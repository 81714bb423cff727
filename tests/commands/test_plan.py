from __future__ import annotations

import io
from pathlib import Path

from rich.console import Console

from qvlopt.commands.plan import Plan, PlanRow, resolved_values
from qvlopt.recipe.load import load_recipe
from tests.documents import check_document, document_of

LOADED = load_recipe("demo", overrides=["seed=7", "evaluate.gate.floors={ocr: 0.5}"], flags={"output": "there"})


def test_every_value_of_the_recipe_is_resolved_with_its_origin() -> None:
    values = {key: (value, origin) for key, value, origin in resolved_values(LOADED)}
    assert set(values) == set(LOADED.origins)
    assert values["seed"] == (7, "--set")
    assert values["output"] == ("there", "--output")
    assert values["quantize_awq.keep"] == (["lm_head"], "default")
    assert values["evaluate.batch"][0] == 16
    assert values["evaluate.gate.floors"] == ({"ocr": 0.5}, "--set")
    assert values["pixels"] == (None, "default")


def test_a_plan_is_a_valid_document_of_any_command() -> None:
    plan = Plan(LOADED, (PlanRow("writes", "out/demo/awq"),))
    for command in ("calibrate", "quantize-awq", "evaluate", "run"):
        check_document(document_of(command, plan.to_json()))
    assert plan.exit_code == 0


def test_a_plan_shows_values_as_a_recipe_would_hold_them() -> None:
    stream = io.StringIO()
    Plan(LOADED, (PlanRow("writes", "out/[demo]/awq"),)).render(Console(file=stream, width=140, markup=False))
    text = stream.getvalue()
    for part in ("seed", "--set", "null", "true", "[lm_head]", "nothing is written", "out/[demo]/awq"):
        assert part in text


def test_a_hostile_name_of_a_recipe_is_shown_and_not_obeyed(tmp_path: Path) -> None:
    path = tmp_path / "\x1b[31m[red]x.yaml"
    path.write_text("model: {path: m}\n", encoding="utf-8")
    stream = io.StringIO()
    Plan(load_recipe(path), ()).render(Console(file=stream, width=400, markup=False))
    assert "\\x1b[31m[red]x.yaml" in stream.getvalue()
    assert "\x1b" not in stream.getvalue()
