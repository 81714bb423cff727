"""Scores by kind of item, as the benchmarks report them: ChartQA's human and augmented questions, OCRBench's and VQAv2's types."""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

from qvlopt.scoring.compare import SetResult


class StratumResult(NamedTuple):
    """The primary metric of one set on the compared items of one kind; `kind` is as the set names it."""

    name: str
    metric: str
    kind: str
    n: int
    base: float | None
    candidate: float | None
    delta: float | None


def by_stratum(result: SetResult) -> tuple[StratumResult, ...]:
    """One row a kind, in the order of the names; nothing for a set that has none or only one."""
    paired = set(result.paired)
    kinds: dict[str, list[str]] = defaultdict(list)
    for sample in result.each.samples:
        if sample.id in paired and sample.stratum is not None:
            kinds[sample.stratum].append(sample.id)
    if len(kinds) < 2:
        return ()
    name = result.each.metrics.primary.name
    rows = []
    for kind, ids in sorted(kinds.items()):
        base = result.base.mean(name, ids) if result.base else None
        candidate = result.candidate.mean(name, ids)
        delta = None if base is None or candidate is None else candidate - base
        rows.append(StratumResult(result.each.name, name, kind, len(ids), base, candidate, delta))
    return tuple(rows)
