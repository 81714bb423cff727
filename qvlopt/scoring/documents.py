"""Comparisons as plain values for JSON: the result of a candidate, and one row an item with the raw texts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from qvlopt.data.samples import Sample
from qvlopt.runtime.engine import Answer
from qvlopt.scoring.compare import Comparison, MetricResult, SetResult, SizeResult
from qvlopt.scoring.evaluate import EngineRun
from qvlopt.scoring.score import ScoreTable

DAMAGE = {"kl_mean": None, "top1_agreement": None, "vision_cosine_min": None}
"""Not measured in this version."""


def comparison_json(comparison: Comparison) -> dict[str, Any]:
    """One entry of `results` (docs/contract.md, section 7); `sets` and `by_size` are additions."""
    return {
        "candidate": comparison.candidate,
        "baseline": comparison.baseline,
        "verdict": comparison.verdict,
        "reasons": list(comparison.reasons),
        "metrics": [_metric(metric) for result in comparison.sets for metric in result.metrics],
        "damage": dict(DAMAGE),
        "sets": [_set(result) for result in comparison.sets],
        "by_size": [_size(size) for result in comparison.sets for size in result.sizes],
    }


def item_rows(comparison: Comparison) -> Iterator[dict[str, Any]]:
    """One row for every item that was chosen, failed ones included, in the order of the sets."""
    for result in comparison.sets:
        yield from (_item(comparison, result, sample) for sample in result.each.chosen)


def _metric(metric: MetricResult) -> dict[str, Any]:
    figures = metric.figures
    return {
        "name": metric.name,
        "task": metric.task,
        "metric": metric.metric.name,
        "primary": metric.is_primary,
        "n": metric.n,
        "n_failed": metric.n_failed,
        "base": metric.base,
        "candidate": metric.candidate,
        "delta": metric.delta,
        "ci_low": figures.ci_low if figures else None,
        "ci_high": figures.ci_high if figures else None,
        "ci_method": figures.method if figures else None,
        "margin": figures.margin if figures else None,
        "lost": figures.lost if figures else None,
        "gained": figures.gained if figures else None,
        "mde": figures.mde if figures else None,
        "n_needed": figures.n_needed if figures else None,
        "drop_within_margin": figures.drop_within_margin if figures else None,
        "floor": metric.floor,
        "verdict": metric.verdict,
    }


def _set(result: SetResult) -> dict[str, Any]:
    return {
        "name": result.each.name,
        "task": result.each.task,
        "items": len(result.each.chosen),
        "compared": len(result.paired),
        "failures": [{"id": id, "reason": reason} for id, reason in result.failures.items()],
        "n_empty_ref": result.candidate.n_empty_ref,
        "base": _counts(result.base),
        "candidate": _counts(result.candidate),
    }


def _counts(table: ScoreTable | None) -> dict[str, int] | None:
    if table is None:
        return None
    return {"n": table.n, "n_failed": len(table.failed), "n_empty": table.n_empty, "n_truncated": table.n_truncated}


def _size(size: SizeResult) -> dict[str, Any]:
    delta = None if size.base is None else size.candidate - size.base
    names = {"name": size.name, "metric": size.metric, "size": size.size}
    return names | {"n": size.n, "base": size.base, "candidate": size.candidate, "delta": delta}


def _item(comparison: Comparison, result: SetResult, sample: Sample) -> dict[str, Any]:
    base_run, run = comparison.runs
    return {
        "candidate": comparison.candidate,
        "set": result.each.name,
        "id": sample.id,
        "task": sample.task,
        "cluster": sample.cluster,
        "size": [list(size) for size in run.answered[result.each.name].sizes.get(sample.id, ())],
        "question": sample.question,
        "answers": list(sample.answers),
        "base_answer": _answer(base_run, result, result.base, sample.id),
        "candidate_answer": _answer(run, result, result.candidate, sample.id),
        "failed": result.failures.get(sample.id),
    }


def _answer(run: EngineRun | None, result: SetResult, table: ScoreTable | None, id: str) -> dict[str, Any] | None:
    """Raw text, stop, token counts and, for compared items, the value of every metric."""
    answer = run.answered[result.each.name].answers.get(id) if run else None
    if answer is None:
        return None
    scores = {name: parts[id].value for name, parts in table.parts.items() if id in parts} if table else {}
    return _said(answer) | {"scores": scores}


def _said(answer: Answer) -> dict[str, Any]:
    tokens = {"prompt_tokens": answer.prompt_tokens, "new_tokens": len(answer.token_ids)}
    return {"text": answer.text, "stop": answer.stop, "error": answer.error, **tokens}
