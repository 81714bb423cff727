"""A stretch of a prompt has its pictures' features exactly where their tokens stand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from qvlopt.graphs import names
from qvlopt.graphs.tables import EmbeddingRows
from qvlopt.runtime.chunk import Placed, chunk_of
from qvlopt.runtime.vision_encoder import PictureFeatures

ROWS, WIDTH, TAPS, PICTURE = 20, 4, 3, 19
IDS = (1, 2, *[PICTURE] * 5, 3, *[PICTURE] * 2, *[PICTURE] * 3, 4, 5, 6)
SPANS = ((2, 7), (8, 10), (10, 13))


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> EmbeddingRows:
    folder = tmp_path_factory.mktemp("tables")
    save_file({names.EMBED_TABLE: torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(0))}, folder / names.TABLES)
    return EmbeddingRows(Path(folder))


def placed() -> list[Placed]:
    random = np.random.default_rng(0)
    sizes = [(start, end, end - start) for start, end in SPANS]
    return [
        Placed(start, end, PictureFeatures(*(random.normal(size=(*outer, count, WIDTH)).astype(np.float32) for outer in ((), (TAPS,)))))
        for start, end, count in sizes
    ]


@given(st.integers(0, len(IDS) - 1), st.integers(1, len(IDS)))
def test_every_stretch_is_that_part_of_the_whole(table: EmbeddingRows, start: int, length: int) -> None:
    """Against the plainest way: token by token."""
    end = min(start + length, len(IDS))
    embeds, deepstack = table.rows(IDS).copy(), np.zeros((TAPS, len(IDS), WIDTH), np.float32)
    for picture in placed():
        for row, token in enumerate(range(picture.start, picture.end)):
            embeds[token] = picture.features.image_embeds[row]
            deepstack[:, token] = picture.features.deepstack[:, row]
    chunk = chunk_of(IDS, (start, end), placed(), table)
    assert np.array_equal(chunk.embeds, embeds[start:end])
    expected = deepstack[:, start:end]
    assert np.array_equal(chunk.deepstack, expected) if chunk.deepstack is not None else not expected.any()


def test_text_alone_needs_no_features(table: EmbeddingRows) -> None:
    assert chunk_of(IDS, (13, 16), placed(), table).deepstack is None
    assert chunk_of(IDS, (0, 2), [], table).deepstack is None
