"""Pictures and prompts: from the seed alone, no two alike, prompts of the length that was asked for."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from qvlopt.data.pictures import load_picture
from qvlopt.model.prompt import Prompter
from qvlopt.recipe.shipped import builtin
from qvlopt.timing.workload import draw_picture, prompt_of, write_picture
from tests.tiny import build_tiny


def test_a_picture_follows_from_its_seed() -> None:
    one, again, other = (np.asarray(draw_picture(96, 64, seed)) for seed in ((1, 2), (1, 2), (1, 3)))
    assert one.shape == (64, 96, 3)
    assert np.array_equal(one, again)
    assert not np.array_equal(one, other)


@pytest.mark.parametrize("size", [(1, 1), (2, 300), (300, 2)])
def test_any_size_can_be_drawn(size: tuple[int, int]) -> None:
    assert draw_picture(*size, (0,)).size == size


def test_a_written_picture_is_loaded_by_the_one_loader_and_written_once(tmp_path: Path) -> None:
    path = write_picture(tmp_path, 96, 64, (0, 1))
    before = path.stat().st_mtime_ns
    assert load_picture(path, root=tmp_path).size == (96, 64)
    assert write_picture(tmp_path, 96, 64, (0, 1)) == path
    assert path.stat().st_mtime_ns == before
    assert write_picture(tmp_path, 96, 64, (0, 2)) != path


@pytest.fixture(scope="module", params=["nano", "tiny"])
def prompter(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Prompter:
    folder = builtin("builtin:nano", "assets") if request.param == "nano" else build_tiny(tmp_path_factory.mktemp("tiny") / "model")
    return Prompter.from_folder(folder)


@pytest.mark.parametrize("target", [24, 33, 64, 128, 500])
def test_a_prompt_has_exactly_as_many_tokens_as_asked(prompter: Prompter, target: int) -> None:
    for seed in range(5):
        assert len(prompter.encode(prompt_of(target, lambda text: len(prompter.encode(text)), (seed, target)))) == target


def test_prompts_of_two_seeds_differ_and_of_one_do_not() -> None:
    def count(text: str) -> int:
        return len(text.split())

    assert prompt_of(20, count, (0, 1)) == prompt_of(20, count, (0, 1)) != prompt_of(20, count, (0, 2))


def test_a_template_longer_than_the_prompt_leaves_one_word() -> None:
    assert len(prompt_of(5, lambda text: len(text.split()) + 10, (0,)).split()) == 1
