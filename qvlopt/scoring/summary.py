"""Comparisons for people: tables of plain text, and sentences that say what the verdicts rest on."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from qvlopt.report.tables import Column, Table
from qvlopt.scoring.compare import Comparison, MetricResult, SetResult
from qvlopt.scoring.gate import MetricVerdict
from qvlopt.scoring.strata import by_stratum

MOST_SIZES = 24
"""Rows of the table by size for each set; sets of many sizes are shown by their most frequent ones."""

MOST_ITEMS = 20
"""Failed or changed items that are shown; items.jsonl has them all."""


def tables(comparison: Comparison) -> Sequence[Table]:
    """Everything for a report file; tables without rows are left out."""
    first = (score_table, damage_table, output_table, stage_table, size_table, stratum_table)
    every = [make(comparison) for make in (*first, answer_table, changed_table, failure_table, variant_table)]
    return [table for table in every if table.rows]


def score_table(comparison: Comparison) -> Table:
    """Every metric of every set, the deciding ones first; scores in per cent, differences in points."""
    against = f" against {comparison.baseline}" if comparison.baseline else ""
    heads = (Column("set"), Column("metric"), *(Column(title, "right") for title in ("n", "base", "candidate", "delta", "interval", "lost/gained")))
    rows = tuple(_score_row(metric) for result in comparison.sets for metric in result.metrics)
    return Table(f"{comparison.candidate}{against}: scores in %", (*heads, Column("verdict")), rows)


def damage_table(comparison: Comparison) -> Table:
    """Distances of the next-token distributions, given the base's answers."""
    heads = tuple(Column(title, "right") for title in ("items", "tokens", "KL mean", "KL max", "same best token", "equal answers", "part at token"))
    damage = comparison.damage
    if damage is None or damage.kl_mean is None:
        return Table("Damage", heads, ())
    mean = f"{damage.kl_mean:.4g}" + (f" ± {damage.kl_error:.2g}" if damage.kl_error is not None else "")
    parted = "-" if damage.first_divergence is None else f"{damage.first_divergence:g}"
    shares = (_percent(damage.top1_agreement), _percent(damage.answers_equal))
    row = (str(damage.items), str(damage.tokens), mean, f"{damage.kl_max:.4g}", *shares, parted)
    return Table("Damage: KL in nats of next-token distributions, shares in %", heads, (row,))


def output_table(comparison: Comparison) -> Table:
    """Every output of the tower."""
    heads = (Column("output"), *(Column(title, "right") for title in ("SQNR dB", "cosine", "worst picture", "relative error", "largest difference")))
    rows = [
        (each.output, _short(each.sqnr_db), f"{each.cosine:.6f}", f"{each.cosine_min:.6f}", f"{each.relative_error:.3g}", f"{each.max_abs:.3g}")
        for each in (comparison.damage.outputs if comparison.damage else ())
    ]
    return Table("Vision tower's outputs", heads, tuple(rows))


def stage_table(comparison: Comparison) -> Table:
    """Stages that differ, each by itself in the base, those that change the answers most first."""
    heads = (Column("stage"), *(Column(title, "right") for title in ("share", "KL", "relative error", "cosine", "SQNR dB")))
    rows = [
        (each.stage, f"{each.share:.0%}", f"{each.kl:.3g}", _short(each.relative_error), _short(each.cosine), _short(each.sqnr_db))
        for each in (comparison.damage.stages if comparison.damage else ())
    ]
    return Table("Stages: what each does to the answers by itself", heads, tuple(rows))


def size_table(comparison: Comparison) -> Table:
    """The deciding metric by picture size after resizing."""
    heads = (Column("set"), Column("size"), *(Column(title, "right") for title in ("n", "base", "candidate", "delta")))
    rows: list[tuple[str, ...]] = []
    for result in comparison.sets:
        common = sorted(result.sizes, key=lambda size: -size.n)[:MOST_SIZES]
        for size in result.sizes:
            if size in common:
                delta = None if size.base is None else size.candidate - size.base
                rows.append((size.name, size.size, str(size.n), _percent(size.base), _percent(size.candidate), _points(delta)))
    return Table("By picture size after resizing, in %", heads, tuple(rows))


def stratum_table(comparison: Comparison) -> Table:
    """The deciding metric by kind of item, for sets that name kinds; those of the most items where there are many."""
    heads = (Column("set"), Column("kind"), *(Column(title, "right") for title in ("n", "base", "candidate", "delta")))
    rows: list[tuple[str, ...]] = []
    for result in comparison.sets:
        kinds = by_stratum(result)
        common = sorted(kinds, key=lambda row: -row.n)[:MOST_SIZES]
        shown = (row for row in kinds if row in common)
        rows += [(row.name, row.kind, str(row.n), _percent(row.base), _percent(row.candidate), _points(row.delta)) for row in shown]
    return Table("By kind of item, in %", heads, tuple(rows))


def variant_table(comparison: Comparison) -> Table:
    """By which rule each metric was computed (docs/metrics.md): numbers of other rules are other numbers."""
    rules = {metric.metric.name: metric.metric.variant for result in comparison.sets for metric in result.metrics}
    return Table("Metrics and their variants", (Column("metric"), Column("rule")), tuple(rules.items()))


def answer_table(comparison: Comparison) -> Table:
    """Counts that go with the scores: failed items, empty and truncated answers on each side."""
    titles = ("items", "compared", "failed", "empty answers", "stopped by the limit", "no text in the reference")
    rows = tuple(_answer_row(result) for result in comparison.sets)
    return Table("Answers (base / candidate)", (Column("set"), *(Column(title, "right") for title in titles)), rows)


def changed_table(comparison: Comparison) -> Table:
    """Items that one side answered better, lost ones first."""
    heads = tuple(Column(title) for title in ("set", "id", "right answers", "base", "candidate"))
    changed = [row for result in comparison.sets for row in _changed(comparison, result)]
    rows = [cells for _, cells in sorted(changed, key=lambda row: row[0])]
    return Table(f"Changed items ({_shown(len(rows))})", heads, tuple(rows[:MOST_ITEMS]))


def failure_table(comparison: Comparison) -> Table:
    """Items that failed, with their reasons."""
    rows = [(result.each.name, id, reason) for result in comparison.sets for id, reason in result.failures.items()]
    return Table(f"Failed items ({_shown(len(rows))})", (Column("set"), Column("id"), Column("reason")), tuple(rows[:MOST_ITEMS]))


def sentences(comparison: Comparison) -> Iterator[str]:
    """One line for each deciding metric, then what else decided, then the verdict."""
    for result in comparison.sets:
        for metric in result.metrics:
            if metric.is_primary or metric.verdict is not None:
                yield f"{metric.name} {metric.metric.name}: {_finding(metric)}"
        yield from _oddities(result)
    yield from comparison.reasons
    yield from _damage_findings(comparison)
    yield f"{comparison.candidate}: {comparison.verdict}" + ("" if comparison.baseline else " (scored only, nothing was compared)")


def _damage_findings(comparison: Comparison) -> Iterator[str]:
    """What the closer look found: how far off, and who is to blame."""
    noise, damage = comparison.noise, comparison.damage
    if noise is not None and noise.verdict == "pass":
        yield f"the base against itself in batches of {noise.batches[0]} and {noise.batches[1]}: {noise.flips} of {noise.n} items flip"
    if damage is None:
        return
    if damage.is_none:
        yield f"no damage: {damage.items} items looked at, every next-token distribution and picture feature is equal to the bit"
    elif damage.is_rounding:
        yield f"no damage beyond rounding: KL at most {damage.kl_max:.1g} nats over {damage.tokens} tokens of {damage.items} items"
    elif damage.kl_mean is not None:
        best = f"the best token is the same in {_percent(damage.top1_agreement)} %"
        yield f"damage: KL {damage.kl_mean:.3g} nats over {damage.tokens} tokens of {damage.items} items, {best}"
    if damage.inputs_changed:
        yield f"damage: the candidate prepares {damage.inputs_changed} of the items otherwise (prompt or pixels)"
    if damage.blame is not None:
        cause = f", by {damage.blame.cause}" if damage.blame.cause else ""
        yield f"blame: {damage.blame.stage}{cause} ({damage.blame.detail})"
    for step in damage.steps:
        yield f"damage of {step.name}: KL {_short(step.kl_mean)} nats, lowest cosine of a picture {_short(step.vision_cosine_min)}"
    yield from (f"damage: {note}" for note in damage.notes)


def _oddities(result: SetResult) -> Iterator[str]:
    """Answers that are no answers, on either side; a damaged model often shows in them first."""
    base, candidate = result.base, result.candidate
    counts = (
        ("answers stopped by the limit of new tokens", candidate.n_truncated, base.n_truncated if base else None),
        ("empty answers", candidate.n_empty, base.n_empty if base else None),
        ("answers from which nothing could be read", candidate.n_unparsed, base.n_unparsed if base else None),
        ("items without text in the right answers", candidate.n_empty_ref, None),
    )
    for what, count, before in counts:
        if count or before:
            yield f"{result.each.name}: {count} {what}" + ("" if before is None else f", {before} of the base")


def _finding(metric: MetricResult) -> str:
    if metric.floor is not None and (metric.candidate is None or metric.candidate < metric.floor):
        return f"{_percent(metric.candidate)} % is below the floor of {_percent(metric.floor)} %"
    if metric.figures is None or metric.figures.delta is None:
        return f"{_percent(metric.candidate)} %, not compared" + ("" if metric.n else "; no item was answered by both sides")
    return _judgement(metric.figures)


def _judgement(figures: MetricVerdict) -> str:
    seen = f"difference {_points(figures.delta)} points, interval {_interval(figures)}, n = {figures.n}"
    margin = f"{100 * figures.margin:.2f} points"
    if figures.verdict == "fail":
        return f"dropped by more than {margin}: {seen}"
    if figures.fails_alone:
        corrected = f"p = {figures.p_drop_holm:.2g} after Holm's correction"
        return f"looks like a drop of more than {margin}, but among several metrics chance may do that ({corrected}): {seen}"
    if figures.verdict == "pass":
        drop = "a drop is shown, but one of less than " if figures.drop_within_margin else "no drop of "
        return f"{drop}{margin}: {seen}"
    if figures.n_needed is not None and figures.n_needed <= figures.n:
        return f"cannot rule out a drop of more than {margin}: {seen}; what was seen is close to the margin, more items may not decide"
    return f"cannot rule out a drop of more than {margin}: {seen}; about {figures.n_needed} items would be needed (80 % power)"


def _score_row(metric: MetricResult) -> tuple[str, ...]:
    figures = metric.figures
    flips = f"{figures.lost}/{figures.gained}" if figures else ""
    interval = _interval(figures) if figures else ""
    verdict = metric.verdict or "for information"
    scores = (_percent(metric.base), _percent(metric.candidate), _points(metric.delta))
    return (metric.name, metric.metric.name, str(metric.n), *scores, interval, flips, verdict)


def _answer_row(result: SetResult) -> tuple[str, ...]:
    base, candidate = result.base, result.candidate
    empty = f"{base.n_empty if base else '-'} / {candidate.n_empty}"
    truncated = f"{base.n_truncated if base else '-'} / {candidate.n_truncated}"
    items = str(len(result.each.chosen))
    return (result.each.name, items, str(len(result.paired)), str(len(result.failures)), empty, truncated, str(candidate.n_empty_ref))


def _changed(comparison: Comparison, result: SetResult) -> Iterator[tuple[float, tuple[str, ...]]]:
    """(difference, cells) of each item whose deciding score differs."""
    base_run, run = comparison.runs
    if base_run is None or result.base is None:
        return
    name = result.each.metrics.primary.name
    before, after = result.base.values(name, result.paired), result.candidate.values(name, result.paired)
    for sample in result.each.samples:
        if sample.id in before and before[sample.id] != after[sample.id]:
            texts = [side.answered[result.each.name].answers[sample.id].text for side in (base_run, run)]
            yield after[sample.id] - before[sample.id], (result.each.name, sample.id, " / ".join(sample.answers), *texts)


def _shown(count: int) -> str:
    return f"{count}" if count <= MOST_ITEMS else f"{MOST_ITEMS} of {count}, all in items.jsonl"


def _short(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if math.isfinite(value) else "-" if math.isnan(value) else "inf" if value > 0 else "-inf"


def _interval(figures: MetricVerdict) -> str:
    return f"[{_points(figures.ci_low)}, {_points(figures.ci_high)}]"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.2f}"


def _points(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:+.2f}"
