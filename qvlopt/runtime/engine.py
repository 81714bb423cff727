"""What evaluate and bench know of an engine: samples in, answers out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch

from qvlopt.data.samples import Sample
from qvlopt.model.preprocess import Picture

Stop = Literal["eos", "length", "error"]


@dataclass(frozen=True)
class Prepared:
    """A sample ready to run: prompt ids, preprocessed pictures, M-RoPE positions int64 [3, T] and the step to the next."""

    id: str
    token_ids: tuple[int, ...]
    pictures: tuple[Picture, ...]
    positions: torch.Tensor
    delta: int


@dataclass(frozen=True)
class Answer:
    """What an engine said to one sample.

    `token_ids` are the new tokens, the one that ended the answer included; `text` is without special tokens, otherwise
    raw. `stop` is `length` when the limit came first. `error` says why there is no answer (`stop` is then `error`).
    """

    id: str
    token_ids: tuple[int, ...]
    text: str
    stop: Stop
    prompt_tokens: int
    error: str | None = None


class Engine(Protocol):
    """Answers samples greedily. An answer does not depend on the batch it came in, its order, or what came before."""

    @property
    def fingerprint(self) -> dict[str, Any]:
        """Everything besides the weights that answers depend on; results of unlike fingerprints are not compared."""

    def prepare(self, sample: Sample) -> Prepared:
        """Loads and preprocesses; raises ItemError when this sample cannot be run."""

    def generate(self, prepared: Sequence[Prepared], *, max_new_tokens: int) -> list[Answer]:
        """One answer a sample, in order. An item that the engine fails on has `error` set; the others are not touched."""

    def close(self) -> None:
        """Gives memory and connections back."""
