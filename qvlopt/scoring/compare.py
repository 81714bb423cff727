"""Joins the answers of base and candidate item by item and judges every set."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from qvlopt.data.preflight import Size
from qvlopt.data.samples import Sample
from qvlopt.scoring.conditions import conditions_of, differences
from qvlopt.scoring.damage import Damage
from qvlopt.scoring.evaluate import Answered, EngineRun, EvalSet, Target
from qvlopt.scoring.gate import MetricVerdict, Verdict, hold_together, judge, worst
from qvlopt.scoring.noise import Noise
from qvlopt.scoring.score import ScoreTable, score_answers
from qvlopt.scoring.tasks import Metric

MODEL_DIGEST = "model_digest"
"""Key of an engine's fingerprint: the digest of the checkpoint that it loaded, where it tells."""


NOTHING = Answered({}, {}, {})
"""What a saved baseline holds of a set that it does not know."""


@dataclass(frozen=True)
class Rule:
    """The recipe's gate. `floors` by set name, for its primary metric, or by `set.metric`."""

    margin: float
    alpha: float
    max_failed: int
    floors: Mapping[str, float]


@dataclass(frozen=True)
class MetricResult:
    """One metric on one set. Only the primary one has a verdict; `figures` is None without a base and for the others."""

    name: str
    task: str
    metric: Metric
    is_primary: bool
    n: int
    n_failed: int
    base: float | None
    candidate: float | None
    figures: MetricVerdict | None
    floor: float | None
    verdict: Verdict | None

    @property
    def delta(self) -> float | None:
        return None if self.base is None or self.candidate is None else self.candidate - self.base

    @property
    def breaks_floor(self) -> bool:
        return self.floor is not None and (self.candidate is None or self.candidate < self.floor)


@dataclass(frozen=True)
class SizeResult:
    """The primary metric on the items of one picture size after resizing, as `96x64`."""

    name: str
    metric: str
    size: str
    n: int
    base: float | None
    candidate: float


@dataclass(frozen=True)
class SetResult:
    """Everything about one set: `paired` ids are compared, `failures` says why the others or their answers are missing."""

    each: EvalSet
    paired: tuple[str, ...]
    failures: Mapping[str, str]
    base: ScoreTable | None
    candidate: ScoreTable
    metrics: tuple[MetricResult, ...]
    sizes: tuple[SizeResult, ...]


@dataclass(frozen=True)
class Comparison:
    """One candidate on all sets; `reasons` says in words what decided, besides the metrics' own verdicts.

    `noise` is what the base does against itself and `damage` what the candidate's tensors show, where they were measured.
    """

    candidate: str
    baseline: str | None
    verdict: Verdict
    reasons: tuple[str, ...]
    sets: tuple[SetResult, ...]
    runs: tuple[EngineRun | None, EngineRun]
    noise: Noise | None = None
    damage: Damage | None = None


def compare(
    target: Target,
    runs: tuple[EngineRun | None, EngineRun],
    sets: Sequence[EvalSet],
    rule: Rule,
    *,
    noise: Noise | None = None,
    damage: Damage | None = None,
) -> Comparison:
    """Judges `runs` = (base or None, candidate). Without a base the candidate is scored, floors hold, nothing is compared."""
    unlike = _unlike_conditions(target, runs[0], runs[1], sets) if runs[0] else []
    results = _held_together([_compare_set(each, runs, rule, is_comparable=not unlike) for each in sets], rule.alpha)
    verdicts = [metric.verdict for result in results for metric in result.metrics if metric.verdict is not None]
    failed = sum(len(result.failures) for result in results)
    reasons = list(unlike)
    if noise is not None and noise.verdict != "pass":
        verdicts.append("inconclusive")
        reasons.append(noise.reason)
    if failed > rule.max_failed:
        verdicts.append("error")
        reasons.append(f"{failed} items failed, gate.max_failed is {rule.max_failed}")
    return Comparison(target.name, target.base, worst(verdicts), tuple(reasons), results, runs, noise, damage)


def _held_together(results: Sequence[SetResult], alpha: float) -> tuple[SetResult, ...]:
    """Failures that chance alone may give among several metrics become inconclusive (Holm); a broken floor stays."""
    figures = [metric.figures for result in results for metric in result.metrics if metric.figures is not None]
    corrected = iter(hold_together(figures, alpha))
    return tuple(replace(result, metrics=tuple(_corrected(metric, corrected) for metric in result.metrics)) for result in results)


def _corrected(metric: MetricResult, corrected: Iterator[MetricVerdict]) -> MetricResult:
    if metric.figures is None:
        return metric
    figures = next(corrected)
    broken: list[Verdict] = ["fail"] if metric.breaks_floor else []
    return replace(metric, figures=figures, verdict=worst([figures.verdict, *broken]))


def _unlike_conditions(target: Target, base: EngineRun, candidate: EngineRun, sets: Sequence[EvalSet]) -> list[str]:
    ours = base.saved if base.saved is not None else conditions_of(base, sets)
    unlike = [f"not comparable: {reason}" for reason in differences(ours, conditions_of(candidate, sets))]
    found = base.fingerprint.get(MODEL_DIGEST)
    if None not in (found, target.base_digest) and found != target.base_digest:
        unlike.append(f"not comparable: {target.base} is not the checkpoint that {target.name} was made from any more (by digest)")
    return unlike


def _compare_set(each: EvalSet, runs: tuple[EngineRun | None, EngineRun], rule: Rule, *, is_comparable: bool) -> SetResult:
    base_side = runs[0].answered.get(each.name, NOTHING) if runs[0] else None
    side = runs[1].answered[each.name]
    paired = [sample for sample in each.samples if sample.id in side.answers and (base_side is None or sample.id in base_side.answers)]
    base = _scored(each, base_side, paired) if base_side else None
    candidate = _scored(each, side, paired)
    failures = _failures(each, {"base": (base_side, base), "candidate": (side, candidate)})
    judged = _Judged(each, paired, base, candidate, len(failures))
    metrics = tuple(judged.metric(metric, rule, is_comparable=is_comparable) for metric in each.metrics.all)
    return SetResult(each, tuple(sample.id for sample in paired), failures, base, candidate, metrics, judged.by_size(side.sizes))


def _scored(each: EvalSet, side: Answered, samples: Sequence[Sample]) -> ScoreTable:
    return score_answers(samples, [side.answers[sample.id] for sample in samples], each.metrics.all)


def _failures(each: EvalSet, sides: Mapping[str, tuple[Answered | None, ScoreTable | None]]) -> dict[str, str]:
    """Every failed item once, with its first reason: ruled out by the header, unreadable, or unanswered."""
    reasons = dict(each.skipped)
    for side, _ in sides.values():
        reasons = (dict(side.unreadable) if side else {}) | reasons
    for name, (_, table) in sides.items():
        unanswered = table.failed if table else {}
        reasons = {id: f"the {name} gave no answer: {reason}" for id, reason in unanswered.items()} | reasons
    return reasons


@dataclass(frozen=True)
class _Judged:
    """The paired samples of one set with both sides' scores."""

    each: EvalSet
    samples: list[Sample]
    base: ScoreTable | None
    candidate: ScoreTable
    n_failed: int

    def metric(self, metric: Metric, rule: Rule, *, is_comparable: bool) -> MetricResult:
        ids = [sample.id for sample in self.samples]
        is_primary = metric is self.each.metrics.primary
        base = self.base.mean(metric.name, ids) if self.base else None
        candidate = self.candidate.mean(metric.name, ids)
        figures = self._figures(metric, ids, rule) if is_primary and self.base and is_comparable else None
        floor = rule.floors.get(f"{self.each.name}.{metric.name}", rule.floors.get(self.each.name) if is_primary else None)
        verdicts: list[Verdict] = []
        if is_primary:
            verdicts.append(figures.verdict if figures else "pass" if self.base is None and ids else "not_comparable")
        if floor is not None:
            verdicts.append("pass" if candidate is not None and candidate >= floor else "fail")
        verdict = worst(verdicts) if verdicts else None
        name, task = self.each.name, self.each.task
        return MetricResult(name, task, metric, is_primary, len(ids), self.n_failed, base, candidate, figures, floor, verdict)

    def _figures(self, metric: Metric, ids: list[str], rule: Rule) -> MetricVerdict:
        assert self.base is not None
        return judge(
            self.base.values(metric.name, ids),
            self.candidate.values(metric.name, ids),
            {sample.id: sample.cluster for sample in self.samples},
            margin=rule.margin,
            alpha=rule.alpha,
            binary=metric.is_binary,
        )

    def by_size(self, sizes: Mapping[str, tuple[Size, ...]]) -> tuple[SizeResult, ...]:
        """The primary metric by picture size, smallest area first; the answers to large pictures fail first."""
        groups: dict[tuple[int, str], list[str]] = defaultdict(list)
        for sample in self.samples:
            shown = sizes[sample.id]
            groups[sum(w * h for w, h in shown), "+".join(f"{w}x{h}" for w, h in shown) or "no picture"].append(sample.id)
        name = self.each.metrics.primary.name
        rows = []
        for (_, size), ids in sorted(groups.items()):
            candidate = self.candidate.mean(name, ids)
            assert candidate is not None  # a primary metric has a value for every item
            base = self.base.mean(name, ids) if self.base else None
            rows.append(SizeResult(self.each.name, name, size, len(ids), base, candidate))
        return tuple(rows)
