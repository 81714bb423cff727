"""Folding changes no output: the whole model, float32, with every possible scale folded in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from qvlopt.graphs.measure import measure_vision
from qvlopt.graphs.smooth import FoldedWeights, Group, scale_of, text_groups, vision_groups
from qvlopt.graphs.torch_layers import TextInputs, text_logits
from qvlopt.graphs.weights import weights_of
from qvlopt.model.names import vision_linears, vision_stages
from qvlopt.model.preprocess import Picture
from tests.tiny_graphs import tiny_source


def fold_all(folded: FoldedWeights, groups: list[Group]) -> int:
    generator = torch.Generator().manual_seed(0)
    folds = [group for group in groups if group.producers and group.channel is not None]
    for group in folds:
        assert group.channel is not None
        folded.fold(group, torch.rand(int(group.channel.max()) + 1, generator=generator) * 8 + 0.1)
    return len(folds)


@pytest.mark.parametrize("vision", [{}, {"depth": 3, "deepstack_visual_indexes": [2, 0], "spatial_merge_size": 3, "hidden_size": 96}])
def test_the_tower_is_the_same_with_everything_folded(tmp_path: Path, vision: dict[str, Any]) -> None:
    source = tiny_source(tmp_path / "tiny", vision=vision)
    config, weights = source.settings.vision, weights_of(source)
    groups = [group for stage in vision_stages(config) for group in vision_groups(stage, config)]
    assert sorted(name for group in groups for name in group.consumers) == sorted(vision_linears(config))
    folded = FoldedWeights(weights)
    assert fold_all(folded, groups) == 3 * config.depth + len(config.deepstack_visual_indexes) + 1
    merge = config.spatial_merge_size
    pixels = torch.randn(4 * merge * 2 * merge, config.patch_dim, generator=torch.Generator().manual_seed(1))
    pictures = [Picture(pixels, (4 * merge, 2 * merge), (1, 1))]
    base, same = (measure_vision(config, w, pictures, None, largest=lambda _: None, seen=lambda _: None)[0] for w in (weights, folded))
    for x, y in zip((base.merged, *base.deepstack), (same.merged, *same.deepstack), strict=True):
        assert (x - y).abs().max() < 1e-4 * x.abs().max()


@pytest.mark.parametrize("text", [{}, {"attention_bias": True, "num_key_value_heads": 1}, {"num_key_value_heads": 4}])
def test_the_language_model_is_the_same_with_everything_folded(tmp_path: Path, text: dict[str, Any]) -> None:
    source = tiny_source(tmp_path / "tiny", text=text)
    settings, weights = source.settings.text, weights_of(source)
    folded = FoldedWeights(weights)
    assert fold_all(folded, [group for layer in range(2) for group in text_groups(settings, layer)]) == 8
    embeds = torch.randn(11, settings["hidden_size"], generator=torch.Generator().manual_seed(2))
    prompt = TextInputs(embeds, torch.arange(11).expand(3, -1), torch.zeros(0, 11, settings["hidden_size"]))
    base, same = (text_logits(settings, w, [prompt])[0] for w in (weights, folded))
    assert (base - same).abs().max() < 1e-4 * base.abs().max()


def test_an_outlier_of_the_inputs_moves_into_the_weights() -> None:
    group = Group(("a",), (), torch.arange(4))
    largest_x, weight = torch.tensor([100.0, 1.0, 1.0, 0.0]), torch.ones(3, 4)
    scale = scale_of(largest_x, [weight], group, 0.5)
    assert torch.allclose(scale, torch.tensor([10.0, 1.0, 1.0, 1.0]))
    shared = scale_of(largest_x, [weight], Group(("a",), (), torch.tensor([0, 1, 0, 1])), 0.5)
    assert torch.allclose(shared, torch.tensor([10.0, 1.0]))
