"""What is measured and in which order.

Engines take turns in rounds, A B then B A, so that what drifts over time (heat, clocks, neighbours) meets all of them; each
turn is a process of its own, so only one engine is in memory and every turn's peak memory is its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple

State = Literal["cold", "warm picture", "warm prompt"]
STATES: tuple[State, ...] = ("cold", "warm picture", "warm prompt")
"""Nothing seen before; the picture seen, in a prompt that begins otherwise; the prompt seen up to and with its picture, with another
question behind. The warm ones only where an engine keeps something."""

ROUNDS = 2
"""Turns of each engine: the fewest that cancel a steady drift and show that a difference is not one process's."""


@dataclass(frozen=True)
class Case:
    """One shape of request: picture size in pixels, tokens of the prompt's text, new tokens, requests at once."""

    width: int
    height: int
    prompt_tokens: int
    new_tokens: int
    concurrency: int = 1

    @property
    def name(self) -> str:
        at_once = f", {self.concurrency} at once" if self.concurrency > 1 else ""
        return f"{self.width}x{self.height}, {self.prompt_tokens} tokens{at_once}"

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, **asdict(self)}


class Turn(NamedTuple):
    """One process's work: the engine's place in the list, the round, and the iterations it warms up with and measures."""

    engine: int
    round: int
    warmup: tuple[int, ...]
    measured: tuple[int, ...]


@dataclass(frozen=True)
class Workload:
    """The same requests for every engine. `warmup` is for each case and each turn, in the full shape, and never counted."""

    cases: tuple[Case, ...]
    repeats: int
    warmup: int
    seed: int

    @property
    def rounds(self) -> int:
        return min(ROUNDS, self.repeats)

    @property
    def iterations(self) -> int:
        """Every iteration has pictures and prompts of its own, warm-ups too."""
        return self.repeats + self.rounds * self.warmup

    def turns(self, engines: int) -> Iterator[Turn]:
        """All turns in the order in which they are taken; a round measures its share of the iterations."""
        for number in range(self.rounds):
            measured = tuple(range(self.repeats * number // self.rounds, self.repeats * (number + 1) // self.rounds))
            first = self.repeats + number * self.warmup
            order = range(engines) if number % 2 == 0 else reversed(range(engines))
            for engine in order:
                yield Turn(engine, number, tuple(range(first, first + self.warmup)), measured)

    def to_json(self) -> dict[str, Any]:
        return {
            "cases": [case.to_json() for case in self.cases],
            "repeats": self.repeats,
            "warmup": self.warmup,
            "warmup_excluded": True,
            "rounds": self.rounds,
            "seed": self.seed,
        }


def cases_of(images: Sequence[str], prompts: Sequence[int], new_tokens: int, concurrency: Sequence[int]) -> tuple[Case, ...]:
    """Every combination once; `images` are `WIDTHxHEIGHT`. The first is the one that an engine is summed up by."""
    sizes = [tuple(map(int, size.split("x"))) for size in images]
    all_cases = [Case(width, height, prompt, new_tokens, at_once) for at_once in concurrency for prompt in prompts for width, height in sizes]
    return tuple(dict.fromkeys(all_cases))
