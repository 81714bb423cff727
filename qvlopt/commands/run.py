"""run: the sections that a recipe has, in pipeline order; what is already done, by digest, is skipped."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from qvlopt.commands.bench import bench
from qvlopt.commands.bench_inputs import check_bench
from qvlopt.commands.calibrate import calibrate
from qvlopt.commands.calibration_data import Asked
from qvlopt.commands.evaluate import evaluate
from qvlopt.commands.evaluate_inputs import check_sets
from qvlopt.commands.export import export
from qvlopt.commands.output import as_root, output_root
from qvlopt.commands.plan import Plan
from qvlopt.commands.quantize_awq import quantize_awq
from qvlopt.commands.quantize_int8 import quantize_int8
from qvlopt.errors import UsageError, worst_exit_code
from qvlopt.model.source import open_source
from qvlopt.recipe.load import LoadedRecipe
from qvlopt.report.progress import Progress

if TYPE_CHECKING:
    from rich.console import Console


class _Result(Protocol):
    @property
    def exit_code(self) -> int: ...

    def to_json(self) -> dict[str, Any]: ...

    def render(self, console: Console) -> None: ...


COMMANDS: dict[str, Callable[..., _Result]] = {
    "calibrate": calibrate,
    "quantize_awq": quantize_awq,
    "export": export,
    "quantize_int8": quantize_int8,
    "evaluate": evaluate,
    "bench": bench,
}
"""What works through each section."""

CHECKS: dict[str, Callable[[LoadedRecipe], object]] = {
    "quantize_awq": partial(quantize_awq, dry_run=True),
    "export": partial(export, dry_run=True),
    "quantize_int8": partial(quantize_int8, dry_run=True),
    "evaluate": check_sets,
    "bench": check_bench,
}
"""What finds the faults of a section that comes later, without work."""


@dataclass(frozen=True)
class Step:
    """One section of the recipe: `status` is done, existed or failed (a gate's verdict)."""

    command: str
    status: str
    output: str | None
    seconds: float
    result: _Result


@dataclass(frozen=True)
class RunResult:
    """The steps in order; `verdict` is the evaluation's, or None where the recipe has none."""

    output: Path
    steps: tuple[Step, ...]
    verdict: str | None

    @property
    def exit_code(self) -> int:
        return worst_exit_code(step.result.exit_code for step in self.steps)

    def to_json(self) -> dict[str, Any]:
        steps = [{"command": s.command.replace("_", "-"), "status": s.status, "output": s.output, "seconds": s.seconds} for s in self.steps]
        return {"output": str(self.output), "steps": steps, "verdict": self.verdict}

    def render(self, console: Console) -> None:
        for step in self.steps:
            step.result.render(console)
        for step in self.steps:
            console.print(f"{step.command.replace('_', '-')}: {step.status} in {step.seconds:.0f} s", highlight=False)


def run(
    loaded: LoadedRecipe, *, overwrite: bool = False, resume: bool = False, dry_run: bool = False, progress: Progress | None = None
) -> RunResult | Plan:
    """Works through the sections. Raises UsageError when the recipe has none."""
    loaded = as_root(loaded)
    wanted = loaded.sections
    if not wanted:
        raise UsageError(f"{loaded.source}: has no section to run", f"add one of {', '.join(COMMANDS)}")
    how = {"overwrite": overwrite, "resume": resume, "progress": progress}
    if dry_run:
        plans = [COMMANDS[section](loaded, dry_run=True, **how) for section in wanted]
        return Plan(loaded, tuple(row for plan in plans if isinstance(plan, Plan) for row in plan.rows))
    _fetch(loaded, wanted)
    for section in wanted[1:]:  # what is wrong later on ends the run before hours of work, not after them
        CHECKS[section](loaded)
    steps = [_step(section, loaded, how) for section in wanted]
    verdict = next((s.result.to_json().get("verdict") for s in steps if s.command == "evaluate"), None)
    return RunResult(output_root(loaded), tuple(steps), verdict)


def _fetch(loaded: LoadedRecipe, wanted: Sequence[str]) -> None:
    """Gets what is on the hub before the checks, which fetch nothing."""
    model = loaded.recipe.model
    if not {"calibrate", "quantize_awq", "quantize_int8"}.isdisjoint(wanted):
        Asked.by(loaded)
    elif "export" in wanted:
        open_source(model.path, revision=model.revision, folder=loaded.folder)


def _step(section: str, loaded: LoadedRecipe, how: dict[str, Any]) -> Step:
    began = time.monotonic()
    result = COMMANDS[section](loaded, **how)
    existed = bool(getattr(result, "existed", False))
    status = "failed" if result.exit_code else "existed" if existed else "done"
    return Step(section, status, result.to_json().get("output"), time.monotonic() - began, result)
