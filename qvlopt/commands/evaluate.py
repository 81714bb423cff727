"""evaluate: the same items put to base and candidates, scores joined item by item, a verdict, and a report folder."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qvlopt.artifact.amend import amend_file
from qvlopt.artifact.manifest import MANIFEST
from qvlopt.artifact.process import peak_rss_bytes
from qvlopt.commands.evaluate_baseline import Saving
from qvlopt.commands.evaluate_inputs import find_exports, find_targets, read_sets
from qvlopt.commands.evaluate_reports import NAMES, report_files, tell_ci
from qvlopt.commands.evaluate_runs import Asking, compare_all, do_work
from qvlopt.commands.output import output_folder
from qvlopt.commands.plan import Plan, PlanRow
from qvlopt.commands.report_folder import check_report_place, document_head
from qvlopt.errors import RunError
from qvlopt.recipe.load import LoadedRecipe
from qvlopt.recipe.schema import EvaluateSection
from qvlopt.report.card import CARD, Score, with_scores
from qvlopt.report.plain import json_text, safe
from qvlopt.report.progress import Progress, SilentProgress
from qvlopt.report.tables import markdown_text, to_markdown, to_rich
from qvlopt.report.write import jsonl_text, new_folder, write_report
from qvlopt.runtime.openai_address import Address
from qvlopt.scoring.cache_folder import cache_folder, keep_within
from qvlopt.scoring.compare import Comparison
from qvlopt.scoring.conditions import versions
from qvlopt.scoring.documents import comparison_json, item_rows
from qvlopt.scoring.evaluate import EngineRun, EvalSet, OpenEngine, Reuse, Target
from qvlopt.scoring.gate import MetricVerdict, OnInconclusive, Verdict, exit_status, worst
from qvlopt.scoring.intervals import tango, z_value
from qvlopt.scoring.summary import score_table, sentences, tables

if TYPE_CHECKING:
    from rich.console import Console

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class EvaluateResult:
    """`report` is the folder with report.json, items.jsonl and the `reports` that the recipe asks for."""

    report: Path
    comparisons: tuple[Comparison, ...]
    on_inconclusive: OnInconclusive
    reports: tuple[str, ...] = ("json", "md")

    @property
    def verdict(self) -> Verdict:
        return worst(comparison.verdict for comparison in self.comparisons)

    @property
    def exit_code(self) -> int:
        return exit_status(self.verdict, self.on_inconclusive)

    @property
    def for_people(self) -> Path:
        """The file of the report that a person opens first."""
        return self.report / next((NAMES[kind] for kind in NAMES if kind in self.reports and kind != "junit"), "report.json")

    def to_json(self) -> dict[str, Any]:
        results = [comparison_json(comparison) for comparison in self.comparisons]
        return {"output": str(self.report), "verdict": self.verdict, "results": results, "report": str(self.for_people)}

    def render(self, console: Console) -> None:
        for comparison in self.comparisons:
            console.print(to_rich(score_table(comparison)))
            for sentence in sentences(comparison):
                console.print(safe(sentence), markup=False, highlight=False, soft_wrap=True)
        console.print(safe(f"verdict: {self.verdict}"), markup=False, highlight=False)
        console.print(safe(f"report: {self.for_people}"), markup=False, highlight=False, soft_wrap=True)


def evaluate(
    loaded: LoadedRecipe,
    candidates: Sequence[str] = (),
    *,
    overwrite: bool = False,
    resume: bool = False,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> EvaluateResult | Plan:
    """Writes `<output>/evaluate/<time stamp>`, whatever the verdict; earlier reports stay.

    Answers that were given before under the same conditions are not asked again, those of servers only with `resume`;
    `overwrite` asks all anew and replaces a baseline file.
    Candidates are artifact folders or `model`; none means every finished artifact under the recipe's output, else the
    source. Raises UsageError, NotComparableError (no baseline) and RunError, and then writes nothing.
    """
    if dry_run:
        return Plan(loaded, _plan_rows(loaded, find_targets(loaded, candidates), read_sets(loaded, download=False).sets))
    reuse = None
    if loaded.recipe.evaluate.cache or resume:
        keep_within(cache_folder())
        reuse = Reuse(cache_folder(), is_fresh=overwrite, trusted=resume)
    return evaluate_with(_engines(loaded), loaded, candidates, progress=progress, reuse=reuse, overwrite=overwrite)


def evaluate_with(
    open_engine: OpenEngine,
    loaded: LoadedRecipe,
    candidates: Sequence[str] = (),
    *,
    progress: Progress | None = None,
    reuse: Reuse | None = None,
    overwrite: bool = False,
) -> EvaluateResult:
    """`evaluate` with engines of the caller's choice. One is open at a time, and each path answers once."""
    began, started = time.monotonic(), datetime.now(UTC)
    targets, (sets, remarks) = find_targets(loaded, candidates), read_sets(loaded)
    for remark in remarks:
        log.warning("%s", remark)
    check_report_place(output_folder(loaded, "evaluate"))
    saving = Saving.asked(loaded, targets, overwrite=overwrite)
    _check_servers(open_engine, targets)
    task = Asking(loaded, targets, sets, progress or SilentProgress(), reuse, find_exports(loaded, targets))
    work = do_work(open_engine, task)
    comparisons = compare_all(task, work)
    if saving is not None:
        saved = saving.save(comparisons[0], sets, work.noise.get(targets[0].path))
        log.warning("%s", saved)
        remarks = (*remarks, saved)
    rest = {
        "started": started.strftime("%Y-%m-%dT%H:%M:%SZ"),
        "seconds": round(time.monotonic() - began, 3),
        "peak_rss_bytes": peak_rss_bytes(),
        "warnings": list(remarks),
        "reused_answers": {path: run.reused for path, run in work.runs.items()},
        "fingerprint": _fingerprint(loaded, sets, work.runs),
    }
    result = _write(output_folder(loaded, "evaluate"), started, comparisons, loaded.recipe.evaluate, rest)
    for target, comparison in zip(targets, comparisons, strict=True):
        _record_on_card(Path(target.path), comparison)
    return result


def _check_servers(open_engine: OpenEngine, targets: Sequence[Target]) -> None:
    """A server that is not there is found now, and not after the base has answered everything. Raises UsageError or RunError."""
    for path in dict.fromkeys(path for target in targets for path in (target.base, target.path) if path and "://" in path):
        open_engine(path).close()


def _write(parent: Path, started: datetime, comparisons: tuple[Comparison, ...], section: EvaluateSection, rest: Mapping[str, Any]) -> EvaluateResult:
    """Writes the report under the first name that no other run has taken or takes meanwhile, and tells the CI job."""
    while True:
        folder = new_folder(parent, started.strftime("%Y%m%dT%H%M%SZ"))
        result = EvaluateResult(folder, comparisons, section.gate.on_inconclusive, section.reports)
        document = {**document_head("evaluate"), "exit_code": result.exit_code, **rest, **result.to_json()}
        markdown = _markdown(result, document)
        if write_report(result.report, _files(result, document, markdown)):
            tell_ci(document, markdown)
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


def _files(result: EvaluateResult, document: Mapping[str, Any], markdown: str) -> dict[str, str]:
    rows = [row for comparison in result.comparisons for row in item_rows(comparison)]
    more = report_files(document, rows, result.comparisons, result.reports, markdown=markdown)
    return {"report.json": json_text(document) + "\n", "items.jsonl": jsonl_text(rows), **more}


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
    engines = {path: dict(run.fingerprint) for path, run in runs.items()}
    gate = recipe.evaluate.gate.model_dump(mode="json")
    return {"data": data, "batch": recipe.evaluate.batch, "seed": recipe.seed, "gate": gate, "engines": engines, "versions": versions()}


def _plan_rows(loaded: LoadedRecipe, targets: Sequence[Target], sets: Sequence[EvalSet]) -> tuple[PlanRow, ...]:
    gate = loaded.recipe.evaluate.gate
    rows = [PlanRow("candidate", f"{target.name} against {target.base or 'nothing: scored only'}") for target in targets]
    for each in sets:
        pictures = len({sample.cluster for sample in each.samples})
        reach = 100 * tango(0, 0, max(1, pictures), z_value(1 - gate.alpha)).high
        rows.append(PlanRow(f"set {each.name}", f"{len(each.samples)} items about {pictures} pictures, {len(each.skipped)} unusable"))
        rows.append(PlanRow("can tell", f"drops of {reach:.2f} points and more at best, margin {100 * gate.margin:.2f}"))
    named = dict.fromkeys(path for target in targets for path in (target.path, target.base) if path and "://" in path)
    rows += [PlanRow("server", Address.parse(path).told) for path in named]
    return (*rows, PlanRow("writes", str(output_folder(loaded, "evaluate") / "TIME")))
