"""What one stage of a candidate does by itself, and how much of all that is."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch


@dataclass(frozen=True)
class StageDamage:
    """What one stage of the candidate does by itself. Figures of a residual stage are those of what it adds to its input.

    `kl` is the mean KL divergence in nats at the answers' tokens when this stage alone is the candidate's. `share` is its share
    of what all stages do, each by itself: the mean of the items' shares, so that one item that breaks does not decide.
    `is_dead`: it gives only zeros, or is not there at all, where the base's gives something.
    """

    stage: str
    relative_error: float
    cosine: float
    sqnr_db: float
    kl: float
    share: float = 1.0
    is_dead: bool = False


@dataclass
class Tally:
    """Sums over items of one stage's output: of the base, of the candidate, of their product and their difference; KL by item."""

    base: float = 0.0
    candidate: float = 0.0
    product: float = 0.0
    off: float = 0.0
    kl: dict[int, float] = field(default_factory=dict)

    def add(self, base: torch.Tensor, candidate: torch.Tensor) -> None:
        x, y = base.double(), candidate.double()
        self.base += float(x.square().sum())
        self.candidate += float(y.square().sum())
        self.product += float((x * y).sum())
        self.off += float((y - x).square().sum())

    def result(self, stage: str) -> StageDamage:
        error = math.sqrt(self.off / self.base) if self.base else math.inf
        norms = math.sqrt(self.base * self.candidate)
        return StageDamage(
            stage=stage,
            relative_error=error,
            cosine=min(1.0, self.product / norms) if norms else 0.0,
            sqnr_db=-20 * math.log10(error) if error else math.inf,
            kl=math.fsum(self.kl.values()) / len(self.kl) if self.kl else 0.0,
            is_dead=self.candidate == 0 < self.base,
        )


def shares(effects: Mapping[str, Mapping[int, float]]) -> dict[str, float]:
    """Mean over items of every stage's share in the item's sum; items on which no stage has an effect do not count.

    Where a stage makes the answer impossible (an infinite effect), it has all of that item, with others like it.
    """
    items = {item for of_stage in effects.values() for item in of_stage}
    votes: dict[str, list[float]] = {stage: [] for stage in effects}
    for item in items:
        found = {stage: of_stage.get(item, 0.0) for stage, of_stage in effects.items()}
        if math.inf in found.values():
            found = {stage: float(value == math.inf) for stage, value in found.items()}
        total = math.fsum(found.values())
        for stage, value in found.items():
            votes[stage] += [value / total] if total else []
    return {stage: math.fsum(cast) / len(cast) if cast else 0.0 for stage, cast in votes.items()}
