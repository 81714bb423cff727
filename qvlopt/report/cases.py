"""Which items a person should look at: those that got worse first, then those that answer differently, then the better ones."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

Kind = Literal["worse", "wrong", "changed", "better"]
KINDS: dict[Kind, str] = {"worse": "got worse", "wrong": "answered wrongly", "changed": "other words, same score", "better": "got better"}
"""In the order in which they are shown, with words for them. `wrong` is for evaluations without a base."""

MOST_SIZES = 12
"""Distinct picture sizes that a filter offers one by one; more are joined into ranges of equal count."""

RANGES = 4


@dataclass(frozen=True)
class Case:
    """One item of one candidate. Texts are raw; scores are those of the metric that decides; `size` groups by picture size."""

    candidate: str
    set: str
    task: str
    id: str
    kind: Kind
    question: str
    expected: tuple[str, ...]
    base: Mapping[str, Any] | None
    answer: Mapping[str, Any]
    metric: str
    scores: tuple[float | None, float | None]
    area: int
    size: str

    @property
    def change(self) -> float:
        """Candidate minus base; without a base, minus what a right answer scores."""
        before, after = self.scores
        return (after or 0.0) - (1.0 if before is None else before)


def find_cases(document: Mapping[str, Any], rows: Iterable[Mapping[str, Any]]) -> list[Case]:
    """Every item worth a look, from evaluate's JSON and the rows of items.jsonl; worst first, large pictures first."""
    primary = {(result["candidate"], m["name"]): m["metric"] for result in document["results"] for m in result["metrics"] if m["primary"]}
    found = [case for row in rows if (case := _case(row, primary.get((row["candidate"], row["set"])))) is not None]
    order = list(KINDS)
    return _with_ranges(sorted(found, key=lambda case: (order.index(case.kind), case.change, -case.area, case.set, case.id)))


def most_telling(cases: Sequence[Case], most: int) -> list[Case]:
    """At most `most` of them, in their order. Every candidate's sets take turns within a kind, so that no set hides another."""
    turns: dict[tuple[str, str, str], int] = defaultdict(int)
    order, ranked = list(KINDS), []
    for position, case in enumerate(cases):
        key = (case.kind, case.candidate, case.set)
        ranked.append((order.index(case.kind), turns[key], position))
        turns[key] += 1
    return [cases[position] for position in sorted(position for *_, position in sorted(ranked)[:most])]


def _case(row: Mapping[str, Any], metric: str | None) -> Case | None:
    answer, base = row["candidate_answer"], row["base_answer"]
    if metric is None or answer is None:
        return None
    scores = (base["scores"].get(metric) if base else None, answer["scores"].get(metric))
    kind = _kind(base, answer, scores)
    if kind is None:
        return None
    sizes = [tuple(size) for size in row["size"]]
    return Case(
        candidate=row["candidate"],
        set=row["set"],
        task=row["task"],
        id=row["id"],
        kind=kind,
        question=row["question"],
        expected=tuple(row["answers"]),
        base=base,
        answer=answer,
        metric=metric,
        scores=scores,
        area=sum(width * height for width, height in sizes),
        size=" + ".join(f"{width}×{height}" for width, height in sizes) or "no picture",
    )


def _kind(base: Mapping[str, Any] | None, answer: Mapping[str, Any], scores: tuple[float | None, float | None]) -> Kind | None:
    before, after = scores
    if after is None:
        return None
    if base is None:
        return "wrong" if after < 1 else None
    if before is not None and before != after:
        return "worse" if after < before else "better"
    return "changed" if base["text"] != answer["text"] else None


def _with_ranges(cases: list[Case]) -> list[Case]:
    """The same cases; where there are too many sizes, `size` names a range of areas instead."""
    if len({case.size for case in cases}) <= MOST_SIZES:
        return cases
    areas = sorted(case.area for case in cases)
    edges = sorted({areas[min(len(areas) - 1, (part + 1) * len(areas) // RANGES)] for part in range(RANGES)})
    return [replace(case, size=f"up to {next(edge for edge in edges if case.area <= edge):,} pixels") for case in cases]
