"""How the next token is chosen from logits."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np

from qvlopt.errors import UsageError


@dataclass(frozen=True)
class Sampling:
    """Draws instead of taking the best: the logits are divided by `temperature`, then the `top_k` best are kept, then the
    fewest that have `top_p` of the probability together (the order of transformers' logits warpers).

    Raises UsageError for values that leave nothing to draw.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.temperature < float("inf"):
            raise UsageError(f"temperature is {self.temperature}, expected a number above 0", hint="leave sampling out for greedy answers")
        if self.top_k is not None and self.top_k < 1:
            raise UsageError(f"top_k is {self.top_k}, expected at least 1")
        if not 0 < self.top_p <= 1:
            raise UsageError(f"top_p is {self.top_p}, expected more than 0 and at most 1")

    def generator(self, id: str) -> np.random.Generator:
        """One item's own random numbers, so that neither order nor company changes its answer."""
        words = np.frombuffer(hashlib.sha256(id.encode()).digest(), np.uint32)
        return np.random.default_rng([self.seed, *map(int, words)])

    def probabilities(self, logits: np.ndarray) -> np.ndarray:
        """float64 [V] that sum to 1 over what may be drawn."""
        scaled = logits.astype(np.float64) / self.temperature
        order = np.argsort(-scaled, kind="stable")
        if self.top_k is not None:
            order = order[: self.top_k]
        weights = np.exp(scaled[order] - scaled[order[0]])
        weights /= weights.sum()
        kept = int(np.searchsorted(np.cumsum(weights), self.top_p, side="left")) + 1
        order, weights = order[:kept], weights[:kept]
        chances = np.zeros(len(scaled))
        chances[order] = weights / weights.sum()
        return chances


def best(logits: np.ndarray) -> tuple[int, float]:
    """The first of the largest logits and its value; NaN counts as the largest."""
    token = int(np.argmax(logits))
    return token, float(logits[token])


def draw(logits: np.ndarray, sampling: Sampling, random: np.random.Generator) -> tuple[int, float]:
    """A token by its chance, and its logit; logits that are not finite are handed on for the caller to see."""
    token, score = best(logits)
    if not np.isfinite(score):
        return token, score
    token = int(random.choice(len(logits), p=sampling.probabilities(logits)))
    return token, float(logits[token])
