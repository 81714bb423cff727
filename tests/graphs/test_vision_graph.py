"""The tower's graph gives what torch's tower gives, for every shape, at sizes that it was not built for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from qvlopt.graphs import names
from qvlopt.graphs.check import check_vision, row_errors, vision_inputs
from qvlopt.graphs.session import open_session
from qvlopt.graphs.tables import position_table
from qvlopt.graphs.weights import weights_of
from qvlopt.model.load_tower import load_vision
from tests.tiny_graphs import tiny_source, write_graphs

SHAPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "gelu": {"vision": {"hidden_act": "gelu"}},
    "deep": {"vision": {"depth": 4, "deepstack_visual_indexes": [0, 2, 3]}},
    "taps out of order": {"vision": {"depth": 3, "deepstack_visual_indexes": [2, 0]}},
    "no taps": {"vision": {"deepstack_visual_indexes": []}},
    "merge 3, narrow heads": {"vision": {"spatial_merge_size": 3, "num_heads": 8, "hidden_size": 96, "num_position_embeddings": 49}},
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_every_stage_is_that_of_torch(tmp_path: Path, shape: dict[str, Any]) -> None:
    source = tiny_source(tmp_path / "tiny", **shape)
    folder = write_graphs(tmp_path / "graphs", source)
    before = {path.name for path in folder.iterdir()}
    stages = check_vision(folder, source.settings.vision, weights_of(source), threads=1)
    taps = len(source.settings.vision.deepstack_visual_indexes)
    assert [stage for stage, _ in sorted(stages)] == sorted(["embed", "merger", *(f"deepstack.{i}" for i in range(taps))])
    assert max(error for _, error in stages) < 1e-5
    assert {path.name for path in folder.iterdir()} == before


def test_one_graph_takes_pictures_of_any_size(tmp_path: Path) -> None:
    source = tiny_source(tmp_path / "tiny")
    folder = write_graphs(tmp_path / "graphs", source)
    config, table = source.settings.vision, position_table(folder)
    tower = load_vision(source, dtype=torch.float32, device="cpu")
    session = open_session(folder / names.VISION_GRAPH, threads=1)
    for grid in ((2, 2), (2, 40), (14, 6), (32, 32)):
        pixels = torch.randn(grid[0] * grid[1], config.patch_dim, generator=torch.Generator().manual_seed(grid[1]))
        merged, taps = session.run([names.IMAGE_EMBEDS, names.DEEPSTACK], vision_inputs(config, table, pixels, grid))
        base = tower(pixels[None], grid)
        assert merged.shape == (grid[0] * grid[1] // 4, config.out_hidden_size)
        assert taps.shape == (2, *merged.shape)
        for expected, got in zip((base.merged, *base.deepstack), (merged, *taps), strict=True):
            assert row_errors(expected[0], torch.from_numpy(got)).max() < 1e-5


def test_a_bad_row_is_not_hidden_by_good_ones() -> None:
    base = torch.ones(1000, 8)
    candidate = base.clone()
    candidate[7] *= 1.01
    assert row_errors(base, candidate).argmax() == 7
    assert row_errors(base, candidate).max() == pytest.approx(0.01, rel=1e-4)
    candidate[8, 0] = torch.nan
    assert row_errors(base, candidate).max() == torch.inf
