"""Engines without a model: they answer what a test tells them to, under the protocol of runtime/engine.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from qvlopt.data.samples import Sample
from qvlopt.model.preprocess import Picture
from qvlopt.runtime.engine import Answer, Prepared

CONDITIONS: dict[str, Any] = {
    "engine": "fake",
    "dtype": "float32",
    "pixels": {"min": 1024, "max": 65536},
    "generation": {"sampling": "greedy", "penalties": None, "eos_ids": [1]},
}


def right(sample: Sample) -> str:
    """The first right answer."""
    return sample.answers[0]


class FakeEngine:
    """Says `say(sample)`, one token a character, after decoding the pictures. `fingerprint` entries replace the usual ones.

    An answer of None is an engine failure of that item; an exception is raised for the whole batch. `batches` are the ids
    that came together.
    """

    def __init__(self, say: Callable[[Sample], str | None] = right, **fingerprint: Any) -> None:
        self.say = say
        self.fingerprint = CONDITIONS | fingerprint
        self.samples: dict[str, Sample] = {}
        self.batches: list[list[str]] = []
        self.is_closed = False

    def prepare(self, sample: Sample) -> Prepared:
        assert not self.is_closed
        sizes = [image.load().size for image in sample.images]
        pictures = tuple(Picture(torch.empty(0), (height // 16, width // 16), (width, height)) for width, height in sizes)
        self.samples[sample.id] = sample
        return Prepared(sample.id, (7, 8, 9), pictures, torch.zeros((3, 3), dtype=torch.int64), 0)

    def generate(self, prepared: Sequence[Prepared], *, max_new_tokens: int) -> list[Answer]:
        self.batches.append([item.id for item in prepared])
        return [self._answer(self.samples[item.id], max_new_tokens) for item in prepared]

    def close(self) -> None:
        self.is_closed = True

    def _answer(self, sample: Sample, max_new_tokens: int) -> Answer:
        text = self.say(sample)
        if text is None:
            return Answer(sample.id, (), "", "error", 3, "logits are not finite")
        shown = text[:max_new_tokens]
        stop = "length" if len(text) > max_new_tokens else "eos"
        return Answer(sample.id, tuple(range(len(shown))), shown, stop, 3)  # type: ignore[arg-type]
