"""The vision tower of an ONNX artifact: one picture a run, of any size, nothing padded or masked."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import onnxruntime as ort
import torch

from qvlopt.graphs import names
from qvlopt.model.positions import Grid
from qvlopt.model.preprocess import Picture
from qvlopt.model.vision import VisionConfig, position_embedding, rotary
from qvlopt.runtime.byte_cache import ByteCache
from qvlopt.runtime.sessions import shrinking

GRID_BYTES = 64 << 20
"""Positions of grids that were seen lately. Sizes repeat in practice."""


class PictureFeatures(NamedTuple):
    """`image_embeds` float32 [M, hidden] and `deepstack` float32 [taps, M, hidden] of one picture. Shared: not to be modified."""

    image_embeds: np.ndarray
    deepstack: np.ndarray

    @property
    def nbytes(self) -> int:
        return int(self.image_embeds.nbytes + self.deepstack.nbytes)


class VisionEncoder:
    """Runs the graph with the positions of each picture's grid, which are those of the torch tower to the bit."""

    def __init__(self, session: ort.InferenceSession, config: VisionConfig, position_table: torch.Tensor) -> None:
        self._session = session
        self._config = config
        self._table = position_table
        self._grids: ByteCache[dict[str, np.ndarray]] = ByteCache(GRID_BYTES)

    def encode(self, picture: Picture) -> PictureFeatures:
        """One run of the tower."""
        feeds = {names.PIXEL_VALUES: picture.pixel_values.numpy(), **self._positions(picture.grid)}
        outputs = dict(zip([value.name for value in self._session.get_outputs()], self._session.run(None, feeds, shrinking()), strict=True))
        embeds = outputs[names.IMAGE_EMBEDS]
        return PictureFeatures(embeds, outputs.get(names.DEEPSTACK, np.zeros((0, *embeds.shape), np.float32)))

    def _positions(self, grid: Grid) -> dict[str, np.ndarray]:
        key = f"{grid[0]}x{grid[1]}"
        known = self._grids.get(key)
        if known is None:
            half = self._config.head_dim // 2
            cos, sin = (table[:, :half].contiguous().numpy() for table in rotary(self._config, grid))
            places = position_embedding(self._table, grid, self._config.spatial_merge_size).numpy()
            known = {names.POS_EMBEDS: places, names.ROPE_COS: cos, names.ROPE_SIN: sin}
            self._grids.put(key, known, sum(array.nbytes for array in known.values()))
        return known


def interface(taps: int) -> tuple[list[str], list[str]]:
    """Names of everything that goes in and out of the graph."""
    inputs = [names.PIXEL_VALUES, names.POS_EMBEDS, names.ROPE_COS, names.ROPE_SIN]
    return inputs, [names.IMAGE_EMBEDS, *([names.DEEPSTACK] if taps else [])]
