"""Prompts of different lengths and pictures of different sizes become one left-padded batch.

Letters in shapes: B prompts, T the longest prompt, G given answer tokens, D hidden width, M merged visual tokens of one picture.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch

from qvlopt.model.load import LoadedModel
from qvlopt.model.positions import Grid
from qvlopt.model.preprocess import Picture
from qvlopt.model.vision import VisionTower
from qvlopt.runtime.engine import Prepared

MAX_TOWER_PATCHES = 16384
"""Patches in one call of the tower, so that its memory does not grow with the batch; a picture above it runs alone."""


class Features(NamedTuple):
    """One picture's merged tokens [M, D] and those of each DeepStack tap."""

    merged: torch.Tensor
    deepstack: tuple[torch.Tensor, ...]


class Batch(NamedTuple):
    """The language model's input, left-padded.

    embeds [B, T + G, D]; mask int64 [B, T + G], 1 on tokens; positions int64 [3, B, T + G]; visual bool [B, T + G], true on
    image tokens; deepstack: one [sum of M, D] a tap, in the order of `visual`'s rows. The last two are None without any picture.
    """

    embeds: torch.Tensor
    mask: torch.Tensor
    positions: torch.Tensor
    visual: torch.Tensor | None
    deepstack: list[torch.Tensor] | None


def encode_pictures(tower: VisionTower, pictures: Iterable[Picture], *, device: torch.device) -> dict[Picture, Features]:
    """Features of every distinct picture; those of one size go through the tower together."""
    by_grid: dict[Grid, list[Picture]] = {}
    for picture in dict.fromkeys(pictures):
        by_grid.setdefault(picture.grid, []).append(picture)
    features: dict[Picture, Features] = {}
    for grid, group in by_grid.items():
        size = max(1, MAX_TOWER_PATCHES // (grid[0] * grid[1]))
        for start in range(0, len(group), size):
            part = group[start : start + size]
            output = tower(torch.stack([picture.pixel_values for picture in part]).to(device), grid)
            for index, picture in enumerate(part):
                features[picture] = Features(output.merged[index], tuple(tap[index] for tap in output.deepstack))
    return features


def build_batch(
    model: LoadedModel, prepared: Sequence[Prepared], features: Mapping[Picture, Features] | None = None, *, given: Sequence[int] = ()
) -> Batch:
    """Pads, embeds and puts the pictures' features where the prompts' image tokens stand; encodes the pictures unless given.

    `given` are tokens of an answer that stand behind each prompt.
    """
    length = max(len(item.token_ids) for item in prepared)
    ids = torch.zeros((len(prepared), length + len(given)), dtype=torch.int64)
    mask = torch.zeros_like(ids)
    positions = torch.zeros((3, *ids.shape), dtype=torch.int64)
    ids[:, length:] = torch.tensor(given, dtype=torch.int64)
    for row, item in enumerate(prepared):
        start = length - len(item.token_ids)
        ids[row, start:length] = torch.tensor(item.token_ids)
        mask[row, start:] = 1
        positions[:, row, start:length] = item.positions
        positions[:, row, length:] = len(item.token_ids) + item.delta + torch.arange(len(given))
    visual = (ids == model.image_token_id) & mask.bool()  # padding may have any id
    visual[:, length:] = False  # an image token that a model said is a token like any other
    ids, mask, positions, visual = (tensor.to(model.device) for tensor in (ids, mask, positions, visual))
    embeds = model.text.embed_tokens(ids)
    shown = [picture for item in prepared for picture in item.pictures]
    if not shown:
        return Batch(embeds, mask, positions, None, None)
    if features is None:
        features = encode_pictures(model.vision, shown, device=model.device)
    embeds[visual] = torch.cat([features[picture].merged for picture in shown])
    taps = range(len(model.vision.config.deepstack_visual_indexes))
    deepstack = [torch.cat([features[picture].deepstack[tap] for picture in shown]) for tap in taps]
    return Batch(embeds, mask, positions, visual, deepstack)
