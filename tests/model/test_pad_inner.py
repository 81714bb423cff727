"""Padding the tower's MLPs: the same outputs, zeros that stay zeros, and a config that fits."""

from __future__ import annotations

import pytest
import torch

from qvlopt.model.load_tower import load_vision
from qvlopt.model.names import VISION
from qvlopt.model.pad_inner import padded, padded_gram, padded_parameters, padded_width
from qvlopt.model.source import Source, open_source
from qvlopt.model.vision import VisionConfig, VisionOutput, VisionTower
from qvlopt.quant.objective import Gram
from tests.tiny import build_tiny

ODD = {"depth": 2, "hidden_size": 64, "num_heads": 2, "intermediate_size": 72, "deepstack_visual_indexes": [1]}
TEXT = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Source:
    folder = build_tiny(tmp_path_factory.mktemp("pad") / "odd", vision=ODD, text=TEXT)
    return open_source(str(folder), folder=folder.parent)


def outputs(config: VisionConfig, weights: dict[str, torch.Tensor]) -> VisionOutput:
    pixels = torch.randn(2, 16, config.patch_dim, generator=torch.Generator().manual_seed(0))
    return VisionTower(config, weights)(pixels, (4, 4))


@pytest.mark.parametrize("width", [73, 128, 256])
def test_a_padded_tower_gives_the_same_outputs(source: Source, width: int) -> None:
    config, weights = source.settings.vision, dict(load_vision(source, dtype=torch.float32, device="cpu").weights)
    wide = {name: padded(f"{VISION}.{name}", tensor, width) for name, tensor in weights.items()}
    changed = {f"{VISION}.{name}" for name, tensor in weights.items() if wide[name].shape != tensor.shape}
    assert changed == set(padded_parameters(config))
    before, after = outputs(config, weights), outputs(config, wide)
    torch.testing.assert_close(after.merged, before.merged, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(after.deepstack[0], before.deepstack[0], rtol=1e-5, atol=1e-6)


def test_the_test_above_would_see_a_channel_that_is_not_zero(source: Source) -> None:
    config, weights = source.settings.vision, dict(load_vision(source, dtype=torch.float32, device="cpu").weights)
    wide = {name: padded(f"{VISION}.{name}", tensor, 80) for name, tensor in weights.items()}
    wide["blocks.0.mlp.linear_fc1.bias"][-1] = 1.0
    wide["blocks.0.mlp.linear_fc2.weight"][0, -1] = 1.0
    assert float((outputs(config, wide).merged - outputs(config, weights).merged).abs().max()) > 1e-3


@pytest.mark.parametrize(("inner", "group_size", "expected"), [(4304, 128, 4352), (4304, 32, 4352), (72, 64, 128), (128, 128, 128), (130, 96, 384)])
def test_the_width_fits_groups_and_kernels(inner: int, group_size: int, expected: int) -> None:
    width = padded_width(inner, group_size)
    assert width == expected
    assert width % group_size == 0
    assert width % 128 == 0


def test_statistics_of_padded_inputs_are_those_of_inputs_with_zeros() -> None:
    x = torch.randn(50, 12, generator=torch.Generator().manual_seed(1)) + 1
    found, expected = padded_gram(Gram.of(x), 16), Gram.of(torch.nn.functional.pad(x, (0, 4)))
    assert found.count == expected.count
    for part in ("sum", "centred", "abs_sum", "abs_max"):
        torch.testing.assert_close(getattr(found, part), getattr(expected, part))
