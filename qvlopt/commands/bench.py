"""bench: every engine put to the same fresh requests in turns, its stages, memory and limits, and whether it got slower."""

from __future__ import annotations

import logging
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qvlopt.artifact.process import peak_rss_bytes, thread_count
from qvlopt.commands.bench_compare import compare_run
from qvlopt.commands.bench_inputs import BenchTarget, SavedRun, find_bench_targets, saved_run, workload_of
from qvlopt.commands.bench_limits import dtypes_of, with_limits
from qvlopt.commands.bench_measure import Bench, engine_result
from qvlopt.commands.bench_page import html_page, machine, markdown_page
from qvlopt.commands.bench_plots import draw_plots
from qvlopt.commands.bench_probe import MachineProbe, machine_probe
from qvlopt.commands.bench_process import OpenProcess, engine_process
from qvlopt.commands.bench_scores import scores_of
from qvlopt.commands.bench_tables import bench_tables, headline, remarks
from qvlopt.commands.output import output_folder
from qvlopt.commands.plan import Plan, PlanRow
from qvlopt.commands.report_folder import check_report_place, document_head
from qvlopt.errors import RunError, worst_exit_code
from qvlopt.recipe.load import LoadedRecipe
from qvlopt.report.plain import json_text, safe
from qvlopt.report.progress import Progress, SilentProgress
from qvlopt.report.tables import to_rich
from qvlopt.report.write import new_folder, write_report
from qvlopt.timing.comparison import STATUS
from qvlopt.timing.environment import environment_record
from qvlopt.timing.plan import Workload
from qvlopt.timing.result import BenchFindings, EngineResult
from qvlopt.timing.roofline import Limits

if TYPE_CHECKING:
    from rich.console import Console

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class BenchResult:
    """`report` is the folder with report.json, report.md, report.html and the plots; `gate` is the recipe's, None for advice only."""

    report: Path
    findings: BenchFindings
    gate: float | None

    @property
    def exit_code(self) -> int:
        """5 when an engine or a call failed; the comparison's own status only where the recipe has a gate: 4 with nothing to compare."""
        failed = any(engine.errors for engine in self.findings.engines)
        verdict = self.findings.comparison.verdict
        return worst_exit_code([RunError.exit_code if failed else 0, STATUS[verdict or "not_comparable"] if self.gate is not None else 0])

    def to_json(self) -> dict[str, Any]:
        return {"output": str(self.report), **self.findings.to_json(), "gate": self.gate, "report": str(self.report / "report.md")}

    def render(self, console: Console) -> None:
        for table in bench_tables(self.findings):
            console.print(to_rich(table))
        for line in (*remarks(self.findings), machine(self.findings.environment), headline(self.findings), f"report: {self.report / 'report.html'}"):
            console.print(safe(line), markup=False, highlight=False, soft_wrap=True)
        if self.gate is None and self.findings.comparison.verdict:
            console.print("wall time is only advice here: set bench.gate to let it decide the status", markup=False, highlight=False)


def bench(
    loaded: LoadedRecipe,
    candidates: Sequence[str] = (),
    *,
    overwrite: bool = False,
    resume: bool = False,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> BenchResult | Plan:
    """Writes `<output>/bench/<time stamp>`, whatever the verdict; earlier reports stay, so `overwrite` changes nothing.

    Candidates are artifact folders, `model` for the source, or `URL#model` for a server; none means the source in float32
    and bfloat16 and every finished artifact under the recipe's output. Raises UsageError, NotComparableError (bench.compare
    is not there) and RunError, and then writes nothing; an engine that fails is part of the report.
    """
    del overwrite, resume
    if dry_run:
        return Plan(loaded, _plan_rows(loaded, find_bench_targets(loaded, candidates, fetch=False), workload_of(loaded)))
    return bench_with(engine_process, loaded, candidates, progress=progress)


def bench_with(open_process: OpenProcess, loaded: LoadedRecipe, candidates: Sequence[str] = (), *, progress: Progress | None = None) -> BenchResult:
    """`bench` with processes of the caller's choice."""
    began, started = time.monotonic(), datetime.now(UTC)
    saved, workload = saved_run(loaded), workload_of(loaded)
    check_report_place(output_folder(loaded, "bench"))
    targets = find_bench_targets(loaded, candidates)
    findings = _measured(open_process, loaded, targets, (workload, saved, len(candidates)), progress or SilentProgress())
    rest = {"seconds": round(time.monotonic() - began, 3), "peak_rss_bytes": peak_rss_bytes(), "warnings": []}
    return _write(output_folder(loaded, "bench"), started, findings, loaded, rest)


def _measured(
    open_process: OpenProcess,
    loaded: LoadedRecipe,
    targets: Sequence[BenchTarget],
    asked: tuple[Workload, SavedRun | None, int],
    progress: Progress,
) -> BenchFindings:
    workload, saved, named = asked
    threads = thread_count(loaded.recipe.hardware.threads)
    environment = environment_record(threads=loaded.recipe.hardware.threads)
    with tempfile.TemporaryDirectory(prefix="qvlopt-bench-") as pictures, machine_probe(open_process, threads) as machine:
        records = Bench(targets, workload, Path(pictures), threads, open_process, machine.pace, progress).run()
        engines = [engine_result(target, record, workload.cases) for target, record in zip(targets, records, strict=True)]
        environment["gpu"] = next((record.gpu for record in records if record.gpu), None)
        engines, limits = _with_limits(machine, list(zip(targets, engines, strict=True)), "cuda" if environment["gpu"] else "cpu")
    comparison = compare_run(engines, workload, environment, saved=saved, named=named, gate=loaded.recipe.bench.gate)
    return BenchFindings(workload, tuple(engines), comparison, environment, limits.to_json() if limits else None)


def _with_limits(machine: MachineProbe, pairs: Sequence[tuple[BenchTarget, EngineResult]], device: str) -> tuple[list[EngineResult], Limits | None]:
    """The engines against the limits of `device`. ONNX Runtime computes on the CPU, whose limits a GPU's are not."""
    there = [(target, engine) for target, engine in pairs if device == "cpu" or target.spec.kind == "torch"]
    limits = machine.limits(dtypes_of(there), device)
    if limits is None:
        return [engine for _, engine in pairs], None
    return [with_limits(target, engine, limits) if (target, engine) in there else engine for target, engine in pairs], limits


def _write(parent: Path, started: datetime, findings: BenchFindings, loaded: LoadedRecipe, rest: Mapping[str, Any]) -> BenchResult:
    """Writes the report under the first name that no other run has taken or takes meanwhile."""
    plots = draw_plots(findings, scores_of(loaded, findings.engines))
    while True:
        result = BenchResult(new_folder(parent, started.strftime("%Y%m%dT%H%M%SZ")), findings, loaded.recipe.bench.gate)
        document = {**document_head("bench"), "exit_code": result.exit_code, **rest, **result.to_json()}
        files: dict[str, str | bytes] = {"report.json": json_text(document) + "\n", "report.md": markdown_page(findings, plots)}
        files |= {"report.html": html_page(findings, plots)}
        files |= {f"{plot.name}.svg": plot.svg for plot in plots} | {f"{plot.name}.png": plot.png for plot in plots}
        if write_report(result.report, files):
            return result


def _plan_rows(loaded: LoadedRecipe, targets: Sequence[BenchTarget], workload: Workload) -> tuple[PlanRow, ...]:
    section = loaded.recipe.bench
    rows = [PlanRow("engine", f"{target.name}: {target.candidate}") for target in targets]
    rows += [PlanRow("case", f"{case.name}, {case.new_tokens} new tokens") for case in workload.cases]
    calls = len(targets) * len(workload.cases) * workload.iterations
    rows.append(PlanRow("calls", f"{calls} in {workload.rounds} processes an engine, {workload.warmup} of each case and process for warm-up"))
    if any(target.spec.kind == "openai" for target in targets):
        rows.append(PlanRow("network", "drawn pictures and prompts are sent to the servers named"))
    rows.append(PlanRow("compares with", section.compare or "nothing saved"))
    tells = "advice: status 0 whatever the times" if section.gate is None else f"slower by more than {100 * section.gate:.0f} % fails"
    return (*rows, PlanRow("gate", tells), PlanRow("writes", str(output_folder(loaded, "bench") / "TIME")))
