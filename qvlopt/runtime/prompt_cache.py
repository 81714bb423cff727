"""Keys and values of prompt beginnings that end with a picture: another question on it costs only its new tokens.

Causal attention and M-RoPE make a beginning's keys and values independent of what follows. `plan_chunks` cuts every prompt
behind each of its pictures, with the cache or without, so that a question behind a kept beginning goes through the very
same runs as one from scratch: the answers are equal to the bit, not only nearly.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from qvlopt.runtime.byte_cache import ByteCache, cache_limit_bytes

SHARE = 8
MOST_BYTES = 4 << 30
"""One part in SHARE of the memory at hand, MOST_BYTES at most: at 2B's shape a picture of 640x480 takes 72 MB."""
CHUNK = 512
"""Most tokens of one run: it bounds the memory of a long prompt, and larger matrices are no faster."""


class Prefix(NamedTuple):
    """A prompt's first `length` tokens, the last of which is the last of its `pictures`-th picture."""

    length: int
    pictures: int
    key: str


def picture_spans(ids: Sequence[int], image_token_id: int, counts: Sequence[int]) -> list[tuple[int, int]]:
    """Where each picture's tokens begin and end, given how many each has. Its tokens stand in a row (`rope_positions`)."""
    spans, at = [], 0
    for count in counts:
        start = ids.index(image_token_id, at)
        at = start + count
        spans.append((start, at))
    return spans


def prefixes(ids: Sequence[int], spans: Sequence[tuple[int, int]], pictures: Sequence[str], model_digest: str) -> list[Prefix]:
    """The beginnings of a prompt that end with a picture, shortest first. `pictures` are the pictures' keys.

    A key is the hex SHA-256 of the model, every token id and every picture of the beginning.
    """
    found = []
    for number, (_, end) in enumerate(spans, start=1):
        digest = hashlib.sha256(f"{model_digest}/{'/'.join(pictures[:number])}/".encode())
        digest.update(np.asarray(ids[:end], np.int64).tobytes())
        found.append(Prefix(end, number, digest.hexdigest()))
    return found


def plan_chunks(start: int, end: int, cuts: Sequence[int], size: int = CHUNK) -> list[tuple[int, int]]:
    """Cuts tokens [start, end) at `cuts` and into runs of `size` at most, counted from each cut."""
    edges = [start, *sorted(cut for cut in set(cuts) if start < cut < end), end]
    return [(at, min(at + size, stop)) for begin, stop in itertools.pairwise(edges) for at in range(begin, stop, size)]


class PromptCache:
    """Snapshots of the key-value buffer (`KvCache.snapshot`) by `Prefix.key`; the least lately used goes first."""

    def __init__(self, limit_bytes: int | None = None) -> None:
        self.memory: ByteCache[np.ndarray] = ByteCache(cache_limit_bytes(SHARE, MOST_BYTES) if limit_bytes is None else limit_bytes)

    def longest(self, candidates: Sequence[Prefix]) -> tuple[Prefix, np.ndarray] | None:
        """The longest of the beginnings that is known, with its keys and values."""
        for prefix in reversed(candidates):
            if prefix.key in self.memory:
                snapshot = self.memory.get(prefix.key)
                assert snapshot is not None
                return prefix, snapshot
        return None

    def would_keep(self, n_bytes: int) -> bool:
        """Whether a snapshot of this size has a chance, so that it is worth making."""
        return n_bytes <= self.memory.limit_bytes

    def put(self, prefix: Prefix, snapshot: np.ndarray) -> None:
        self.memory.put(prefix.key, snapshot, snapshot.nbytes)
