"""evaluate: the same items put to base and candidates, scores joined item by item, a verdict, and a report folder."""

from __future__ import annotations

import logging
import os
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy
import PIL

import qvlopt
from qvlopt.artifact.amend import amend_file
from qvlopt.artifact.manifest import MANIFEST
from qvlopt.artifact.process import peak_rss_bytes
from qvlopt.commands.evaluate_inputs import find_targets, read_sets, refuse_later_features
from qvlopt.commands.output import output_folder
from qvlopt.commands.plan import Plan, PlanRow
from qvlopt.errors import RunError, UsageError
from qvlopt.recipe.load import LoadedRecipe
from qvlopt.report.card import CARD, Score, with_scores
from qvlopt.report.plain import json_text, safe
from qvlopt.report.progress import Progress, SilentProgress
from qvlopt.report.tables import markdown_text, to_markdown, to_rich
from qvlopt.report.write import jsonl_text, new_folder, prepare_parent, write_report
from qvlopt.scoring.compare import Comparison, Rule, compare
from qvlopt.scoring.documents import comparison_json, item_rows
from qvlopt.scoring.evaluate import EngineRun, EvalSet, OpenEngine, Target, run_engine
from qvlopt.scoring.gate import MetricVerdict, OnInconclusive, Verdict, exit_status, worst
from qvlopt.scoring.intervals import tango, z_value
from qvlopt.scoring.summary import score_table, sentences, tables

if TYPE_CHECKING:
    from rich.console import Console

log = logging.getLogger(__name__)

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class EvaluateResult:
    """`report` is the folder with report.json, report.md and items.jsonl."""

    report: Path
    comparisons: tuple[Comparison, ...]
    on_inconclusive: OnInconclusive

    @property
    def verdict(self) -> Verdict:
        return worst(comparison.verdict for comparison in self.comparisons)

    @property
    def exit_code(self) -> int:
        return exit_status(self.verdict, self.on_inconclusive)

    def to_json(self) -> dict[str, Any]:
        results = [comparison_json(comparison) for comparison in self.comparisons]
        return {"output": str(self.report), "verdict": self.verdict, "results": results, "report": str(self.report / "report.md")}

    def render(self, console: Console) -> None:
        for comparison in self.comparisons:
            console.print(to_rich(score_table(comparison)))
            for sentence in sentences(comparison):
                console.print(safe(sentence), markup=False, highlight=False, soft_wrap=True)
        console.print(safe(f"verdict: {self.verdict}"), markup=False, highlight=False)
        console.print(safe(f"report: {self.report / 'report.md'}"), markup=False, highlight=False, soft_wrap=True)


def evaluate(
    loaded: LoadedRecipe,
    candidates: Sequence[str] = (),
    *,
    overwrite: bool = False,
    resume: bool = False,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> EvaluateResult | Plan:
    """Writes `<output>/evaluate/<time stamp>`, whatever the verdict; earlier reports stay, so `overwrite` changes nothing.

    Candidates are artifact folders or `model`; none means every finished artifact under the recipe's output, else the
    source. Raises UsageError, NotComparableError (no baseline) and RunError, and then writes nothing.
    """
    del overwrite, resume
    if dry_run:
        refuse_later_features(loaded)
        return Plan(loaded, _plan_rows(loaded, find_targets(loaded, candidates), read_sets(loaded).sets))
    return evaluate_with(_engines(loaded), loaded, candidates, progress=progress)


def evaluate_with(
    open_engine: OpenEngine, loaded: LoadedRecipe, candidates: Sequence[str] = (), *, progress: Progress | None = None
) -> EvaluateResult:
    """`evaluate` with engines of the caller's choice. One is open at a time, and each path answers once."""
    began, started = time.monotonic(), datetime.now(UTC)
    refuse_later_features(loaded)
    targets, (sets, remarks) = find_targets(loaded, candidates), read_sets(loaded)
    for remark in remarks:
        log.warning("%s", remark)
    _check_place(output_folder(loaded, "evaluate"))
    runs = _run_all(open_engine, targets, sets, loaded.recipe.evaluate.batch, progress or SilentProgress())
    comparisons = tuple(_compared(target, runs, sets, loaded) for target in targets)
    rest = {
        "seconds": round(time.monotonic() - began, 3),
        "peak_rss_bytes": peak_rss_bytes(),
        "warnings": list(remarks),
        "fingerprint": _fingerprint(loaded, sets, runs),
    }
    result = _write(output_folder(loaded, "evaluate"), started, comparisons, loaded.recipe.evaluate.gate.on_inconclusive, rest)
    for target, comparison in zip(targets, comparisons, strict=True):
        _record_on_card(Path(target.path), comparison)
    return result


def _check_place(parent: Path) -> None:
    """Raises UsageError or RunError, before the work, when no report could be written below `parent`."""
    if os.path.exists(parent) and not parent.is_dir():
        raise UsageError(f"{parent} is not a folder", "move it away, or choose another --output")
    try:
        prepare_parent(parent)
    except OSError as error:
        raise RunError(f"no report can be written below {parent}: {error.strerror}", "choose another --output") from error


def _write(
    parent: Path, started: datetime, comparisons: tuple[Comparison, ...], on_inconclusive: OnInconclusive, rest: Mapping[str, Any]
) -> EvaluateResult:
    """Writes the report under the first name that no other run has taken or takes meanwhile."""
    while True:
        result = EvaluateResult(new_folder(parent, started.strftime("%Y%m%dT%H%M%SZ")), comparisons, on_inconclusive)
        common = {"schema_version": SCHEMA_VERSION, "tool": "qvlopt", "version": qvlopt.__version__, "command": "evaluate"}
        document = {**common, "exit_code": result.exit_code, **rest, **result.to_json()}
        if write_report(result.report, _files(result, document)):
            return result


def _record_on_card(folder: Path, comparison: Comparison) -> None:
    """Puts the scores on the artifact's own card, where it is one of ours and nobody edited the card."""
    compared = [metric for each in comparison.sets for metric in each.metrics if metric.is_primary and metric.figures]
    rows = [row for metric in compared if metric.figures and (row := _score(metric.name, metric.figures, metric.metric.name))]
    if not rows or not (folder / MANIFEST).is_file() or not (folder / CARD).is_file():
        return
    try:
        text = with_scores((folder / CARD).read_text(encoding="utf-8", errors="replace"), rows)
        kept = not amend_file(folder, CARD, text)
    except (OSError, RunError) as error:
        # the scores are in the report; an artifact in a read-only place, or in use by another run, is no failure
        reason = error.message if isinstance(error, RunError) else error.strerror
        log.warning("%s: the scores could not be put on the card (%s)", folder / CARD, reason)
        return
    if kept:
        log.warning("%s was edited, so the scores were not put on it", folder / CARD)


def _score(name: str, figures: MetricVerdict, metric: str) -> Score | None:
    numbers = (figures.base, figures.candidate, figures.ci_low, figures.ci_high)
    return None if None in numbers else Score(name, metric, figures.n, *numbers, figures.verdict)  # type: ignore[arg-type]


def _engines(loaded: LoadedRecipe) -> OpenEngine:
    from qvlopt.runtime import open_engine

    return lambda path: open_engine(path, loaded=loaded)


def _run_all(open_engine: OpenEngine, targets: Sequence[Target], sets: Sequence[EvalSet], batch: int, progress: Progress) -> dict[str, EngineRun]:
    """The work of every engine that some target needs, by its path."""
    runs: dict[str, EngineRun] = {}
    try:
        for path in dict.fromkeys(path for target in targets for path in (target.base, target.path) if path is not None):
            runs[path] = run_engine(open_engine(path), sets, batch=batch, progress=progress, label=f"evaluate {path}")
    finally:
        progress.finish()
    return runs


def _compared(target: Target, runs: Mapping[str, EngineRun], sets: Sequence[EvalSet], loaded: LoadedRecipe) -> Comparison:
    gate = loaded.recipe.evaluate.gate
    rule = Rule(margin=gate.margin, alpha=gate.alpha, max_failed=gate.max_failed, floors=gate.floors)
    return compare(target, (runs[target.base] if target.base else None, runs[target.path]), sets, rule)


def _files(result: EvaluateResult, document: Mapping[str, Any]) -> dict[str, str]:
    rows = [row for comparison in result.comparisons for row in item_rows(comparison)]
    return {"report.json": json_text(document) + "\n", "items.jsonl": jsonl_text(rows), "report.md": _markdown(result, document)}


def _markdown(result: EvaluateResult, document: Mapping[str, Any]) -> str:
    parts = [f"## Evaluation: {markdown_text(result.verdict)}", ""]
    for comparison in result.comparisons:
        parts += [f"- {markdown_text(sentence)}" for sentence in sentences(comparison)]
        parts += ["", *(to_markdown(table) for table in tables(comparison))]
    remarks = [f"- {markdown_text(remark)}" for remark in document["warnings"]]
    return "\n".join([*parts, *remarks, "Conditions, digests and versions are in report.json, every answer is in items.jsonl.", ""])


def _fingerprint(loaded: LoadedRecipe, sets: Sequence[EvalSet], runs: Mapping[str, EngineRun]) -> dict[str, Any]:
    """Everything that the numbers depend on besides the code: items, prompts, generation, pictures, engines, versions."""
    recipe = loaded.recipe
    data = [
        entry.model_dump(mode="json") | {"digest": each.digest, "items": len(each.chosen), "max_new_tokens": each.max_new_tokens}
        for entry, each in zip(recipe.evaluate.data, sets, strict=True)
    ]
    versions = {"python": platform.python_version(), "numpy": numpy.__version__, "pillow": PIL.__version__, "qvlopt": qvlopt.__version__}
    engines = {path: dict(run.fingerprint) for path, run in runs.items()}
    gate = recipe.evaluate.gate.model_dump(mode="json")
    return {"data": data, "batch": recipe.evaluate.batch, "seed": recipe.seed, "gate": gate, "engines": engines, "versions": versions}


def _plan_rows(loaded: LoadedRecipe, targets: Sequence[Target], sets: Sequence[EvalSet]) -> tuple[PlanRow, ...]:
    gate = loaded.recipe.evaluate.gate
    rows = [PlanRow("candidate", f"{target.name} against {target.base or 'nothing: scored only'}") for target in targets]
    for each in sets:
        pictures = len({sample.cluster for sample in each.samples})
        reach = 100 * tango(0, 0, max(1, pictures), z_value(1 - gate.alpha)).high
        rows.append(PlanRow(f"set {each.name}", f"{len(each.samples)} items about {pictures} pictures, {len(each.skipped)} unusable"))
        rows.append(PlanRow("can tell", f"drops of {reach:.2f} points and more at best, margin {100 * gate.margin:.2f}"))
    return (*rows, PlanRow("writes", str(output_folder(loaded, "evaluate") / "TIME")))
