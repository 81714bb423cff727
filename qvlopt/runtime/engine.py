"""What evaluate, damage and bench know of an engine: samples in, answers, logits and features out.

Stages. Who wants to time an engine sets `engine.on_stage` to a function that takes a stage's name and returns a context
manager; the engine enters it around that work, waits for its device inside it, and pays nothing while it is None:

    preprocess   in `prepare`: pictures loaded, resized and patched, the prompt encoded, once a sample
    vision       in `generate` and `score`: pictures through the tower, once a call at most (not entered without pictures)
    prefill      the prompt through the language model and the choice of the first token, once a batch
    decode       one further token of every row of the batch: entered once a step
    detokenise   ids to text, once a batch

A batch is what the engine runs at once: of `OnnxEngine` one sample, so that one `generate` of n samples has n prefills.
Loading is what comes before there is an engine: time `open_engine`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import torch

from qvlopt.data.samples import Sample
from qvlopt.model.preprocess import Picture

Stop = Literal["eos", "length", "time", "error"]
Stage = Literal["preprocess", "vision", "prefill", "decode", "detokenise"]
OnStage = Callable[[Stage], AbstractContextManager[object]]

SERVERS_OWN = "decided by the server"
"""In a fingerprint: not known here, so neither like nor unlike what another engine has."""


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
    raw. `stop` is `length` when the limit of tokens came first, `time` when that of seconds did (`token_ids` are those
    made until then). `error` says why there is no answer (`stop` is then `error`). `new_tokens` counts the new tokens where
    a server tells their number only; otherwise it is None and `token_ids` has them.
    """

    id: str
    token_ids: tuple[int, ...]
    text: str
    stop: Stop
    prompt_tokens: int
    error: str | None = None
    new_tokens: int | None = None


@dataclass(frozen=True)
class Scored:
    """Teacher-forced logits: row a of `logits` float32 [A, vocabulary] is what chooses `answer_ids[a]`.

    Each row follows from the prompt and the answer's tokens before it. The vocabulary is the tokenizer's own ids, without
    the rows that only pad the table. On the CPU.
    """

    id: str
    answer_ids: tuple[int, ...]
    logits: torch.Tensor


class Encoded(NamedTuple):
    """One picture's features: `image_embeds` float32 [M, hidden] and `deepstack` float32 [taps, M, hidden], on the CPU."""

    image_embeds: torch.Tensor
    deepstack: torch.Tensor


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


@runtime_checkable
class LocalEngine(Engine, Protocol):
    """An engine in this process: one can look inside and time its stages."""

    on_stage: OnStage | None

    def score(self, prepared: Prepared, answer_ids: Sequence[int]) -> Scored:
        """Logits of an answer that is given, whatever the engine would say. Raises ItemError when it is longer than the model's positions."""

    def encode(self, picture: Picture) -> Encoded:
        """What the vision tower makes of one picture."""


def stage(on_stage: OnStage | None, name: Stage) -> AbstractContextManager[object]:
    """The observer's context manager for this stage, or one that does nothing."""
    return nullcontext() if on_stage is None else on_stage(name)
