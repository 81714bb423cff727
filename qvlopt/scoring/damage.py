"""What a candidate's tensors and next-token distributions show, long before its scores do: on a few items, given the base's answers."""

from __future__ import annotations

import hashlib
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import NamedTuple

import torch

from qvlopt.damage.logits import agreement, first_divergence, kl_divergence
from qvlopt.damage.stages import same_inputs
from qvlopt.damage.streams import Forced
from qvlopt.damage.tally import StageDamage
from qvlopt.damage.tensors import cosine, relative_error
from qvlopt.data.samples import Sample
from qvlopt.errors import ItemError
from qvlopt.report.progress import Progress
from qvlopt.runtime.engine import Answer, Encoded, LocalEngine
from qvlopt.scoring.evaluate import EngineRun, EvalSet

MOST_BYTES = 512 * 1024**2
"""What a look may hold: pixels, features and logits wait in memory for the other side's. Items beyond this are left out."""


class Key(NamedTuple):
    """An item: the name of its set and its id."""

    set: str
    id: str


@dataclass(frozen=True)
class Look:
    """What one engine showed on the items that are looked at closely, all given the base's answers.

    `logits` float32 [A, V] at the answer's tokens, `encoded` what the tower made of each picture.
    """

    items: Mapping[Key, Forced]
    logits: Mapping[Key, torch.Tensor]
    encoded: Mapping[Key, tuple[Encoded, ...]]


@dataclass(frozen=True)
class OutputDamage:
    """One output of the tower over all pictures: `image_embeds` or `deepstack.I`. `cosine_min` is that of the worst picture."""

    output: str
    relative_error: float
    sqnr_db: float
    cosine: float
    cosine_min: float
    max_abs: float


NEGLIGIBLE = 1e-8
"""KL divergence in nats that sums in another order give: float32 has about 1e-7, and the divergence is of second order."""


@dataclass(frozen=True)
class Blame:
    """The stage that changes the answers most, and its share of what all stages change each by itself.

    `cause` says of an ONNX artifact whether exporting or quantising did it, where that can be told.
    """

    stage: str
    share: float
    detail: str
    cause: str | None = None


@dataclass(frozen=True)
class Step:
    """The distance of one step on the way to a candidate, such as from the source to its export."""

    name: str
    kl_mean: float | None
    top1_agreement: float | None
    vision_cosine_min: float | None


@dataclass(frozen=True)
class Damage:
    """Distances of a candidate from its base, at `tokens` answer tokens of `items` items.

    `kl_mean` and `kl_max` in nats, KL(base || candidate); `kl_error` is the standard error of the mean over items, as tokens of one
    answer are not independent. `first_divergence` is the median index of the token where answers part, over those that do.
    `stages` are the worst first. `steps` lead from the base over its export to the candidate. `notes` say what could not be measured.
    """

    items: int
    tokens: int
    kl_mean: float | None
    kl_error: float | None
    kl_max: float | None
    top1_agreement: float | None
    outputs: tuple[OutputDamage, ...]
    answers_equal: float | None
    first_divergence: float | None
    inputs_changed: int
    stages: tuple[StageDamage, ...] = ()
    blame: Blame | None = None
    steps: tuple[Step, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def vision_cosine_min(self) -> float | None:
        return min((output.cosine_min for output in self.outputs), default=None)

    @property
    def is_none(self) -> bool:
        """Whether not a bit of what was looked at differs."""
        outputs_equal = all(output.max_abs == 0 for output in self.outputs)
        return self.kl_max == 0 and outputs_equal and not self.inputs_changed

    @property
    def is_rounding(self) -> bool:
        """Whether it is no more than another order of summation gives."""
        return not self.inputs_changed and self.kl_max is not None and self.kl_max <= NEGLIGIBLE


def choose_items(sets: Sequence[EvalSet], base: EngineRun, count: int, seed: int) -> dict[Key, tuple[Sample, tuple[int, ...]]]:
    """`count` items of every set that the base answered, no two about one picture, with the base's answers.

    By a seeded hash of the ids, so that it is the same items in every run.
    """
    by_set: list[list[tuple[Key, tuple[Sample, tuple[int, ...]]]]] = []
    for each in sets:
        answers = base.answered[each.name].answers if each.name in base.answered else {}
        usable = [s for s in each.samples if s.id in answers and answers[s.id].error is None and answers[s.id].token_ids]
        by_hash = sorted(usable, key=lambda sample: hashlib.sha256(f"{seed}\0{sample.id}".encode("utf-8", "surrogatepass")).digest())
        one_a_picture = {sample.cluster: sample for sample in reversed(by_hash)}
        kept = [sample for sample in by_hash if one_a_picture[sample.cluster] is sample][:count]
        by_set.append([(Key(each.name, sample.id), (sample, answers[sample.id].token_ids)) for sample in kept])
    # the sets take turns, so that none is left out when memory ends
    return dict(entry for turn in zip_longest(*by_set) for entry in turn if entry is not None)


def look(engine: LocalEngine, chosen: Mapping[Key, tuple[Sample, tuple[int, ...]]], progress: Progress) -> Look:
    """Runs the chosen items through an engine that is open. Those that it cannot run are left out, and those that memory has no room for."""
    items: dict[Key, Forced] = {}
    logits: dict[Key, torch.Tensor] = {}
    encoded: dict[Key, tuple[Encoded, ...]] = {}
    room = MOST_BYTES
    for key, (sample, answer_ids) in chosen.items():
        progress.advance()
        if room <= 0:
            continue
        try:
            prepared = engine.prepare(sample)
            logits[key] = engine.score(prepared, answer_ids).logits
        except ItemError:
            continue
        items[key] = Forced(sample.id, prepared.token_ids, answer_ids, prepared.pictures, prepared.positions, prepared.delta)
        encoded[key] = tuple(engine.encode(picture) for picture in prepared.pictures)
        room -= sum(t.nbytes for t in (logits[key], *(p.pixel_values for p in prepared.pictures), *(t for pair in encoded[key] for t in pair)))
    return Look(items, logits, encoded)


def measure(base: Look, candidate: Look, runs: tuple[EngineRun, EngineRun]) -> Damage:
    """Joins what both engines showed. Never raises for a candidate of another shape: what cannot be compared is noted."""
    keys = [key for key in base.items if key in candidate.items]
    notes: list[str] = []
    distances = list(_distances(base, candidate, keys, notes))
    by_item = [float(kl.mean()) for kl, _ in distances]
    every = torch.cat([kl for kl, _ in distances]) if distances else torch.empty(0)
    equal, parted = _divergence(runs)
    return Damage(
        items=len(distances),
        tokens=len(every),
        kl_mean=float(every.mean()) if len(every) else None,
        kl_error=statistics.stdev(by_item) / math.sqrt(len(by_item)) if len(by_item) > 1 and all(map(math.isfinite, by_item)) else None,
        kl_max=float(every.max()) if len(every) else None,
        top1_agreement=float(torch.cat([same for _, same in distances]).double().mean()) if distances else None,
        outputs=_output_damage(base, candidate, keys, notes),
        answers_equal=equal,
        first_divergence=parted,
        inputs_changed=sum(not same_inputs(base.items[key], candidate.items[key]) for key in keys),
        notes=tuple(dict.fromkeys(notes)),
    )


def blame_stages(stages: Sequence[StageDamage]) -> Blame | None:
    """The first of the stages, which are sorted by what they do to the answers."""
    if not stages:
        return None
    first = stages[0]
    rest = "no other stage differs" if len(stages) == 1 else f"{first.share:.0%} of what the {len(stages)} stages that differ do, each by itself"
    dead = "it gives nothing but zeros or is missing; " if first.is_dead else ""
    return Blame(first.stage, first.share, f"{dead}KL {first.kl:.3g} nats with this stage alone, relative error {first.relative_error:.3g}; {rest}")


def _distances(base: Look, candidate: Look, keys: Sequence[Key], notes: list[str]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """KL divergence and agreement [A] of every item that both sides have logits for."""
    for key in keys:
        ours, theirs = base.logits.get(key), candidate.logits.get(key)
        if ours is None or theirs is None:
            continue
        if ours.shape != theirs.shape:
            notes.append(f"next-token distributions have other sizes ({ours.shape[1]} and {theirs.shape[1]} tokens), so they are not compared")
            continue
        yield kl_divergence(ours, theirs), agreement(ours, theirs)


def _output_damage(base: Look, candidate: Look, keys: Sequence[Key], notes: list[str]) -> tuple[OutputDamage, ...]:
    """Over pictures that both sides resize to the same size; others show what preprocessing did, not the tower."""
    alike = [key for key in keys if same_inputs(base.items[key], candidate.items[key])]
    pairs = [pair for key in alike for pair in zip(base.encoded[key], candidate.encoded[key], strict=True)]
    if any(one.deepstack.shape != other.deepstack.shape for one, other in pairs):
        notes.append("the towers have not the same DeepStack taps")
    found = [_damage_of("image_embeds", [(one.image_embeds, other.image_embeds) for one, other in pairs])] if pairs else []
    for tap in range(min((len(one.deepstack) for one, _ in pairs), default=0)):
        found.append(_damage_of(f"deepstack.{tap}", [(one.deepstack[tap], _tap(other, tap)) for one, other in pairs]))
    return tuple(found)


def _tap(encoded: Encoded, tap: int) -> torch.Tensor:
    """A tap's features [M, hidden]; zeros where the engine has no such tap."""
    return encoded.deepstack[tap] if tap < len(encoded.deepstack) else torch.zeros_like(encoded.image_embeds)


def _damage_of(output: str, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> OutputDamage:
    x, y = (torch.cat([pair[side].flatten() for pair in pairs]) for side in (0, 1))
    error = relative_error(x, y)
    sqnr = -20 * math.log10(error) if 0 < error < math.inf else math.inf if not error else -math.inf
    worst = min(cosine(one, other) for one, other in pairs)
    return OutputDamage(output, error, sqnr, cosine(x, y), worst, float((x - y).abs().max()))


def _divergence(runs: tuple[EngineRun, EngineRun]) -> tuple[float | None, float | None]:
    """Share of equal answers over everything that both answered, and the median index where the others part."""
    pairs: list[tuple[Answer, Answer]] = []
    for name, base in runs[0].answered.items():
        other = runs[1].answered.get(name)
        both = [id for id in base.answers if other and id in other.answers]
        pairs += [(base.answers[id], other.answers[id]) for id in both if other]
    # a server tells the text only, not its tokens
    parted = [first_divergence(one.token_ids, two.token_ids) for one, two in pairs if one.token_ids and two.token_ids]
    known = [index for index in parted if index is not None]
    equal = sum(one.text == two.text for one, two in pairs) / len(pairs) if pairs else None
    return equal, float(statistics.median(known)) if known else None
