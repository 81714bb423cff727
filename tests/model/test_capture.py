"""Statistics of a tower's inputs, against inputs that a reference forward kept whole."""

from __future__ import annotations

from collections import defaultdict

import pytest
import torch
import torch.nn.functional as F

from qvlopt.errors import RunError
from qvlopt.model.capture import Batch, capture_vision
from qvlopt.model.names import VISION, vision_linears
from qvlopt.model.vision import VisionConfig, VisionTower
from qvlopt.quant.objective import Gram
from tests.tiny import tiny_config, tiny_tensors

SETTINGS = tiny_config(vision={"hidden_size": 64, "num_heads": 2, "intermediate_size": 96})
CONFIG = VisionConfig.from_dict(SETTINGS["vision_config"])
WEIGHTS = {name.removeprefix(f"{VISION}."): t for name, t in tiny_tensors(SETTINGS).items() if name.startswith(VISION)}
GRIDS = ((4, 4), (2, 6), (4, 4), (4, 4), (2, 6))


def pictures() -> list[Batch]:
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(1, rows * cols, CONFIG.patch_dim, generator=generator), (rows, cols)) for rows, cols in GRIDS]


def inputs_of(batches: list[Batch]) -> dict[str, torch.Tensor]:
    """What every linear read, all tokens of all pictures: [T, K]."""
    seen: dict[str, list[torch.Tensor]] = defaultdict(list)

    def keep(name: str, x: torch.Tensor) -> torch.Tensor:
        seen[f"{VISION}.{name}"].append(x.flatten(0, -2))
        return F.linear(x, WEIGHTS[f"{name}.weight"], WEIGHTS[f"{name}.bias"])

    for pixel_values, grid in batches:
        VisionTower(CONFIG, WEIGHTS, linear=keep)(pixel_values, grid)
    return {name: torch.cat(parts) for name, parts in seen.items()}


def close(got: Gram, expected: Gram, tolerance: float) -> bool:
    pairs = [(getattr(got, part), getattr(expected, part)) for part in ("sum", "centred", "abs_sum", "abs_max")]
    return got.count == expected.count and all(float((a - b).norm()) <= tolerance * float(b.norm()) for a, b in pairs)


def test_every_linears_statistics_are_those_of_its_inputs() -> None:
    got, inputs = capture_vision(CONFIG, WEIGHTS, pictures()), inputs_of(pictures())
    assert tuple(got) == tuple(inputs)
    assert set(got) == set(vision_linears(CONFIG))
    for name, x in inputs.items():
        wide = x.double()
        centred = wide - wide.mean(0)
        exact = Gram(len(x), wide.sum(0), (centred.T @ centred).float(), wide.abs().sum(0), x.abs().amax(0))
        assert close(got[name], exact, 1e-5), name


def test_pictures_of_one_size_together_give_the_same_statistics() -> None:
    singles = pictures()
    together: list[Batch] = [
        (torch.cat([pixels for pixels, grid in singles if grid == wanted]), wanted) for wanted in dict.fromkeys(grid for _, grid in singles)
    ]
    one_by_one, batched = capture_vision(CONFIG, WEIGHTS, singles), capture_vision(CONFIG, WEIGHTS, together)
    assert all(close(batched[name], one_by_one[name], 1e-5) for name in one_by_one)


def test_the_same_pictures_in_the_same_order_give_the_same_bits() -> None:
    first, second = capture_vision(CONFIG, WEIGHTS, pictures()), capture_vision(CONFIG, WEIGHTS, pictures())
    assert all(torch.equal(first[name].centred, second[name].centred) and torch.equal(first[name].sum, second[name].sum) for name in first)


def test_it_is_told_how_many_pictures_a_batch_had() -> None:
    counts: list[int] = []
    pixels, grid = pictures()[0]
    capture_vision(CONFIG, WEIGHTS, [(pixels.repeat(3, 1, 1), grid), (pixels, grid)], seen=counts.append)
    assert counts == [3, 1]


def test_no_picture_gives_no_statistics() -> None:
    assert capture_vision(CONFIG, WEIGHTS, []) == {}


def test_inputs_that_overflow_are_refused_with_the_layers_name() -> None:
    loud = {**WEIGHTS, "blocks.1.attn.qkv.weight": WEIGHTS["blocks.1.attn.qkv.weight"] * 3e38}
    with pytest.raises(RunError, match=r"^model\.visual\.blocks\.1\.attn\.proj: layer inputs: hold NaN or infinity"):
        capture_vision(CONFIG, loud, pictures())
