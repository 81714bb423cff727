"""Positions equal those of transformers' get_rope_index, for any prompt."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Qwen3VLConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLModel

from qvlopt.errors import RunError
from qvlopt.model.positions import Grid, merged_tokens, rope_positions

IMAGE, MERGE = 7, 2


def theirs(ids: list[int], grids: list[Grid]) -> tuple[torch.Tensor, int]:
    """get_rope_index needs of its model only the config, so no weights are made."""
    stub = type("Stub", (), {"config": Qwen3VLConfig(), "get_vision_position_ids": Qwen3VLModel.get_vision_position_ids})()
    tokens = torch.tensor([ids])
    grid_thw = torch.tensor([(1, *grid) for grid in grids]) if grids else None
    positions, delta = Qwen3VLModel.get_rope_index(stub, tokens, (tokens == IMAGE).int(), image_grid_thw=grid_thw)
    return positions[:, 0], int(delta[0, 0])


def prompt(texts: list[int], grids: list[Grid]) -> list[int]:
    """`texts` tokens of text around the pictures; each picture between two more, as vision_start and vision_end."""
    ids = [1] * texts[0]
    for length, grid in zip(texts[1:], grids, strict=True):
        ids += [2, *[IMAGE] * merged_tokens(grid, MERGE), 3, *[1] * length]
    return ids


grids_strategy = st.lists(st.tuples(st.integers(1, 6), st.integers(1, 6)).map(lambda g: (g[0] * 2, g[1] * 2)), max_size=4)


@given(grids_strategy, st.data())
@settings(max_examples=100, deadline=None)
def test_positions_and_delta_are_those_of_transformers(grids: list[Grid], data: st.DataObject) -> None:
    texts = data.draw(st.lists(st.integers(0, 5), min_size=len(grids) + 1, max_size=len(grids) + 1))
    ids = prompt(texts, grids) or [1]
    positions, delta = rope_positions(ids, grids, image_token_id=IMAGE, merge=MERGE)
    expected, expected_delta = theirs(ids, grids)
    assert positions.dtype == torch.int64
    assert torch.equal(positions, expected)
    assert delta == expected_delta


def test_text_after_a_picture_goes_on_behind_its_longer_side() -> None:
    positions, delta = rope_positions([1, *[IMAGE] * 6, 1], [(4, 6)], image_token_id=IMAGE, merge=MERGE)
    assert positions.tolist() == [[0, 1, 1, 1, 1, 1, 1, 4], [0, 1, 1, 1, 2, 2, 2, 4], [0, 1, 2, 3, 1, 2, 3, 4]]
    assert delta == 5 - 8


def test_two_pictures_without_text_between_them_stay_two() -> None:
    positions, _ = rope_positions([IMAGE] * 8, [(4, 4), (4, 4)], image_token_id=IMAGE, merge=MERGE)
    assert positions[1].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]


@pytest.mark.parametrize("ids", [[1, IMAGE, IMAGE], [1, *[IMAGE] * 5], [1, IMAGE, 1, *[IMAGE] * 3], [1, 1]])
def test_image_tokens_that_do_not_fit_the_pictures_are_refused(ids: list[int]) -> None:
    with pytest.raises(RunError, match="image tokens"):
        rope_positions(ids, [(4, 4)], image_token_id=IMAGE, merge=MERGE)
