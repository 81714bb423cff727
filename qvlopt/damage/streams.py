"""One item on its way through the base model, together with what becomes of it when a single stage is the candidate's.

A stream is one such way: stream 0 is the base throughout, every other one leaves the base for one stage and goes on with
the base's. Letters in shapes: S streams, N patches and M merged tokens of a picture, T tokens, A answer tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from qvlopt.model.preprocess import Picture

AT_ONCE = 8
"""Streams in one call, so that memory does not grow with their number."""

Change = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Forced:
    """A prompt and the answer that both models are given: ids, preprocessed pictures, M-RoPE positions int64 [3, T] and the step on."""

    id: str
    prompt_ids: tuple[int, ...]
    answer_ids: tuple[int, ...]
    pictures: tuple[Picture, ...]
    positions: torch.Tensor
    delta: int

    @property
    def ids(self) -> torch.Tensor:
        """What is run, int64 [T]: the answer's last token is chosen and never read."""
        return torch.tensor([*self.prompt_ids, *self.answer_ids[:-1]])

    @property
    def all_positions(self) -> torch.Tensor:
        """Of `ids`, int64 [3, T]."""
        start = len(self.prompt_ids) + self.delta
        return torch.cat((self.positions, (start + torch.arange(len(self.answer_ids) - 1)).expand(3, -1)), dim=1)


@dataclass
class Streams:
    """The streams of one item. `origins` names the stage that each stream takes from the candidate; None for the base.

    `hidden` are the states at the present stage: one [S, N, D] a picture in the tower, one [S, T, D] in the language model.
    `taps` holds, for each DeepStack tap so far, one [S, M, D] a picture. `logits` are the base's, [A, V]. A plain item is
    only run by the base; no stage of the candidate is looked at.
    """

    item: Forced
    is_plain: bool = False
    hidden: list[torch.Tensor] = field(default_factory=list)
    taps: list[list[torch.Tensor]] = field(default_factory=list)
    merged: list[torch.Tensor] = field(default_factory=list)
    origins: list[str | None] = field(default_factory=lambda: [None])
    logits: torch.Tensor | None = None

    def base(self) -> list[torch.Tensor]:
        """The base's own states, [1, ...] each."""
        return [states[:1] for states in self.hidden]

    def advance(self, outputs: Sequence[Change], stage: str, swapped: Sequence[torch.Tensor] | None) -> None:
        """Every stream through the base's stage; `swapped`, the candidate's output for the base's input, becomes a stream."""
        self.hidden = [in_parts(change, states) for change, states in zip(outputs, self.hidden, strict=True)]
        if swapped is not None:
            self.hidden = [torch.cat((states, other)) for states, other in zip(self.hidden, swapped, strict=True)]
            self.origins.append(stage)

    def branch(self, outputs: Sequence[Change], stage: str, swapped: Sequence[torch.Tensor] | None) -> list[torch.Tensor]:
        """What a stage that leaves the states as they are (a tap, the merger) gives for every stream, [S, ...] a picture."""
        given = [in_parts(change, states) for change, states in zip(outputs, self.hidden, strict=True)]
        if swapped is None:
            return given
        self.hidden = [torch.cat((states, states[:1])) for states in self.hidden]
        self.origins.append(stage)
        return [torch.cat((states, other)) for states, other in zip(given, swapped, strict=True)]

    def filled(self, values: torch.Tensor) -> torch.Tensor:
        """`values` of the streams that there were [S', ...] for those that there are [S, ...]; newer ones were the base then."""
        return torch.cat((values, values[:1].expand(len(self.origins) - len(values), *values.shape[1:])))


def in_parts(change: Change, states: torch.Tensor) -> torch.Tensor:
    """`change` of states [S, ...], a few streams at a time."""
    return torch.cat([change(states[start : start + AT_ONCE]) for start in range(0, len(states), AT_ONCE)])
