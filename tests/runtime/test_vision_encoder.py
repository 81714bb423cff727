"""The graph's features of pictures of any grid are the torch tower's; positions of grids are kept up to a limit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from qvlopt.model.load_tower import load_vision
from qvlopt.model.preprocess import Picture
from qvlopt.model.source import open_source
from qvlopt.model.vision import VisionTower
from qvlopt.runtime.onnx_engine import OnnxEngine
from qvlopt.runtime.onnx_model import load_onnx_model
from qvlopt.runtime.torch_engine import TorchEngine
from qvlopt.runtime.vision_encoder import VisionEncoder
from tests.asked import NEW, prepared_in
from tests.tiny import build_tiny
from tests.tiny_onnx import build_onnx

GRIDS = ((2, 2), (2, 40), (6, 4), (4, 6), (22, 2), (10, 10))


def made(folder: Path, **vision: object) -> tuple[Path, Path]:
    checkpoint = build_tiny(folder / "model", tied=False, seed=3, vision=vision)
    return checkpoint, build_onnx(checkpoint, folder / "onnx")


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[VisionEncoder, VisionTower]:
    checkpoint, artifact = made(tmp_path_factory.mktemp("vision"), num_position_embeddings=49)
    source = open_source(str(checkpoint), folder=checkpoint.parent)
    return load_onnx_model(artifact, threads=1).vision, load_vision(source, dtype=torch.float32, device="cpu")


def picture(grid: tuple[int, int], width: int) -> Picture:
    values = torch.rand((grid[0] * grid[1], width), generator=torch.Generator().manual_seed(sum(grid))) * 2 - 1
    return Picture(values, grid, (grid[1] * 16, grid[0] * 16))


@pytest.mark.parametrize("grid", GRIDS)
def test_features_are_the_towers_at_any_grid(both: tuple[VisionEncoder, VisionTower], grid: tuple[int, int]) -> None:
    encoder, tower = both
    shown = picture(grid, tower.config.patch_dim)
    expected = tower(shown.pixel_values[None], grid)
    for _ in range(2):  # the second time with positions from the cache
        features = encoder.encode(shown)
        for got, exact in zip(
            (features.image_embeds, *features.deepstack), (expected.merged[0], *(tap[0] for tap in expected.deepstack)), strict=True
        ):
            assert got.dtype == np.float32
            assert np.linalg.norm(got - exact.numpy()) < 1e-4 * np.linalg.norm(exact.numpy())


def test_positions_of_many_grids_do_not_pile_up(both: tuple[VisionEncoder, VisionTower]) -> None:
    encoder, tower = both
    encoder._grids.limit_bytes = 100_000
    for columns in range(2, 80, 2):
        encoder.encode(picture((4, columns), tower.config.patch_dim))
    assert 0 < encoder._grids.bytes <= 100_000


def test_a_tower_without_deepstack_works_too(tmp_path: Path) -> None:
    checkpoint, artifact = made(tmp_path, deepstack_visual_indexes=[])
    engine = OnnxEngine.open(artifact, threads=1)
    exact = TorchEngine.open(open_source(str(checkpoint), folder=tmp_path), dtype=torch.float32, device="cpu")
    prepared = prepared_in(engine, tmp_path)
    assert engine.generate(prepared, max_new_tokens=NEW) == exact.generate(prepared, max_new_tokens=NEW)
    assert engine.encode(prepared[0].pictures[0]).deepstack.shape == exact.encode(prepared[0].pictures[0]).deepstack.shape == (0, 4, 128)
