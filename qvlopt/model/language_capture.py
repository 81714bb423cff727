"""Runs the language model over prompts with pictures, layer by layer, and gives for each linear the statistics of its inputs.

The prompts are those that an answer starts from: the chat template's tokens, the pictures' features in place of the image
tokens, DeepStack's features added behind the first layers. One prompt is run at a time, so there is no padding; tokens of
text and of pictures count alike. One layer's weights and statistics are in memory, and one prompt; what goes from layer to
layer lies in files, and so does where every prompt's tokens stand. A killed run goes on from the last layer that it
finished. Letters in shapes: T tokens, M image tokens, D hidden width.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import NamedTuple

import torch

from qvlopt.artifact.unfinished import Parts
from qvlopt.errors import RunError
from qvlopt.model.capture import Seen
from qvlopt.model.hidden import HiddenStates, HiddenWriter, Shape
from qvlopt.model.input_sums import GramSum
from qvlopt.model.language_stages import Angles, LanguageStages
from qvlopt.model.names import LANGUAGE, Stage, language_stages
from qvlopt.model.preprocess import Picture
from qvlopt.model.source import Source
from qvlopt.model.stage_forward import encode_by_stage
from qvlopt.model.token_draw import HELD_OUT, MOST_TOKENS, drawn_tokens, even_shares, is_held_out
from qvlopt.quant.objective import Gram

_TOGETHER = 8
"""Prompts whose pictures go through the tower together: its weights are read once for them."""

_SAME_INPUTS = {"self_attn.k_proj": "self_attn.q_proj", "self_attn.v_proj": "self_attn.q_proj", "mlp.up_proj": "mlp.gate_proj"}
"""Linears that read what another one reads: its statistics are theirs."""


class Prompt(NamedTuple):
    """Token ids int64 [T] without an answer, M-RoPE positions int64 [3, T], and the pictures in the order of their image tokens."""

    ids: torch.Tensor
    positions: torch.Tensor
    pictures: tuple[Picture, ...]


_PROMPTS, _PLACES, _TAPS = "language-prompts", "language-places.f32", "deepstack.f32"
"""The part that all layers need, and its files."""


class _State(NamedTuple):
    """The prompts before layer `passed`; of every prompt `taps` are DeepStack's features [taps, M, D].

    `places` [1, T, 4]: every token's three M-RoPE positions, and 1 where it is an image's. Float32 holds them exactly.
    """

    passed: int
    hidden: HiddenStates
    taps: HiddenStates
    places: HiddenStates

    def angles(self, model: LanguageStages, prompt: int) -> Angles:
        return model.angles(self.places.read(prompt)[0, :, :3].T.long())

    def visual(self, prompt: int) -> torch.Tensor:
        """Where image tokens stand, bool [T]."""
        return self.places.read(prompt)[0, :, 3] > 0


@dataclass(frozen=True)
class LanguageCapture:
    """As Capture, for the decoder layers."""

    source: Source
    parts: Parts
    device: torch.device
    seed: int = 0
    most_tokens: int = MOST_TOKENS
    held_out: bool = False
    sums: type[GramSum] = GramSum

    def stages(
        self, prompts: Iterable[Prompt], *, done: Collection[str] = (), seen: Seen = lambda _count, _text: None
    ) -> Iterator[tuple[Stage, dict[str, Gram]]]:
        """Every layer that is not in `done`, in order, with its linears' statistics by canonical name.

        A layer counts as finished when the next is asked for: its input is dropped then. Layers that are done are run all the
        same, as far as one that is not needs them and no hidden states of an earlier run can be used; `prompts` are read only
        where there are none at all. Raises RunError naming the layer whose inputs are not finite, and where there is no prompt.
        """
        stages = language_stages(self.source.settings.text)
        left = [index for index, stage in enumerate(stages) if stage.name not in done]
        if not left:
            return
        model = LanguageStages(self.source, dtype=torch.float32, device=self.device)
        state = self._start(left[0], model, prompts, seen)
        for index in range(state.passed, left[-1] + 1):
            stage = stages[index]
            sums = _Sums(f"{LANGUAGE}.{stage.name}", state.hidden.shapes, self)
            after = self._layer(model, index, state, sums=sums if index in left else None)
            if index in left:
                yield stage, _with_aliases(stage, sums.totals())
            del sums
            self.parts.drop(_part(index), _file(index))
            state = state._replace(passed=index + 1, hidden=after)
            seen(0, f"{stage.name}: {len(state.hidden)} prompts")

    def _start(self, most: int, model: LanguageStages, prompts: Iterable[Prompt], seen: Seen) -> _State:
        """Before the last layer up to `most` of which there are hidden states; else before the first, from the prompts."""
        kept = self.parts.record(_PROMPTS)
        for passed in range(most, -1, -1):
            if kept is not None and self.parts.record(_part(passed)) is not None:
                for other in {*range(model.layers + 1)} - {passed}:
                    self.parts.drop(_part(other), _file(other))
                shapes = {name: [(a, b, c) for a, b, c in kept[name]] for name in ("hidden", "taps", "places")}
                paths = {"hidden": _file(passed), "taps": _TAPS, "places": _PLACES}
                return _State(passed, **{name: HiddenStates(self.parts.path(paths[name]), shapes[name]) for name in paths})
        return self._begin(model, prompts, seen)

    @torch.no_grad()
    def _begin(self, model: LanguageStages, prompts: Iterable[Prompt], seen: Seen) -> _State:
        """The first layer's inputs, in files."""
        files = {"hidden": _file(0), "taps": _TAPS, "places": _PLACES}
        shapes: dict[str, list[Shape]] = {name: [] for name in files}
        with ExitStack() as stack:
            writers = {name: stack.enter_context(HiddenWriter(self.parts.path(file))) for name, file in files.items()}
            for group in _groups(prompts):
                for prompt, (hidden, features) in zip(group, embedded_prompts(model, group), strict=True):
                    places = torch.cat((prompt.positions.T.float(), visual_places(model, prompt)[:, None].float().cpu()), dim=1)[None]
                    for name, values in (("hidden", hidden), ("taps", features), ("places", places)):
                        if values.numel():
                            writers[name].append(values)
                        shapes[name].append((values.shape[0], values.shape[1], values.shape[2]))
                seen(0, f"{len(shapes['hidden'])} prompts read")
        if not shapes["hidden"]:
            raise RunError("the language model: there is no prompt to calibrate with", "give samples with questions")
        self.parts.keep(_PROMPTS, shapes, {files[name]: writers[name].digest for name in ("taps", "places")})
        self.parts.keep(_part(0), {}, {files["hidden"]: writers["hidden"].digest})
        return _State(0, **{name: HiddenStates(self.parts.path(file), shapes[name]) for name, file in files.items()})

    @torch.no_grad()
    def _layer(self, model: LanguageStages, index: int, state: _State, *, sums: _Sums | None) -> HiddenStates:
        path = self.parts.path(_file(index + 1))
        run = model.layer(index, observe=sums)
        with HiddenWriter(path) as writer:
            for place in range(len(state.hidden)):
                if sums is not None:
                    sums.prompt = place
                hidden = run(state.hidden.read(place).to(self.device), state.angles(model, place))
                if index < state.taps.shapes[place][0]:
                    hidden[:, state.visual(place).to(self.device)] += state.taps.read(place)[index].to(self.device)
                writer.append(hidden)
        self.parts.keep(_part(index + 1), {}, {path.name: writer.digest})
        return HiddenStates(path, state.hidden.shapes)


def embedded_prompts(model: LanguageStages, group: Sequence[Prompt]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The first layer's input [1, T, D] and DeepStack's features [taps, M, D] of some prompts, pictures seen by the source's tower."""
    source, device = model.source, model.device
    batches = [(picture.pixel_values[None], picture.grid) for prompt in group for picture in prompt.pictures]
    outputs = iter(encode_by_stage(source, batches, device) if batches else ())
    count = len(source.settings.vision.deepstack_visual_indexes)
    for prompt, embeds in zip(group, model.embed([prompt.ids for prompt in group]), strict=True):
        shown = [next(outputs) for _ in prompt.pictures]
        hidden, taps = embeds.clone(), embeds.new_zeros(count, 0, embeds.shape[1])
        if shown:
            hidden[visual_places(model, prompt)] = torch.cat([output.merged[0] for output in shown])
            taps = torch.stack([torch.cat([output.deepstack[tap][0] for output in shown]) for tap in range(count)]) if count else taps
        yield hidden[None], taps


def visual_places(model: LanguageStages, prompt: Prompt) -> torch.Tensor:
    """Where image tokens stand, bool [T]."""
    return prompt.ids.to(model.device) == model.source.settings.image_token_id


@torch.no_grad()
def last_hidden(source: Source, prompts: Sequence[Prompt], device: torch.device) -> list[torch.Tensor]:
    """What the last layer gives for each of a few prompts, [1, T, D] float32: one layer's weights are in memory at a time."""
    model = LanguageStages(source, dtype=torch.float32, device=device)
    states = list(embedded_prompts(model, prompts))
    hidden = [state for state, _ in states]
    for index in range(model.layers):
        run = model.layer(index)
        for place, (prompt, (_, taps)) in enumerate(zip(prompts, states, strict=True)):
            hidden[place] = run(hidden[place], model.angles(prompt.positions))
            if index < len(taps):
                hidden[place][:, visual_places(model, prompt)] += taps[index]
    return hidden


class _Sums:
    """Gathers what the linears of one layer read, prompt by prompt."""

    def __init__(self, layer: str, shapes: Sequence[Shape], asked: LanguageCapture) -> None:
        self.prompt = 0
        self._layer = layer
        self._tokens = [shape[1] for shape in shapes]
        self._shares = even_shares(self._tokens, asked.most_tokens)
        self._seed = asked.seed
        self._held_out = asked.held_out
        self._sum = asked.sums
        self._sums: dict[str, GramSum] = {}

    def __call__(self, name: str, x: torch.Tensor) -> None:
        """`x` [1, T, K] is what the layer's linear `name` reads of the present prompt."""
        if name in _SAME_INPUTS:
            return
        if not bool(torch.isfinite(x.sum(dtype=torch.float64))):
            raise RunError(f"{self._layer}.{name}: layer inputs: hold NaN or infinity", "the source's weights or a calibration prompt overflow")
        chosen = drawn_tokens(x.shape[1], self._shares[self.prompt], seed=self._seed, picture=self.prompt)
        part = name + HELD_OUT if self._held_out and is_held_out(self.prompt) else name
        self._sums.setdefault(part, self._sum()).add(x[0] if chosen is None else x[0][chosen.to(x.device)])

    def totals(self) -> dict[str, Gram]:
        return {name: total.total() for name, total in self._sums.items()}


def _with_aliases(stage: Stage, totals: dict[str, Gram]) -> dict[str, Gram]:
    """Statistics of all linears of a layer by canonical name, held-out ones with their mark."""
    found = {}
    for linear in stage.linears:
        part = linear.removeprefix(f"{stage.name}.")
        for mark in ("", HELD_OUT):
            if (source := _SAME_INPUTS.get(part, part) + mark) in totals:
                found[f"{stage.root}.{linear}{mark}"] = totals[source]
    return found


def _part(passed: int) -> str:
    return f"language-{passed}"


def _file(passed: int) -> str:
    return f"language-{passed}.f32"


def _groups(prompts: Iterable[Prompt]) -> Iterator[list[Prompt]]:
    group: list[Prompt] = []
    for prompt in prompts:
        group.append(prompt)
        if len(group) == _TOGETHER:
            yield group
            group = []
    if group:
        yield group
