"""Distances of tensors: exact cases, and what they must not hide."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qvlopt.damage.tensors import cosine, encode, relative_error, sqnr_db, tower_errors
from qvlopt.model.names import VISION
from qvlopt.model.preprocess import Picture
from qvlopt.model.vision import VisionConfig, VisionOutput, VisionTower
from tests.tiny import tiny_config, tiny_tensors

BASE = torch.tensor([[3.0, 0.0], [0.0, 4.0]])


def test_relative_error_is_the_share_of_the_norm_that_is_off() -> None:
    assert relative_error(BASE, BASE) == 0
    assert relative_error(BASE, BASE + torch.tensor([[0.0, 0.5], [0.0, 0.0]])) == pytest.approx(0.1)
    assert relative_error(BASE, torch.zeros(2, 2)) == pytest.approx(1)
    assert relative_error(torch.zeros(2), torch.zeros(2)) == 0
    assert relative_error(torch.zeros(2), torch.ones(2)) == math.inf


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_a_candidate_that_is_not_finite_is_infinitely_off(broken: float) -> None:
    assert relative_error(BASE, torch.tensor([[3.0, broken], [0.0, 4.0]])) == math.inf
    assert sqnr_db(BASE, torch.tensor([[3.0, broken], [0.0, 4.0]])) == -math.inf


def test_cosine_is_of_the_whole_tensor() -> None:
    assert cosine(BASE, 2 * BASE) == pytest.approx(1)
    assert cosine(BASE, -BASE) == pytest.approx(-1)
    assert cosine(BASE, torch.tensor([[0.0, 7.0], [7.0, 0.0]])) == 0
    assert cosine(torch.zeros(2), torch.zeros(2)) == 1
    assert cosine(torch.zeros(2), torch.ones(2)) == 0


def test_sqnr_is_in_decibels() -> None:
    assert sqnr_db(BASE, 1.1 * BASE) == pytest.approx(20)
    assert sqnr_db(BASE, 1.01 * BASE) == pytest.approx(40)
    assert sqnr_db(BASE, BASE) == math.inf


@given(st.floats(1e-3, 1e3), st.integers(0, 100))
def test_relative_error_does_not_depend_on_the_unit(unit: float, seed: int) -> None:
    base, noise = torch.randn(2, 50, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    assert relative_error(unit * base, unit * (base + noise)) == pytest.approx(relative_error(base, base + noise))


def test_small_differences_of_16_bit_tensors_are_not_rounded_away() -> None:
    base = torch.full((1000,), 256.0, dtype=torch.bfloat16)
    assert relative_error(base, base + 2) == pytest.approx(2 / 256)


def outputs(shift: float) -> list[VisionOutput]:
    return [VisionOutput(torch.ones(1, 2, 3) * (1 + shift), (torch.ones(1, 2, 3), torch.ones(1, 2, 3) * (1 + 2 * shift))) for _ in range(2)]


def test_every_output_of_the_tower_is_judged_by_itself() -> None:
    rows = tower_errors(outputs(0), outputs(0.1))
    assert [row.output for row in rows] == ["merged", "deepstack.0", "deepstack.1"]
    assert [row.relative_error for row in rows] == pytest.approx([0.1, 0, 0.2])
    assert [row.cosine for row in rows] == pytest.approx([1, 1, 1])


def test_pictures_of_any_size_count_together() -> None:
    base = [VisionOutput(torch.ones(1, tokens, 4), ()) for tokens in (1, 3)]
    candidate = [VisionOutput(torch.ones(1, 1, 4) * 2, ()), base[1]]
    assert tower_errors(base, candidate)[0].relative_error == pytest.approx(0.5)


def test_each_picture_is_encoded_alone() -> None:
    settings = tiny_config(vision={"hidden_size": 64, "num_heads": 2, "intermediate_size": 64})
    config = VisionConfig.from_dict(settings["vision_config"])
    tower = VisionTower(config, {name.removeprefix(f"{VISION}."): t for name, t in tiny_tensors(settings).items() if name.startswith(VISION)})
    grids = [(2, 4), (4, 4)]
    pictures = [Picture(torch.randn(rows * cols, config.patch_dim), (rows, cols), (cols * 16, rows * 16)) for rows, cols in grids]
    found = encode(tower, pictures)
    for picture, output in zip(pictures, found, strict=True):
        assert torch.equal(output.merged, tower(picture.pixel_values[None], picture.grid).merged)
        assert not output.merged.requires_grad
