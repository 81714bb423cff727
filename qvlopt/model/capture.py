"""Runs the tower over calibration pictures, stage by stage, and gives for each linear the statistics of its inputs.

One stage's weights and statistics are in memory at a time, and one batch's activations: what goes from block to block lies
in files, so memory does not grow with the number of pictures. A layer's statistics see at most MOST_TOKENS tokens, drawn
evenly from all pictures. The same pictures in the same order and batches give the same bits, in one go or resumed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import Any, NamedTuple

import torch

from qvlopt.artifact.unfinished import Parts
from qvlopt.errors import RunError
from qvlopt.model.hidden import HiddenStates, HiddenWriter, Shape
from qvlopt.model.input_sums import GramSum
from qvlopt.model.names import VISION, Stage, vision_stages
from qvlopt.model.positions import Grid
from qvlopt.model.source import Source
from qvlopt.model.stage_forward import Batch, StageForward, embedded
from qvlopt.model.token_draw import HELD_OUT, MOST_TOKENS, drawn_tokens, even_shares, is_held_out
from qvlopt.model.vision import Linear
from qvlopt.quant.objective import Gram

Seen = Callable[[int, str], None]
"""Told of progress: steps that are done, and what is being done."""


@dataclass(frozen=True)
class Capture:
    """What to calibrate and where. `parts` keeps the hidden states; `seed` draws the tokens; linears multiply in `dtype`.

    held_out: the statistics of the pictures that are held out come apart, under a layer's name with HELD_OUT after it.
    sums: what is kept of the inputs: all that a search needs (GramSum), the inputs besides (InputSum), or less (MagnitudeSum).
    """

    source: Source
    parts: Parts
    device: torch.device
    seed: int = 0
    most_tokens: int = MOST_TOKENS
    dtype: torch.dtype = torch.float32
    held_out: bool = False
    sums: type[GramSum] = GramSum

    def stages(
        self, batches: Callable[[], Iterable[Batch]], *, done: Collection[str] = (), seen: Seen = lambda _count, _text: None
    ) -> Iterator[tuple[Stage, dict[str, Gram]]]:
        """Every stage that is not in `done`, in order of computation, with its linears' statistics by canonical name.

        A stage counts as finished when the next is asked for: its input is dropped then. `batches` is called only where no
        hidden states of an earlier run can be used. Raises RunError naming the layer whose inputs are not finite.
        """
        stages = vision_stages(self.source.settings.vision)
        left = [index for index, stage in enumerate(stages) if stage.name not in done]
        if not left:
            return
        state = self._start(_blocks(stages[: left[0]]), batches, seen)
        for stage in stages[_place_after(stages, state.passed) : left[-1] + 1]:
            is_wanted = stage.name not in done
            if not is_wanted and not _is_block(stage):
                continue
            grams, after = self._stage(stage, state, is_wanted=is_wanted, seen=seen)
            if is_wanted:
                yield stage, grams
            del grams
            if after.passed != state.passed:
                self.parts.drop(_part(state.passed), _file(state.passed))
            state = after

    def _start(self, most: int, batches: Callable[[], Iterable[Batch]], seen: Seen) -> _State:
        """The hidden states after the largest number of blocks up to `most` for which there are any; else those of the pictures."""
        kept = self.parts.record("pictures")
        for passed in range(most, -1, -1):
            if kept is not None and self.parts.record(_part(passed)) is not None:
                for other in {*range(self.source.settings.vision.depth + 1)} - {passed}:
                    self.parts.drop(_part(other), _file(other))
                return _State(passed, HiddenStates(self.parts.path(_file(passed)), _tuples(kept["shapes"])), _tuples(kept["grids"]))
        return self._embed(batches(), seen)

    @torch.no_grad()
    def _embed(self, batches: Iterable[Batch], seen: Seen) -> _State:
        grids: list[Grid] = []
        shapes: list[Shape] = []
        path = self.parts.path(_file(0))
        with HiddenWriter(path) as writer:
            for hidden, grid in embedded(self.source, batches, self.device):
                grids.append(grid)
                shapes.append((hidden.shape[0], hidden.shape[1], hidden.shape[2]))
                writer.append(hidden)
                seen(0, f"{sum(shape[0] for shape in shapes)} pictures read")
        self.parts.keep("pictures", {"grids": grids, "shapes": shapes})
        self.parts.keep(_part(0), {}, {path.name: writer.digest})
        return _State(0, HiddenStates(path, shapes), tuple(grids))

    @torch.no_grad()
    def _stage(self, stage: Stage, state: _State, *, is_wanted: bool, seen: Seen) -> tuple[dict[str, Gram], _State]:
        """Statistics of one stage (none unless wanted), and the state after it, which for a merger is the one before."""
        forward = StageForward(self.source, stage, self.device, self.dtype)
        observer = _Observer(forward.apply, _Draw.over(state.hidden.shapes, self.seed, self.most_tokens), held_out=self.held_out, sums=self.sums)
        path = self.parts.path(_file(state.passed + 1))
        with HiddenWriter(path) if forward.is_block else nullcontext() as writer:
            for index, grid in enumerate(state.grids):
                observer.batch = index
                result = forward(state.hidden.read(index), grid, observer if is_wanted else None)
                if writer is not None:
                    writer.append(result)
                seen(0, f"{stage.name}: {observer.draw.pictures_until(index)} of {observer.draw.pictures} pictures")
        if writer is None:
            return observer.totals(), state
        self.parts.keep(_part(state.passed + 1), {}, {path.name: writer.digest})
        return observer.totals(), _State(state.passed + 1, HiddenStates(path, state.hidden.shapes), state.grids)


class _State(NamedTuple):
    """The hidden states after `passed` blocks."""

    passed: int
    hidden: HiddenStates
    grids: Sequence[Grid]


class _Draw(NamedTuple):
    """Which tokens of which picture count. `first` is every batch's first picture, and the number of all pictures last."""

    first: tuple[int, ...]
    tokens: tuple[int, ...]
    seed: int
    most: int

    @classmethod
    def over(cls, shapes: Sequence[Shape], seed: int, most: int) -> _Draw:
        return cls(tuple(accumulate((shape[0] for shape in shapes), initial=0)), tuple(n for b, n, _ in shapes for _ in range(b)), seed, most)

    @property
    def pictures(self) -> int:
        return len(self.tokens)

    def pictures_until(self, batch: int) -> int:
        """Pictures up to the end of a batch."""
        return self.first[batch + 1]

    def rows(self, batch: int, x: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
        """Every picture's place and its rows of x [B, T, K] that count; T is a picture's tokens or its merged ones."""
        merged = self.tokens[self.first[batch]] // x.shape[1]
        shares = _shares(self.tokens, merged, self.most)
        for place, inputs in enumerate(x):
            picture = self.first[batch] + place
            chosen = drawn_tokens(len(inputs), shares[picture], seed=self.seed, picture=picture)
            yield picture, inputs if chosen is None else inputs[chosen.to(inputs.device)]


class _Observer:
    """Applies a stage's linears and gathers what they read."""

    def __init__(self, linear: Linear, draw: _Draw, *, held_out: bool, sums: type[GramSum]) -> None:
        self.draw = draw
        self._sum = sums
        self._held_out = held_out
        self.batch = 0
        self._linear = linear
        self._sums: dict[str, GramSum] = {}

    def __call__(self, name: str, x: torch.Tensor) -> torch.Tensor:
        key = f"{VISION}.{name}"
        if not bool(torch.isfinite(x.sum(dtype=torch.float64))):
            raise RunError(f"{key}: layer inputs: hold NaN or infinity", "the source's weights or a calibration picture overflow")
        for picture, rows in self.draw.rows(self.batch, x):
            part = key + HELD_OUT if self._held_out and is_held_out(picture) else key
            self._sums.setdefault(part, self._sum()).add(rows)
        return self._linear(name, x)

    def totals(self) -> dict[str, Gram]:
        return {name: sums.total() for name, sums in self._sums.items()}


@cache
def _shares(tokens: tuple[int, ...], merged: int, most: int) -> list[int]:
    """Tokens to take of every picture, for layers that read `merged` tokens as one."""
    return even_shares([count // merged for count in tokens], most)


def _is_block(stage: Stage) -> bool:
    return stage.name.startswith("blocks.")


def _blocks(stages: Sequence[Stage]) -> int:
    return sum(map(_is_block, stages))


def _place_after(stages: Sequence[Stage], passed: int) -> int:
    """The first stage that reads the hidden states after `passed` blocks."""
    return next((place + 1 for place in range(len(stages)) if _blocks(stages[: place + 1]) == passed), 0)


def _part(passed: int) -> str:
    return f"hidden-{passed}"


def _file(passed: int) -> str:
    return f"hidden-{passed}.f32"


def _tuples(rows: Sequence[Sequence[int]]) -> Any:
    """Tuples, as they were before JSON made lists of them."""
    return [tuple(row) for row in rows]
