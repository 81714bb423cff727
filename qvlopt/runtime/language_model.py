"""The language model of an ONNX artifact: runs tokens behind those it has seen, over one key-value buffer.

Letters in shapes: S new tokens, K of them with logits, H hidden width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import onnxruntime as ort

from qvlopt.graphs import names
from qvlopt.runtime.kv_cache import KvCache
from qvlopt.runtime.sessions import shrinking


class LanguageShape(NamedTuple):
    """Sizes of a language model; `taps` is the number of DeepStack features, `vocabulary` the columns of its logits."""

    layers: int
    kv_heads: int
    head_dim: int
    hidden: int
    taps: int
    vocabulary: int


class LanguageModel:
    """One sequence at a time. `decoder` runs any number of tokens, `twin` (else `decoder`) single steps of generation."""

    def __init__(self, decoder: ort.InferenceSession, shape: LanguageShape, twin: ort.InferenceSession | None = None) -> None:
        self.shape = shape
        self.kv = KvCache(shape.layers, shape.kv_heads, shape.head_dim)
        self.has_twin = twin is not None
        self._decoder = decoder
        self._stepper = _Stepper(twin or decoder, shape, self.kv)

    def run(self, embeds: np.ndarray, positions: np.ndarray, deepstack: np.ndarray | None, rows: Sequence[int]) -> np.ndarray:
        """Appends S tokens: embeds float32 [S, H], positions int64 [3, S], deepstack float32 [taps, S, H] or None for zeros.

        Returns logits float32 [K, vocabulary] of the new tokens `rows`, of which there may be none.
        """
        count = len(embeds)
        self.kv.reserve(self.kv.length + count)
        if deepstack is None:
            deepstack = np.zeros((self.shape.taps, count, self.shape.hidden), np.float32)
        feeds = _feeds(embeds, positions, deepstack, self.kv.length + count)
        feeds[names.LOGIT_INDICES] = np.array(rows, np.int64)
        logits = np.empty((1, len(rows), self.shape.vocabulary), np.float32)
        bound = _Bound(self._decoder, self.kv, feeds, logits)
        bound.run(shrinking())
        self.kv.check_in_place(bound.presents())
        self.kv.length += count
        out: np.ndarray = logits[0]
        return out

    def step(self, embed: np.ndarray, position: int) -> np.ndarray:
        """Appends one token that is no picture's: embed float32 [H], `position` on all three axes. Logits float32 [vocabulary].

        The result is overwritten by the next step.
        """
        self.kv.reserve(self.kv.length + 1)
        logits = self._stepper.run(embed, position)
        self.kv.length += 1
        return logits


def interface(shape: LanguageShape) -> tuple[list[str], list[str]]:
    """Names of everything that goes in and out of a graph of this shape."""
    layers = range(shape.layers)
    inputs = [names.INPUTS_EMBEDS, names.POSITION_IDS, names.LOGIT_INDICES, names.SEQLENS_K, names.TOTAL_LENGTH]
    inputs += [names.DEEPSTACK_EMBEDS] if shape.taps else []
    inputs += [name(layer) for layer in layers for name in (names.past_key, names.past_value)]
    return inputs, [names.LOGITS, *(name(layer) for layer in layers for name in (names.present_key, names.present_value))]


class _Bound:
    """A session with every input and output bound: the key-value buffer as past and as present, `feeds` and `logits` as given."""

    def __init__(self, session: ort.InferenceSession, kv: KvCache, feeds: dict[str, np.ndarray], logits: np.ndarray) -> None:
        self._session = session
        self._binding = session.io_binding()
        self._kept = (feeds, logits)  # ONNX Runtime works on the arrays' own memory
        for name, array in feeds.items():
            self._binding.bind_ortvalue_input(name, ort.OrtValue.ortvalue_from_numpy(array))
        self._binding.bind_ortvalue_output(names.LOGITS, ort.OrtValue.ortvalue_from_numpy(logits))
        for layer, what, buffer in kv.bound():
            past, present = (names.past_key, names.present_key) if what == "key" else (names.past_value, names.present_value)
            self._binding.bind_ortvalue_input(past(layer), buffer)
            self._binding.bind_ortvalue_output(present(layer), buffer)

    def run(self, options: ort.RunOptions | None = None) -> None:
        self._session.run_with_iobinding(self._binding, options)

    def presents(self) -> list[ort.OrtValue]:
        """The present values of the last run, in the order of `KvCache.bound`."""
        values: list[ort.OrtValue] = self._binding.get_outputs()[1:]
        return values


class _Stepper:
    """Runs one token at a time over arrays that stay bound, so that a step costs a run and nothing else."""

    def __init__(self, session: ort.InferenceSession, shape: LanguageShape, kv: KvCache) -> None:
        self._session, self._kv = session, kv
        no_picture = np.zeros((shape.taps, 1, shape.hidden), np.float32)
        self._feeds = _feeds(np.zeros((1, shape.hidden), np.float32), np.zeros((3, 1), np.int64), no_picture, 1)
        self._feeds[names.LOGIT_INDICES] = np.zeros(1, np.int64)
        self._logits = np.empty((1, 1, shape.vocabulary), np.float32)
        self._bound: _Bound | None = None
        self._version = -1

    def run(self, embed: np.ndarray, position: int) -> np.ndarray:
        feeds, total = self._feeds, self._kv.length + 1
        feeds[names.INPUTS_EMBEDS][0, 0] = embed
        feeds[names.POSITION_IDS][:] = position
        feeds[names.SEQLENS_K][0] = total - 1
        feeds[names.TOTAL_LENGTH][()] = total
        fresh = self._bound is None or self._version != self._kv.version
        if self._bound is None or fresh:
            self._bound = _Bound(self._session, self._kv, feeds, self._logits)
            self._version = self._kv.version
        self._bound.run()
        if fresh:
            self._kv.check_in_place(self._bound.presents())
        logits: np.ndarray = self._logits[0, 0]
        return logits


def _feeds(embeds: np.ndarray, positions: np.ndarray, deepstack: np.ndarray, total: int) -> dict[str, np.ndarray]:
    """Inputs of a run after which `total` tokens are in the buffer; all but the indices and the buffer itself."""
    feeds = {
        names.INPUTS_EMBEDS: np.ascontiguousarray(embeds[None]),
        names.POSITION_IDS: np.ascontiguousarray(positions[:, None]),
        names.SEQLENS_K: np.array([total - 1], np.int32),
        names.TOTAL_LENGTH: np.array(total, np.int32),
    }
    if len(deepstack):
        feeds[names.DEEPSTACK_EMBEDS] = np.ascontiguousarray(deepstack[:, None])
    return feeds
