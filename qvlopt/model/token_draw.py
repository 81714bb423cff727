"""Which tokens of which picture enter the statistics of a layer: at most so many, evenly from all pictures, by a seed."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch

MOST_TOKENS = 16_384
"""Tokens whose inputs enter a layer's statistics: four for every input of the widest layer (4096) of the 2B and 4B tower.
What a cap costs in quality was measured on trained weights: benchmarks/RESULTS.md, "Tokens"."""


HELD_OUT = ".held_out"
"""After a layer's name: its statistics over the pictures that are held out, which choose between methods and fit nothing."""

HELD_OUT_EVERY = 4
"""One picture of so many is held out: enough to tell two methods apart, few enough to fit to the rest."""


def is_held_out(picture: int) -> bool:
    """Whether the picture of that place is: every fourth of an order that a seeded hash gave, so a fair draw."""
    return picture % HELD_OUT_EVERY == HELD_OUT_EVERY - 1


def even_shares(tokens: Sequence[int], most: int) -> list[int]:
    """How many tokens to take of pictures that have `tokens`, at most `most` together, each as many as any other or all it has.

    What does not divide goes to the first pictures. All tokens are taken when there are no more than `most`.
    """
    shares = [0] * len(tokens)
    left = min(most, sum(tokens))
    waiting = sorted(range(len(tokens)), key=lambda index: tokens[index])
    while waiting:
        level = left // len(waiting)
        small = [index for index in waiting if tokens[index] <= level]
        if not small:
            break
        for index in small:
            shares[index] = tokens[index]
            left -= tokens[index]
        waiting = waiting[len(small) :]
    for place, index in enumerate(sorted(waiting)):
        shares[index] = left // len(waiting) + (place < left % len(waiting))
    return shares


def drawn_tokens(tokens: int, share: int, *, seed: int, picture: int) -> torch.Tensor | None:
    """The places of `share` of a picture's `tokens`, int64 in ascending order; None for all of them.

    Depends on nothing but the arguments: layers of one width of tokens see the same ones.
    """
    if share >= tokens:
        return None
    key = hashlib.sha256(f"{seed}/{picture}/{tokens}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(key[:6], "big"))
    return torch.randperm(tokens, generator=generator)[:share].sort().values
