"""Which stage of a damaged checkpoint is to blame: every stage is run on the base's input, and its error alone is followed to the answer.

Comparing hidden states of two whole models blames every stage behind the fault. Here each stage of the candidate gets what
the base's stage gets, so that only faulty stages differ, and the base goes on with the candidate's output, so that the
KL divergence at the answer's tokens says what that stage alone does to it (activation patching). Weights are read stage by
stage: one stage of each model is in memory, never two models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from qvlopt.damage.logits import kl_divergence
from qvlopt.damage.streams import Forced, Streams, in_parts
from qvlopt.damage.tally import StageDamage, Tally, shares
from qvlopt.model.language_stages import Angles, LanguageStages, Layer
from qvlopt.model.load_tower import load_vision_part
from qvlopt.model.source import Source
from qvlopt.model.vision import VisionTower, rotary

EMBEDDING_PARTS = ("patch_embed.", "pos_embed.")


def compare_stages(
    base: Source,
    candidate: Source,
    items: Sequence[tuple[Forced, Forced]],
    *,
    dtype: torch.dtype,
    device: torch.device,
    vocabulary: int | None = None,
) -> list[StageDamage]:
    """Every stage in which the two checkpoints differ: dead ones, then those that change the answers most; none for equal ones.

    `items` are the same prompts and answers as each of them prepares it; unlike ones are the stage `preprocessing`. Logits
    beyond the tokenizer's `vocabulary` only pad the table and are left out.
    Raises ValueError when the checkpoints have not the same stages: another depth, width or vocabulary.
    """
    _check_alike(base, candidate)
    lanes = [Streams(item) for item, _ in items]
    prepared_otherwise = {index: Streams(other, is_plain=True) for index, (item, other) in enumerate(items) if not same_inputs(item, other)}
    work = _Comparison(base, candidate, [*lanes, *prepared_otherwise.values()], dtype, device, vocabulary)
    with torch.inference_mode():
        work.tower()
        work.language()
    for index, plain in prepared_otherwise.items():
        work.preprocessing(lanes[index], plain)
    share = shares({stage: tally.kl for stage, tally in work.tallies.items()})
    found = [replace(tally.result(stage), share=share[stage]) for stage, tally in work.tallies.items()]
    return sorted(found, key=lambda each: (not each.is_dead, -each.share, -each.kl, -each.relative_error))


def _check_alike(base: Source, candidate: Source) -> None:
    names = ("tower blocks", "tower width", "feature width", "layers", "width", "vocabulary")
    shapes = []
    for settings in (base.settings, candidate.settings):
        vision, text = settings.vision, settings.text
        sizes = (vision.depth, vision.hidden_size, vision.out_hidden_size, text["num_hidden_layers"], text["hidden_size"], text["vocab_size"])
        shapes.append(dict(zip(names, sizes, strict=True)))
    unlike = [name for name in names if shapes[0][name] != shapes[1][name]]
    if unlike:
        found = ", ".join(f"{name} {shapes[0][name]} and {shapes[1][name]}" for name in unlike)
        raise ValueError(f"the checkpoints have not the same stages: {found}")


@dataclass
class _Comparison:
    """Both checkpoints, the streams of every item, and what was found so far."""

    base: Source
    candidate: Source
    lanes: list[Streams]
    dtype: torch.dtype
    device: torch.device
    vocabulary: int | None
    tallies: dict[str, Tally] = field(default_factory=dict)

    def tower(self) -> None:
        """All pictures through the tower, stage by stage."""
        shown = [lane for lane in self.lanes if lane.item.pictures]
        if not shown:
            return
        ours, theirs = self._towers(EMBEDDING_PARTS, EMBEDDING_PARTS)
        for lane in shown:
            pictures = [(picture.pixel_values[None].to(self.device), picture.grid) for picture in lane.item.pictures]
            swapped = self._seen("tower embedding", lane, [(ours.embed(*each), theirs.embed(*each)) for each in pictures])
            lane.hidden = [ours.embed(*each) for each in pictures]
            lane.advance([_same] * len(pictures), "tower embedding", swapped)
        for index in range(self.base.settings.vision.depth):
            self._block(index, shown)
            if index in self.base.settings.vision.deepstack_visual_indexes:
                self._tap(index, shown)
        ours, theirs = self._towers(("merger.",), ("merger.",))
        for lane in shown:
            pairs = [(ours.merge("merger", x), theirs.merge("merger", x)) for x in lane.base()]
            lane.merged = lane.branch([partial(ours.merge, "merger")] * len(pairs), "merger", self._seen("merger", lane, pairs))

    def language(self) -> None:
        """Every prompt with its answer through the language model, stage by stage, and the KL divergence of every stream."""
        ours, theirs = (LanguageStages(source, dtype=self.dtype, device=self.device) for source in (self.base, self.candidate))
        for lane, one, other in zip(self.lanes, *(model.embed([lane.item.ids for lane in self.lanes]) for model in (ours, theirs)), strict=True):
            one[self._visual(lane)] = other[self._visual(lane)] = 0.0  # the pictures' features take their place
            swapped = self._seen("token embedding", lane, [(one[None], other[None])])
            lane.hidden = [one[None].expand(len(lane.origins), -1, -1)]
            lane.advance([_same], "token embedding", swapped)
            self._place_pictures(lane)
        angles = [tuple(model.angles(lane.item.all_positions) for model in (ours, theirs)) for lane in self.lanes]
        for index in range(ours.layers):
            self._layer(index, (ours, theirs), angles)
        self._head(ours, theirs)

    def preprocessing(self, lane: Streams, plain: Streams) -> None:
        """Notes what it does that the candidate prepares the item otherwise: the base on the candidate's inputs."""
        assert lane.logits is not None
        assert plain.logits is not None
        tally = self.tallies.setdefault("preprocessing", Tally())
        for ours, theirs in zip(lane.item.pictures, plain.item.pictures, strict=False):
            if ours.grid == theirs.grid:
                tally.add(ours.pixel_values, theirs.pixel_values)
        tally.kl[self.lanes.index(lane)] = float(kl_divergence(lane.logits, plain.logits).mean())

    def _block(self, index: int, lanes: Sequence[Streams]) -> None:
        name = f"blocks.{index}"
        ours, theirs = self._towers((f"{name}.",), (f"{name}.",))
        for lane in lanes:
            turns = [self._turns(picture.grid) for picture in lane.item.pictures]
            pairs = [(ours.block(index, x, turn), theirs.block(index, x, turn)) for x, turn in zip(lane.base(), turns, strict=True)]
            swapped = self._seen(f"tower block {index}", lane, pairs, inputs=lane.base())
            lane.advance([partial(_block, ours, index, turn) for turn in turns], f"tower block {index}", swapped)

    def _tap(self, index: int, lanes: Sequence[Streams]) -> None:
        """The DeepStack tap behind block `index`; a candidate that has none there gives zeros."""
        names = [_tap_name(source, index) for source in (self.base, self.candidate)]
        ours, theirs = self._towers((f"{names[0]}.",), (f"{names[1]}.",))
        number = self.base.settings.vision.deepstack_visual_indexes.index(index)
        stage = f"deepstack tap {number}"
        for lane in lanes:
            given = [ours.merge(str(names[0]), x) for x in lane.base()]
            others = [theirs.merge(names[1], x) if names[1] else torch.zeros_like(one) for x, one in zip(lane.base(), given, strict=True)]
            swapped = self._seen(stage, lane, list(zip(given, others, strict=True)))
            lane.taps.append(lane.branch([partial(ours.merge, str(names[0]))] * len(given), stage, swapped))

    def _layer(self, index: int, models: tuple[LanguageStages, LanguageStages], angles: Sequence[tuple[Angles, ...]]) -> None:
        ours, theirs = (model.layer(index) for model in models)
        stage = f"language layer {index}"
        for lane, (turn, other_turn) in zip(self.lanes, angles, strict=True):
            (x,) = lane.base()
            swapped = self._seen(stage, lane, [(ours(x, turn), theirs(x, other_turn))], inputs=[x])
            lane.advance([partial(_with_angles, ours, turn)], stage, swapped)
            if index < len(lane.taps):
                features = torch.cat([lane.filled(tap) for tap in lane.taps[index]], dim=1)
                lane.hidden = [add_at(lane.hidden[0], self._visual(lane), features)]

    def _head(self, ours: LanguageStages, theirs: LanguageStages) -> None:
        heads = (ours.head(self.vocabulary), theirs.head(self.vocabulary))
        for number, lane in enumerate(self.lanes):
            hidden = lane.hidden[0][:, len(lane.item.prompt_ids) - 1 :]
            logits = in_parts(heads[0], hidden)
            lane.logits = logits[0]
            swapped = self._seen("language head", lane, [(heads[0](hidden[:1]), heads[1](hidden[:1]))])
            streams = list(zip(lane.origins, logits, strict=True)) + [("language head", each[0]) for each in swapped or ()]
            for stage, values in streams[1:]:
                self.tallies[str(stage)].kl[number] = float(kl_divergence(logits[0], values).mean())

    def _seen(
        self,
        stage: str,
        lane: Streams,
        pairs: Sequence[tuple[torch.Tensor, torch.Tensor]],
        *,
        inputs: Sequence[torch.Tensor] | None = None,
    ) -> list[torch.Tensor] | None:
        """Notes the outputs (base's, candidate's) of a stage; the candidate's where they differ from the base's, else None."""
        if lane.is_plain or all(torch.equal(one, other) for one, other in pairs):
            return None
        tally = self.tallies.setdefault(stage, Tally())
        for number, (one, other) in enumerate(pairs):
            start = inputs[number] if inputs is not None else torch.zeros((), device=one.device)
            tally.add(one - start, other - start)
        return [other for _, other in pairs]

    def _towers(self, ours: tuple[str, ...], theirs: tuple[str, ...]) -> tuple[VisionTower, VisionTower]:
        """Towers with the weights of one stage each."""
        parts = ((self.base, ours), (self.candidate, theirs))
        first, second = (
            VisionTower(source.settings.vision, load_vision_part(source, names, dtype=self.dtype, device=self.device)) for source, names in parts
        )
        return first, second

    def _turns(self, grid: tuple[int, int]) -> Angles:
        cos, sin = rotary(self.base.settings.vision, grid)
        return cos.to(self.device), sin.to(self.device)

    def _visual(self, lane: Streams) -> torch.Tensor:
        return visual_places(lane.item, self.base.settings.image_token_id).to(self.device)

    def _place_pictures(self, lane: Streams) -> None:
        if lane.merged:
            hidden = lane.hidden[0].clone()
            hidden[:, self._visual(lane)] = torch.cat([lane.filled(picture) for picture in lane.merged], dim=1)
            lane.hidden = [hidden]


def same_inputs(base: Forced, candidate: Forced) -> bool:
    """Whether both checkpoints make the same ids, positions and pixels of an item."""
    return (
        base.prompt_ids == candidate.prompt_ids
        and torch.equal(base.positions, candidate.positions)
        and len(base.pictures) == len(candidate.pictures)
        and all(torch.equal(one.pixel_values, other.pixel_values) for one, other in zip(base.pictures, candidate.pictures, strict=True))
    )


def _same(states: torch.Tensor) -> torch.Tensor:
    return states


def _block(tower: VisionTower, index: int, turn: Angles, states: torch.Tensor) -> torch.Tensor:
    return tower.block(index, states, turn)


def _with_angles(layer: Layer, turn: Angles, states: torch.Tensor) -> torch.Tensor:
    return layer(states, turn)


def _tap_name(source: Source, index: int) -> str | None:
    """The merger behind block `index`, relative to the tower, where the checkpoint has one."""
    indexes = source.settings.vision.deepstack_visual_indexes
    return f"deepstack_merger_list.{indexes.index(index)}" if index in indexes else None


def visual_places(item: Forced, image_token_id: int) -> torch.Tensor:
    """Where image tokens stand, bool [T]; an image token within an answer is a token like any other."""
    ids = item.ids
    return (ids == image_token_id) & (torch.arange(len(ids)) < len(item.prompt_ids))


def add_at(hidden: torch.Tensor, places: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
    """Hidden states [S, T, D] with a tap's features [S, M, D] added at the M places of bool [T]."""
    hidden = hidden.clone()
    hidden[:, places] += features
    return hidden
