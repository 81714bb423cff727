"""Keys and values of one sequence, written in place: what a graph reads as past and writes as present is one buffer.

The buffer has room for more tokens than are in it and grows in steps, so that a token costs no copy of those before it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import onnxruntime as ort

from qvlopt.errors import RunError

STEP = 512
"""Tokens by which the buffer grows."""
SHRINK = 4
"""A buffer this many times larger than the next sequence needs is replaced: one long prompt does not cost for ever."""


class KvCache:
    """`array` float32 [layers, 2, 1, heads, capacity, head_dim]: keys then values; `length` tokens of it are filled.

    `version` changes whenever the buffer is another one, so that whoever bound it knows.
    """

    def __init__(self, layers: int, heads: int, head_dim: int) -> None:
        self._shape = (layers, heads, head_dim)
        self.length = 0
        self.version = 0
        self._allocate(STEP)

    @property
    def capacity(self) -> int:
        """Tokens that fit."""
        return int(self.array.shape[4])

    @property
    def token_bytes(self) -> int:
        """Bytes that one token takes."""
        layers, heads, head_dim = self._shape
        return layers * 2 * heads * head_dim * self.array.itemsize

    def start(self, tokens: int) -> None:
        """Forgets the sequence and makes room for another of so many tokens."""
        self.length = 0
        wanted = _rounded(tokens)
        if wanted > self.capacity or self.capacity > SHRINK * wanted:
            self._allocate(wanted)

    def reserve(self, tokens: int) -> None:
        """Makes room for the sequence to become so long; what is in it stays."""
        if tokens <= self.capacity:
            return
        kept, length = self.array, self.length
        self._allocate(_rounded(tokens))
        self.array[:, :, :, :, :length] = kept[:, :, :, :, :length]

    def snapshot(self, length: int) -> np.ndarray:
        """A copy of the first `length` tokens, float32 [layers, 2, 1, heads, length, head_dim]."""
        assert length <= self.length
        return self.array[:, :, :, :, :length].copy()

    def restore(self, snapshot: np.ndarray) -> None:
        """Begins the sequence with a snapshot. There must be room (`start`)."""
        self.length = snapshot.shape[4]
        self.array[:, :, :, :, : self.length] = snapshot

    def bound(self) -> Iterator[tuple[int, str, ort.OrtValue]]:
        """(layer, `key` or `value`, buffer) of every layer."""
        for layer, (key, value) in enumerate(self._values):
            yield layer, "key", key
            yield layer, "value", value

    def check_in_place(self, presents: Sequence[ort.OrtValue]) -> None:
        """Raises RunError unless the graph's present values, in the order of `bound`, are this very buffer.

        Another buffer would mean that every step copies the whole past, or that the past is never written.
        """
        for (layer, what, past), present in zip(self.bound(), presents, strict=True):
            if past.data_ptr() != present.data_ptr():
                raise RunError(f"onnxruntime {ort.__version__} copies the {what}s of layer {layer} instead of writing in place; this is a bug")

    def _allocate(self, capacity: int) -> None:
        """Zeros come from the kernel when they are first touched, so room costs no memory until it is used."""
        layers, heads, head_dim = self._shape
        self.array = np.zeros((layers, 2, 1, heads, capacity, head_dim), np.float32)
        self._values = [(ort.OrtValue.ortvalue_from_numpy(key), ort.OrtValue.ortvalue_from_numpy(value)) for key, value in self.array]
        self.version += 1


def _rounded(tokens: int) -> int:
    return max(1, -(-tokens // STEP)) * STEP
