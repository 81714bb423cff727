"""The tower stage by stage gives what the whole tower gives, and a stage's weights go with it."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import pytest
import torch

from qvlopt.model.load_tower import load_vision
from qvlopt.model.names import vision_stages
from qvlopt.model.source import open_source
from qvlopt.model.stage_forward import StageForward, encode_by_stage
from tests.tiny import build_tiny
from tests.tiny_run import SMALL

CPU = torch.device("cpu")


def test_outputs_are_those_of_the_whole_tower(tmp_path: Path) -> None:
    folder = build_tiny(tmp_path / "tiny", **SMALL)
    source = open_source(str(folder), folder=folder)
    tower = load_vision(source, dtype=torch.float32, device="cpu")
    generator = torch.Generator().manual_seed(0)
    batches = [(torch.randn(1, rows * cols, tower.config.patch_dim, generator=generator), (rows, cols)) for rows, cols in ((4, 4), (2, 6))]
    for (pixels, grid), got in zip(batches, encode_by_stage(source, batches, CPU), strict=True):
        expected = tower(pixels, grid)
        assert torch.equal(got.merged, expected.merged)
        assert all(torch.equal(a, b) for a, b in zip(got.deepstack, expected.deepstack, strict=True))


@pytest.mark.parametrize("index", [0, -1])
def test_a_stages_weights_are_freed_with_it_without_the_collector(tmp_path: Path, index: int) -> None:
    folder = build_tiny(tmp_path / "tiny", **SMALL)
    source = open_source(str(folder), folder=folder)
    gc.disable()
    try:
        forward = StageForward(source, vision_stages(source.settings.vision)[index], CPU)
        forward(torch.randn(1, 16, 64), (4, 4))
        watched = weakref.ref(forward)
        del forward
        assert watched() is None
    finally:
        gc.enable()
