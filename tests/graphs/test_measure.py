"""What is decided over a whole model: every linear once, and one scale for the values that two graphs keep in the same buffers."""

from __future__ import annotations

from pathlib import Path

import torch

from qvlopt.graphs.layer_errors import Wanted
from qvlopt.graphs.measure import Variant, measure_text, measure_vision
from qvlopt.graphs.torch_layers import TextInputs
from qvlopt.graphs.weights import weights_of
from qvlopt.model.load_tower import load_vision
from qvlopt.model.names import vision_linears
from qvlopt.model.preprocess import Picture
from tests.tiny_graphs import tiny_source


def pictures(patch_dim: int) -> list[Picture]:
    generator = torch.Generator().manual_seed(5)
    grids = [(4, 6), (2, 2), (4, 6)]
    return [Picture(torch.rand(rows * columns, patch_dim, generator=generator), (rows, columns), (1, 1)) for rows, columns in grids]


def test_the_tower_is_decided_once_and_gives_the_features_of_torch(tmp_path: Path) -> None:
    source = tiny_source(tmp_path / "tiny")
    config, weights = source.settings.vision, weights_of(source)
    variant, stages = Variant(weights, Wanted("w8a8", 1.0)), list[str]()
    shown = pictures(config.patch_dim)
    outputs = measure_vision(config, weights, shown, variant, largest=lambda _: None, seen=stages.append)
    assert sorted(layer.name for layer in variant.chosen) == sorted(vision_linears(config))
    assert stages == ["blocks.0", "deepstack_merger_list.0", "blocks.1", "deepstack_merger_list.1", "merger"]
    tower = load_vision(source, dtype=torch.float32, device="cpu")
    for picture, output in zip(shown, outputs, strict=True):
        base = tower(picture.pixel_values[None], picture.grid)
        assert all(torch.equal(x, y) for x, y in zip((base.merged, *base.deepstack), (output.merged, *output.deepstack), strict=True))


def test_what_calibration_saw_counts_where_it_is_larger(tmp_path: Path) -> None:
    source = tiny_source(tmp_path / "tiny")
    config, weights = source.settings.vision, weights_of(source)
    asked: list[str] = []

    def largest(name: str) -> torch.Tensor:
        asked.append(name)
        return torch.full((source.tensors.entry(f"{name}.weight").shape[1],), 1e6)

    variant = Variant(weights, Wanted("w8a8", 10.0))
    measure_vision(config, weights, pictures(config.patch_dim), variant, largest=largest, seen=lambda _: None)
    assert sorted(asked) == sorted(vision_linears(config))


def test_a_twin_folds_into_the_values_what_the_decoder_folds(tmp_path: Path) -> None:
    """Values stay in buffers that both graphs read: with a scale of its own a twin would read the other's values wrongly."""
    source = tiny_source(tmp_path / "tiny")
    settings, exact = source.settings, weights_of(source)

    def uneven(parameter: str) -> torch.Tensor:
        tensor = exact(parameter)
        return tensor.float() * torch.logspace(-2, 2, len(tensor))[:, None] if parameter.endswith("v_proj.weight") else tensor

    generator = torch.Generator().manual_seed(6)
    prompt = TextInputs(torch.randn(20, 128, generator=generator), torch.arange(20).expand(3, -1), torch.zeros(0, 20, 128))
    decoder, twin = Variant(uneven, Wanted("w8a8", 10.0)), Variant(uneven, Wanted("blocks4", 10.0))
    measure_text(settings, uneven, [prompt], [decoder, twin], largest=lambda _: None, seen=lambda _: None)
    folded = 0
    for layer in range(2):
        value, norm = f"model.language_model.layers.{layer}.self_attn.v_proj.weight", f"model.language_model.layers.{layer}.input_layernorm.weight"
        # what the norm was divided by stands in the columns, so that their product has only the values' own scale
        exact_rows, *rows = ((weights(value).float() * weights(norm).float()).norm(dim=1) for weights in (uneven, decoder.weights, twin.weights))
        assert torch.allclose(*rows, rtol=1e-4)
        folded += not torch.allclose(rows[0], exact_rows, rtol=1e-2)
    assert folded
