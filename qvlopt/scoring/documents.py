"""Comparisons as plain values for JSON: the result of a candidate, and one row an item with the raw texts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from qvlopt.data.samples import Sample
from qvlopt.runtime.engine import Answer
from qvlopt.scoring.compare import Comparison, MetricResult, SetResult, SizeResult
from qvlopt.scoring.damage import Damage
from qvlopt.scoring.evaluate import EngineRun
from qvlopt.scoring.score import ScoreTable
from qvlopt.scoring.strata import by_stratum

NOT_MEASURED = {"kl_mean": None, "top1_agreement": None, "vision_cosine_min": None}
"""Without a base in this process: nothing to compare with, a saved baseline, a server."""


def comparison_json(comparison: Comparison) -> dict[str, Any]:
    """One entry of `results` (docs/contract.md, section 7); `sets`, `by_size` and `by_stratum` are additions."""
    return {
        "candidate": comparison.candidate,
        "baseline": comparison.baseline,
        "verdict": comparison.verdict,
        "reasons": list(comparison.reasons),
        "metrics": [_metric(metric) for result in comparison.sets for metric in result.metrics],
        "damage": _damage(comparison.damage) if comparison.damage else dict(NOT_MEASURED),
        "noise": asdict(comparison.noise) if comparison.noise else None,
        "sets": [_set(result) for result in comparison.sets],
        "by_size": [_size(size) for result in comparison.sets for size in result.sizes],
        "by_stratum": [row._asdict() for result in comparison.sets for row in by_stratum(result)],
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
        "variant": metric.metric.variant,
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
        "n_clusters": figures.n_clusters if figures else None,
        "p_lost": figures.p_lost if figures else None,
        "p_drop": figures.p_drop if figures else None,
        "p_drop_holm": figures.p_drop_holm if figures else None,
        "drop_within_margin": figures.drop_within_margin if figures else None,
        "floor": metric.floor,
        "verdict": metric.verdict,
    }


def _damage(damage: Damage) -> dict[str, Any]:
    """Beside the contract's three values: how sure they are, where answers part, and what outputs and stages show."""
    return {
        "kl_mean": damage.kl_mean,
        "top1_agreement": damage.top1_agreement,
        "vision_cosine_min": damage.vision_cosine_min,
        "kl_error": damage.kl_error,
        "kl_max": damage.kl_max,
        "items": damage.items,
        "tokens": damage.tokens,
        "answers_equal": damage.answers_equal,
        "first_divergence": damage.first_divergence,
        "inputs_changed": damage.inputs_changed,
        "outputs": [asdict(output) for output in damage.outputs],
        "blame": asdict(damage.blame) if damage.blame else None,
        "steps": [asdict(step) for step in damage.steps],
        "layers": [asdict(stage) for stage in damage.stages],
        "notes": list(damage.notes),
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
    counts = {"n_empty": table.n_empty, "n_truncated": table.n_truncated, "n_unparsed": table.n_unparsed}
    return {"n": table.n, "n_failed": len(table.failed), **counts}


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
    new_tokens = len(answer.token_ids) if answer.new_tokens is None else answer.new_tokens
    tokens = {"prompt_tokens": answer.prompt_tokens, "new_tokens": new_tokens}
    return {"text": answer.text, "stop": answer.stop, "error": answer.error, **tokens}
