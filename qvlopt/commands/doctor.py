"""doctor: will a recipe fit and run here? Packages, processors, memory and disk, and what every stage will take of them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch

from qvlopt.artifact.process import available_memory_bytes, memory_limit_bytes, processor_quota, thread_count
from qvlopt.commands.forecast import Forecast, forecasts, lasting, sized
from qvlopt.commands.hardware import prepare
from qvlopt.commands.output import output_root
from qvlopt.commands.plan import Plan, PlanRow
from qvlopt.errors import NotFetchedError, QvloptError
from qvlopt.recipe.load import LoadedRecipe
from qvlopt.report.plain import safe
from qvlopt.report.progress import Progress

if TYPE_CHECKING:
    from rich.console import Console

Status = Literal["ok", "warn", "fail"]
FAILED = 5
LEAST_SPARE = 1.25
"""Predictions may be off by a quarter: what fits with less than that to spare gets a warning."""


class Check(NamedTuple):
    """One thing that must be so for the recipe to run: what was found, and whether it will do."""

    name: str
    status: Status
    detail: str


@dataclass(frozen=True)
class DoctorResult:
    """`stages` is empty where the inputs could not be read: then a check says why."""

    checks: tuple[Check, ...]
    stages: tuple[Forecast, ...]

    @property
    def exit_code(self) -> int:
        return FAILED if any(check.status == "fail" for check in self.checks) else 0

    def to_json(self) -> dict[str, Any]:
        return {"output": None, "checks": [check._asdict() for check in self.checks], "stages": [stage.to_json() for stage in self.stages]}

    def render(self, console: Console) -> None:
        from rich.table import Table

        checks = Table("check", "", "found", title="doctor", title_justify="left")
        for check in self.checks:
            checks.add_row(check.name, check.status, safe(check.detail))
        console.print(checks)
        if self.stages:
            table = Table("stage", "memory", "disk", "time", "", title="what it will take here", title_justify="left")
            for stage in self.stages:
                table.add_row(stage.name, sized(stage.rss_bytes), sized(stage.disk_bytes), lasting(stage.seconds), stage.basis)
            console.print(table)
        console.print("this recipe will not run here" if self.exit_code else "this recipe can run here", highlight=False)


def doctor(
    loaded: LoadedRecipe, *, overwrite: bool = False, resume: bool = False, dry_run: bool = False, progress: Progress | None = None
) -> DoctorResult | Plan:
    """Reads headers, runs for about a second to see how fast this machine is, and writes nothing. Fetches nothing from a hub."""
    del overwrite, resume, progress
    if dry_run:
        return Plan(loaded, (PlanRow("reads", "headers of the model and of the sets; writes nothing"),))
    device = prepare(loaded)
    checks = [*_package_checks(loaded), *_hardware_checks(loaded, device)]
    try:
        stages = forecasts(loaded, device)
    except NotFetchedError as error:
        return DoctorResult((*checks, Check("inputs", "warn", f"{error.message}; a run fetches it, and then doctor says what it takes")), ())
    except QvloptError as error:
        return DoctorResult((*checks, Check("inputs", "fail", str(error))), ())
    sets = [each.path for each in loaded.recipe.evaluate.data] if "evaluate" in loaded.sections else []
    read = dict.fromkeys([loaded.recipe.model.path, loaded.recipe.calibrate.data, *sets])
    checks += [Check("inputs", "ok", f"can be read: {', '.join(read)}"), *_fit_checks(loaded, stages)]
    return DoctorResult(tuple(checks), stages)


def _package_checks(loaded: LoadedRecipe) -> Iterator[Check]:
    """Every package that the installed distribution asks for, by its own requirements."""
    wrong = list(_unmet())
    yield Check("packages", "fail" if wrong else "ok", "; ".join(wrong) or f"torch {torch.__version__}, transformers {version('transformers')}")
    if loaded.recipe.quantize_awq.engine == "autoawq":
        try:
            yield Check("autoawq", "ok", f"autoawq {version('autoawq')}")
        except PackageNotFoundError:
            yield Check("autoawq", "fail", "quantize_awq.engine: autoawq needs the package autoawq 0.2.9 (extra autoawq)")


def _unmet() -> Iterator[str]:
    from packaging.requirements import Requirement

    try:
        requirements = distribution("qvlopt").requires or []
    except PackageNotFoundError:  # run from a checkout: nothing is declared
        return
    for requirement in map(Requirement, requirements):
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            found = version(requirement.name)
        except PackageNotFoundError:
            yield f"{requirement.name} is missing"
            continue
        if found not in requirement.specifier:
            yield f"{requirement.name} is {found}, expected {requirement.specifier}"


def _hardware_checks(loaded: LoadedRecipe, device: torch.device) -> Iterator[Check]:
    threads, quota = thread_count(loaded.recipe.hardware.threads), processor_quota()
    limits = f"{len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count()} processors allowed"
    yield Check("threads", "ok", f"{threads} will be used ({limits}{'' if quota is None else f', quota {quota:g}'})")
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    if load > threads:
        yield Check("load", "warn", f"{load:.1f} processes want {threads} processors: the times below are for a machine that has nothing else to do")
    if loaded.recipe.hardware.device == "cuda" and device.type != "cuda":
        needs = [name for name in ("evaluate", "bench") if name in loaded.sections]
        yield Check("device", "fail" if needs else "warn", f"cuda is not available; {', '.join(needs) or 'nothing in this recipe'} needs it")
    else:
        yield Check("device", "ok", str(device))
    yield Check("memory", "ok", f"{sized(available_memory_bytes())} available of {sized(memory_limit_bytes())}")


def _fit_checks(loaded: LoadedRecipe, stages: Sequence[Forecast]) -> Iterator[Check]:
    """Memory for the largest stage, and disk for all of them: what they leave adds up."""
    if not stages:
        yield Check("stages", "warn", "the recipe has no section to run")
        return
    largest = max(stages, key=lambda stage: stage.rss_bytes)
    yield _fits("memory of stages", largest.rss_bytes, available_memory_bytes(), f"{largest.name} is the largest")
    place = Path(os.path.realpath(output_root(loaded)))
    while not place.exists():
        place = place.parent
    yield _fits("disk", sum(stage.disk_bytes for stage in stages), shutil.disk_usage(place).free, f"under {place}")
    if not os.access(place, os.W_OK):
        yield Check("output", "fail", f"{place} cannot be written")


def _fits(name: str, needed: int, there: int, said: str) -> Check:
    status: Status = "fail" if needed > there else "warn" if needed * LEAST_SPARE > there else "ok"
    return Check(name, status, f"{sized(needed)} needed, {sized(there)} free; {said}")
