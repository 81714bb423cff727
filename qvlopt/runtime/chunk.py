"""The inputs of one run of the language model: a stretch of a prompt with its pictures' features where their tokens stand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from qvlopt.graphs.tables import EmbeddingRows
from qvlopt.runtime.vision_encoder import PictureFeatures


class Placed(NamedTuple):
    """A picture's features and the tokens [start, end) of the prompt that they stand for."""

    start: int
    end: int
    features: PictureFeatures


class Chunk(NamedTuple):
    """embeds float32 [S, H]; deepstack float32 [taps, S, H], zeros where there is no picture, None where there is none at all."""

    embeds: np.ndarray
    deepstack: np.ndarray | None


def chunk_of(ids: Sequence[int], stretch: tuple[int, int], placed: Sequence[Placed], table: EmbeddingRows) -> Chunk:
    """Tokens [start, end) of `stretch` of the prompt `ids`; `placed` are all its pictures that reach into it."""
    start, end = stretch
    embeds = table.rows(ids[start:end])
    shown = [picture for picture in placed if picture.start < end and picture.end > start]
    if not shown:
        return Chunk(embeds, None)
    taps = len(shown[0].features.deepstack)
    deepstack = np.zeros((taps, *embeds.shape), np.float32)
    for picture in shown:
        first, last = max(start, picture.start), min(end, picture.end)
        here, there = slice(first - start, last - start), slice(first - picture.start, last - picture.start)
        embeds[here] = picture.features.image_embeds[there]
        deepstack[:, here] = picture.features.deepstack[:, there]
    return Chunk(embeds, deepstack)
