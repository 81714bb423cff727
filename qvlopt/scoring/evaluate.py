"""Puts every item to an engine and keeps what it said; knows engines by their protocol only."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qvlopt.data.preflight import Size, Skipped
from qvlopt.data.samples import Sample
from qvlopt.errors import ItemError, RunError
from qvlopt.report.progress import Progress
from qvlopt.runtime.engine import Answer, Engine, Prepared
from qvlopt.scoring.answer_cache import AnswerCache, Kept, cache_path
from qvlopt.scoring.tasks import TaskMetrics

OpenEngine = Callable[[str], Engine]
"""Opens what is at a path: a checkpoint or an artifact."""

PATCHES_DIGESTED = 16
"""Rows of `pixel_values` that go into the digest of an item's inputs, spread over the picture: enough to notice other pixels."""


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
    """One engine's work on one set: answers by id, reasons of items it could not read, picture sizes after resizing.

    `inputs` is a digest of the ids and pixels that the engine was given for each answered item.
    """

    answers: Mapping[str, Answer]
    unreadable: Mapping[str, str]
    sizes: Mapping[str, tuple[Size, ...]]
    inputs: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class EngineRun:
    """One engine's work on all sets, by their names, and the conditions it worked under.

    `batch` is how many items were asked at once at most, `reused` how many answers came from the cache. `saved` are the
    conditions that a saved baseline was made under (conditions.py); None for an engine that was asked now.
    """

    answered: Mapping[str, Answered]
    fingerprint: Mapping[str, Any]
    batch: int | None = field(default=None, compare=False)
    reused: int = field(default=0, compare=False)
    saved: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Reuse:
    """Where answers are kept. `is_fresh`: what is there is not used. Engines that cannot tell what they run are `trusted` on request only."""

    folder: Path
    is_fresh: bool = False
    trusted: bool = False


def ask_engine(engine: Engine, sets: Sequence[EvalSet], *, batch: int, progress: Progress, label: str, reuse: Reuse | None = None) -> EngineRun:
    """Asks every usable item of every set once, except for those that `reuse` has the answers to."""
    # an engine over a network has its own number, which keeps all of its places busy and changes no answer
    asked = _Asked(engine, getattr(engine, "group", batch), _Pace(progress, sum(len(each.samples) for each in sets), label))
    cache = _open_cache(engine, batch, reuse)
    if cache is None:
        answered = {each.name: asked.answer_set(each, None) for each in sets}
    else:
        with cache:
            answered = {each.name: asked.answer_set(each, cache) for each in sets}
    return EngineRun(answered, dict(engine.fingerprint), batch, asked.reused)


def inputs_digest(prepared: Prepared) -> str:
    """16 hex digits of the prompt's ids and of some patches of every picture: the same for the same inputs on every machine."""
    digest = hashlib.sha256(repr(prepared.token_ids).encode())
    for picture in prepared.pictures:
        step = max(1, len(picture.pixel_values) // PATCHES_DIGESTED)
        digest.update(repr(picture.grid).encode())
        digest.update(picture.pixel_values[::step].contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]


def _open_cache(engine: Engine, batch: int, reuse: Reuse | None) -> AnswerCache | None:
    if reuse is None or (engine.fingerprint.get("model_digest") is None and not reuse.trusted):
        return None
    path = cache_path(reuse.folder, engine.fingerprint, batch)
    try:
        return AnswerCache(path, is_fresh=reuse.is_fresh)
    except OSError as error:
        raise RunError(f"answers cannot be kept in {path.parent}: {error.strerror}", "set QVLOPT_CACHE to a folder that can be written") from error


class _Pace:
    """Tells a `Progress` how fast it goes."""

    def __init__(self, progress: Progress, total: int, label: str) -> None:
        self.progress = progress
        self.label = label
        self.began = time.monotonic()
        self.done = 0
        progress.start(total, label)

    def advance(self, asked: int, reused: int) -> None:
        """Items that were asked count for the pace, reused ones do not."""
        self.done += asked
        seconds = time.monotonic() - self.began
        pace = f", {self.done / seconds:.1f} items/s" if self.done and seconds > 0 else ""
        self.progress.advance(asked + reused, f"{self.label}{pace}")


class _Asked:
    """An engine at work."""

    def __init__(self, engine: Engine, batch: int, pace: _Pace) -> None:
        self.engine = engine
        self.batch = batch
        self.pace = pace
        self.reused = 0

    def answer_set(self, each: EvalSet, cache: AnswerCache | None) -> Answered:
        """Pictures of one size go together, and so do questions about one picture: they share work. The answers do not depend on it."""
        known = [(sample.id, cache.get(sample, each.max_new_tokens)) for sample in each.samples] if cache else []
        kept = {id: item for id, item in known if item is not None}
        self.reused += len(kept)
        self.pace.advance(0, len(kept))
        unreadable: dict[str, str] = {}
        left = [sample for sample in each.samples if sample.id not in kept]
        ordered = sorted(left, key=lambda sample: (each.sizes[sample.id], sample.cluster, len(sample.question), sample.id))
        for start in range(0, len(ordered), self.batch):
            part = ordered[start : start + self.batch]
            new = self._answer(part, unreadable, each.max_new_tokens)
            if cache:
                cache.put([(sample, new[sample.id]) for sample in part if sample.id in new], each.max_new_tokens)
            kept |= new
            self.pace.advance(len(part), 0)
        found = {sample.id: kept[sample.id] for sample in each.samples if sample.id in kept}
        return Answered(
            answers={id: item.answer for id, item in found.items()},
            unreadable=unreadable,
            sizes={id: item.sizes for id, item in found.items()},
            inputs={id: item.inputs for id, item in found.items()},
        )

    def _answer(self, samples: Sequence[Sample], unreadable: dict[str, str], max_new_tokens: int) -> dict[str, Kept]:
        prepared = _prepare(self.engine, samples, unreadable)
        answers = _generate(self.engine, prepared, max_new_tokens)
        return {
            item.id: Kept(answer, tuple(picture.size for picture in item.pictures), inputs_digest(item))
            for item, answer in zip(prepared, answers, strict=True)
        }


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
