"""run: sections in pipeline order, their results together, what is done already not done again."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from qvlopt.commands import run as module
from qvlopt.commands.output import output_folder
from qvlopt.commands.plan import Plan, PlanRow
from qvlopt.commands.run import CHECKS, COMMANDS, RunResult, run
from qvlopt.errors import QvloptError, RunError, UsageError
from qvlopt.recipe.load import LoadedRecipe, load_recipe
from tests.documents import check_document, document_of
from tests.tiny import build_tiny
from tests.tiny_run import PLAIN, SMALL, build_set, listing, tiny_recipe

BASE = {"name": "mine", "model": {"path": "x"}, "output": "there"}


@dataclass(frozen=True)
class Fake:
    """A finished command: its status, JSON and line."""

    exit_code: int = 0
    document: dict[str, Any] = field(default_factory=dict)
    existed: bool = False

    def to_json(self) -> dict[str, Any]:
        return self.document

    def render(self, console: Console) -> None:
        console.print(f"result of {self.document['output']}")


@dataclass
class Commands:
    """Fakes in place of the commands; `called` is what they were called with, in order, `checked` what was checked after how many calls."""

    results: dict[str, Fake] = field(default_factory=dict)
    called: list[tuple[str, LoadedRecipe, dict[str, Any]]] = field(default_factory=list)
    checked: list[tuple[str, int]] = field(default_factory=list)

    def fetch(self, _loaded: LoadedRecipe, _wanted: Sequence[str]) -> None:
        self.checked.append(("fetch", len(self.called)))

    def check(self, section: str, _loaded: LoadedRecipe) -> None:
        self.checked.append((section, len(self.called)))

    def of(self, section: str) -> Callable[..., Fake | Plan]:
        def command(loaded: LoadedRecipe, **how: Any) -> Fake | Plan:
            self.called.append((section, loaded, how))
            if how.get("dry_run"):
                return Plan(loaded, (PlanRow("writes", section),))
            return self.results.get(section, Fake(document={"output": f"there/{section}"}))

        return command


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> Commands:
    fakes = Commands()
    monkeypatch.setattr(module, "_fetch", fakes.fetch)
    for section in list(COMMANDS):
        monkeypatch.setitem(module.COMMANDS, section, fakes.of(section))
    for section in list(CHECKS):
        monkeypatch.setitem(module.CHECKS, section, partial(fakes.check, section))
    return fakes


def ran(recipe: dict[str, Any], **how: Any) -> RunResult:
    result = run(load_recipe({**BASE, **recipe}), **how)
    assert isinstance(result, RunResult)
    return result


def test_sections_run_in_pipeline_order_whatever_the_files(commands: Commands) -> None:
    result = ran({"evaluate": {}, "quantize-awq": {}, "calibrate": {}})
    assert [section for section, _, _ in commands.called] == ["calibrate", "quantize_awq", "evaluate"]
    assert [step.command for step in result.steps] == ["calibrate", "quantize_awq", "evaluate"]
    assert [step.status for step in result.steps] == ["done"] * 3


def test_only_the_recipes_own_sections_run(commands: Commands) -> None:
    assert [step.command for step in ran({"quantize_awq": {}}).steps] == ["quantize_awq"]
    assert len(commands.called) == 1


def test_what_existed_is_told_apart_from_what_was_done(commands: Commands) -> None:
    commands.results["calibrate"] = Fake(document={"output": "there/calibrate"}, existed=True)
    assert [(step.command, step.status) for step in ran({"calibrate": {}, "quantize_awq": {}}).steps] == [
        ("calibrate", "existed"),
        ("quantize_awq", "done"),
    ]


@pytest.mark.parametrize(("code", "status"), [(0, "done"), (1, "failed"), (3, "failed"), (4, "failed")])
def test_the_evaluations_verdict_and_status_are_the_runs(commands: Commands, code: int, status: str) -> None:
    commands.results["evaluate"] = Fake(code, {"output": "there/evaluate", "verdict": "fail" if code == 1 else "pass"})
    result = ran({"quantize_awq": {}, "evaluate": {}})
    assert result.exit_code == code
    assert result.verdict == ("fail" if code == 1 else "pass")
    assert result.steps[-1].status == status


def test_without_an_evaluation_there_is_no_verdict(commands: Commands) -> None:
    assert commands.called == []
    assert ran({"calibrate": {}}).verdict is None


def test_the_worst_status_of_all_steps_counts(commands: Commands) -> None:
    commands.results["calibrate"] = Fake(3, {"output": "a"})
    commands.results["quantize_awq"] = Fake(4, {"output": "b"})
    commands.results["evaluate"] = Fake(1, {"output": "c", "verdict": "fail"})
    assert ran({"calibrate": {}, "quantize_awq": {}, "evaluate": {}}).exit_code == 4


def test_a_recipe_with_nothing_to_run_is_refused(commands: Commands) -> None:
    with pytest.raises(UsageError, match="has no section to run"):
        ran({})
    assert commands.called == []


def test_options_reach_every_step(commands: Commands) -> None:
    ran({"calibrate": {}, "quantize_awq": {}}, overwrite=True)
    assert [how for _, _, how in commands.called] == [{"overwrite": True, "resume": False, "progress": None}] * 2


def test_the_option_names_the_root_of_all_sections(commands: Commands) -> None:
    result = run(load_recipe({**BASE, "calibrate": {}}, flags={"output": "here"}))
    assert isinstance(result, RunResult)
    assert output_folder(commands.called[0][1], "calibrate") == Path("here/calibrate")
    assert result.output == Path("here")


def test_a_step_that_fails_ends_the_run(commands: Commands, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_args: Any, **_how: Any) -> Fake:
        raise RunError("no memory")

    monkeypatch.setitem(module.COMMANDS, "quantize_awq", fails)
    with pytest.raises(RunError, match="no memory"):
        ran({"calibrate": {}, "quantize_awq": {}, "evaluate": {}})
    assert [section for section, _, _ in commands.called] == ["calibrate"]


def test_every_later_section_is_checked_before_the_first_one_works(commands: Commands) -> None:
    ran({"calibrate": {}, "quantize_awq": {}, "evaluate": {}})
    assert commands.checked == [("fetch", 0), ("quantize_awq", 0), ("evaluate", 0)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"quantize_awq": {"group_size": 7}}, "group_size 7 does not fit"),
        ({"evaluate": {"data": [{"name": "ocr", "path": "nowhere", "task": "ocr"}]}}, "there is no set nowhere"),
    ],
)
def test_a_fault_of_a_later_section_leaves_nothing(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    loaded = tiny_recipe(build_tiny(tmp_path / "tiny", **SMALL), build_set(tmp_path / "set"), tmp_path / "out", **change)
    with pytest.raises(QvloptError, match=message):
        run(loaded)
    assert not (tmp_path / "out").exists()


def test_a_dry_run_plans_every_step(commands: Commands) -> None:
    plan = run(load_recipe({**BASE, "calibrate": {}, "quantize_awq": {}}), dry_run=True)
    assert isinstance(plan, Plan)
    assert [row.value for row in plan.rows] == ["calibrate", "quantize_awq"]
    assert all(how["dry_run"] for _, _, how in commands.called)
    check_document(document_of("run", plan.to_json()))


def test_the_result_is_a_valid_document_with_the_contracts_names(commands: Commands) -> None:
    commands.results["evaluate"] = Fake(3, {"output": "there/evaluate/x", "verdict": "inconclusive"})
    document = document_of("run", ran({"quantize_awq": {}, "evaluate": {}, "bench": {}}).to_json(), exit_code=3)
    check_document(document)
    assert [(step["command"], step["status"], step["output"]) for step in document["steps"]] == [
        ("quantize-awq", "done", "there/quantize_awq"),
        ("evaluate", "failed", "there/evaluate/x"),
        ("bench", "done", "there/bench"),
    ]
    assert (document["verdict"], document["output"]) == ("inconclusive", "there")


def test_people_see_every_steps_own_result_and_a_line_each(commands: Commands) -> None:
    assert commands.results == {}
    console = Console(file=io.StringIO(), width=100)
    ran({"calibrate": {}, "quantize_awq": {}}).render(console)
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    assert lines[:2] == ["result of there/calibrate", "result of there/quantize_awq"]
    assert [line.split(" in ")[0] for line in lines[2:]] == ["calibrate: done", "quantize-awq: done"]


def test_calibrating_and_quantising_for_real_twice_does_the_work_once(tmp_path: Path) -> None:
    recipe = tiny_recipe(build_tiny(tmp_path / "tiny", **SMALL), build_set(tmp_path / "set"), tmp_path / "out", quantize_awq={"search": PLAIN})
    first = run(recipe)
    before = listing(tmp_path / "out")
    second = run(recipe)
    assert isinstance(first, RunResult)
    assert isinstance(second, RunResult)
    assert [step.status for step in first.steps] == ["done", "done"]
    assert [step.status for step in second.steps] == ["existed", "existed"]
    assert listing(tmp_path / "out") == before
    assert [step.output for step in second.steps] == [str(tmp_path / "out" / name) for name in ("calibrate", "awq")]
