"""The functional tower computes what transformers' Qwen3VLVisionModel computes."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

from qvlopt.model.positions import Grid
from qvlopt.model.vision import VisionConfig, VisionOutput, VisionTower, patch_positions
from tests.tiny import tiny_config, tiny_tensors

GRIDS = [(2, 2), (4, 4), (2, 12), (10, 6), (16, 18)]
SHAPES: dict[str, dict[str, object]] = {
    "default": {},
    "one tap at the last block": {"depth": 3, "deepstack_visual_indexes": [2]},
    "taps out of order": {"depth": 3, "deepstack_visual_indexes": [2, 0]},
    "other widths": {"hidden_size": 96, "num_heads": 3, "intermediate_size": 172, "num_position_embeddings": 49},
    "erf gelu": {"hidden_act": "gelu"},
}


class Pair:
    """Our tower and theirs over the same random weights."""

    def __init__(self, changes: Mapping[str, object]) -> None:
        config = tiny_config(vision=changes)
        weights = {k.removeprefix("model.visual."): v for k, v in tiny_tensors(config).items() if k.startswith("model.visual.")}
        self.ours = VisionTower(VisionConfig.from_dict(config["vision_config"]), weights)
        theirs = Qwen3VLVisionConfig(**config["vision_config"])
        theirs._attn_implementation = "sdpa"
        self.theirs = Qwen3VLVisionModel(theirs).eval()
        self.theirs.load_state_dict(weights)

    def expected(self, pixels: torch.Tensor, grid: Grid) -> list[torch.Tensor]:
        with torch.no_grad():
            output = self.theirs(pixels, grid_thw=torch.tensor([(1, *grid)]))
        return [output.pooler_output, *output.deepstack_features]


def tensors(output: VisionOutput) -> list[torch.Tensor]:
    return [output.merged, *output.deepstack]


def pixels_for(pair: Pair, grid: Grid, seed: int = 0) -> torch.Tensor:
    return torch.randn(grid[0] * grid[1], pair.ours.config.patch_dim, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_output_and_taps_equal_those_of_transformers(shape: str, grid: Grid) -> None:
    pair = Pair(SHAPES[shape])
    pixels = pixels_for(pair, grid)
    ours, theirs = tensors(pair.ours(pixels[None], grid)), pair.expected(pixels, grid)
    assert len(ours) == len(theirs) == 1 + len(pair.ours.config.deepstack_visual_indexes)
    for got, expected in zip(ours, theirs, strict=True):
        assert torch.allclose(got[0], expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_a_batch_gives_what_its_pictures_give_alone(grid: Grid) -> None:
    pair = Pair({})
    pixels = torch.stack([pixels_for(pair, grid, seed) for seed in range(3)])
    together = tensors(pair.ours(pixels, grid))
    for row in range(3):
        for got, expected in zip(together, tensors(pair.ours(pixels[row : row + 1], grid)), strict=True):
            assert torch.allclose(got[row], expected[0], rtol=0, atol=1e-5)


def test_every_linear_layer_passes_through_the_hook() -> None:
    pair = Pair({})
    seen: list[str] = []

    def linear(name: str, x: torch.Tensor) -> torch.Tensor:
        seen.append(name)
        return pair.ours._linear(name, x)

    VisionTower(pair.ours.config, pair.ours.weights, linear)(pixels_for(pair, (4, 4))[None], (4, 4))
    blocks = [f"blocks.{i}.{name}" for i in range(2) for name in ("attn.qkv", "attn.proj", "mlp.linear_fc1", "mlp.linear_fc2")]
    mergers = [f"{name}.linear_fc{i}" for name in ("deepstack_merger_list.0", "deepstack_merger_list.1", "merger") for i in (1, 2)]
    assert sorted(seen) == sorted(blocks + mergers)


def test_patches_come_in_merge_blocks_row_by_row() -> None:
    rows, cols = patch_positions((4, 4), 2)
    assert rows.tolist() == [0, 0, 1, 1, 0, 0, 1, 1, 2, 2, 3, 3, 2, 2, 3, 3]
    assert cols.tolist() == [0, 1, 0, 1, 2, 3, 2, 3, 0, 1, 0, 1, 2, 3, 2, 3]


def test_bfloat16_stays_near_float32() -> None:
    pair = Pair({})
    half = VisionTower(pair.ours.config, {name: weight.bfloat16() for name, weight in pair.ours.weights.items()})
    pixels = pixels_for(pair, (6, 4))[None]
    for got, expected in zip(tensors(half(pixels, (6, 4))), tensors(pair.ours(pixels, (6, 4))), strict=True):
        assert got.dtype == torch.bfloat16
        assert torch.nn.functional.cosine_similarity(got.float(), expected, dim=-1).min() > 0.999


def test_an_unknown_activation_is_refused_by_name() -> None:
    pair = Pair({})
    config = VisionConfig.from_dict({**tiny_config()["vision_config"], "hidden_act": "relu"})
    with pytest.raises(ValueError, match="hidden_act: got 'relu'"):
        VisionTower(config, pair.ours.weights)(pixels_for(pair, (2, 2))[None], (2, 2))
