"""Puts every item to an engine and keeps what it said; knows engines by their protocol only."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from qvlopt.data.preflight import Size, Skipped
from qvlopt.data.samples import Sample
from qvlopt.errors import ItemError, RunError
from qvlopt.report.progress import Progress
from qvlopt.runtime.engine import Answer, Engine, Prepared
from qvlopt.scoring.tasks import TaskMetrics

OpenEngine = Callable[[str], Engine]
"""Opens what is at a path: a checkpoint or an artifact."""


@dataclass(frozen=True)
class Target:
    """One candidate by the name that the user gave, what to open for it, and for its base (None: nothing to compare with).

    `base_digest` is that of the checkpoint that the candidate was made from, where its base must be that one.
    """

    name: str
    path: str
    base: str | None
    base_digest: str | None = None


@dataclass(frozen=True)
class EvalSet:
    """One entry of the recipe, ready to be asked: the `chosen` samples, some of which their pictures' headers rule out.

    `sizes` are the (width, height) of each usable sample's pictures in their files. `digest` is that of the chosen items.
    """

    name: str
    task: str
    chosen: tuple[Sample, ...]
    skipped: tuple[Skipped, ...]
    sizes: Mapping[str, tuple[Size, ...]]
    metrics: TaskMetrics
    max_new_tokens: int
    digest: str

    @property
    def samples(self) -> tuple[Sample, ...]:
        """The usable ones, in order."""
        return tuple(sample for sample in self.chosen if sample.id in self.sizes)


@dataclass(frozen=True)
class Answered:
    """One engine's work on one set: answers by id, reasons of items it could not read, picture sizes after resizing."""

    answers: Mapping[str, Answer]
    unreadable: Mapping[str, str]
    sizes: Mapping[str, tuple[Size, ...]]


@dataclass(frozen=True)
class EngineRun:
    """One engine's work on all sets, by their names, and the conditions it worked under."""

    answered: Mapping[str, Answered]
    fingerprint: Mapping[str, Any]


def run_engine(engine: Engine, sets: Sequence[EvalSet], *, batch: int, progress: Progress, label: str) -> EngineRun:
    """Asks every usable item of every set once. Closes the engine, whatever happens."""
    try:
        progress.start(sum(len(each.samples) for each in sets), label)
        answered = {each.name: _answer_set(engine, each, batch, progress) for each in sets}
        return EngineRun(answered, dict(engine.fingerprint))
    finally:
        engine.close()


def _answer_set(engine: Engine, each: EvalSet, batch: int, progress: Progress) -> Answered:
    """Pictures of one size go together, since they share a call of the tower; the answers do not depend on it."""
    answers: dict[str, Answer] = {}
    unreadable: dict[str, str] = {}
    sizes: dict[str, tuple[Size, ...]] = {}
    ordered = sorted(each.samples, key=lambda sample: (each.sizes[sample.id], len(sample.question), sample.id))
    for start in range(0, len(ordered), batch):
        part = ordered[start : start + batch]
        prepared = _prepare(engine, part, unreadable)
        sizes.update({item.id: tuple(picture.size for picture in item.pictures) for item in prepared})
        for answer in _generate(engine, prepared, each.max_new_tokens):
            answers[answer.id] = answer
        progress.advance(len(part))
    in_order = {sample.id: answers[sample.id] for sample in each.samples if sample.id in answers}
    return Answered(in_order, unreadable, sizes)


def _prepare(engine: Engine, samples: Sequence[Sample], unreadable: dict[str, str]) -> list[Prepared]:
    prepared = []
    for sample in samples:
        try:
            prepared.append(engine.prepare(sample))
        except ItemError as error:
            unreadable[sample.id] = error.reason
    return prepared


def _generate(engine: Engine, prepared: Sequence[Prepared], max_new_tokens: int) -> list[Answer]:
    """One answer an item; where a batch fails, its items are asked alone, so that one cannot spoil the others."""
    if not prepared:
        return []
    try:
        answers = engine.generate(prepared, max_new_tokens=max_new_tokens)
    except RuntimeError as error:
        if len(prepared) > 1:
            return [answer for item in prepared for answer in _generate(engine, [item], max_new_tokens)]
        reason = f"{type(error).__name__}: {error}"
        return [Answer(prepared[0].id, (), "", "error", len(prepared[0].token_ids), reason)]
    if [answer.id for answer in answers] != [item.id for item in prepared]:
        raise RunError(f"the engine gave {len(answers)} answers to {len(prepared)} items, or in another order; this is a bug of the engine")
    return answers
