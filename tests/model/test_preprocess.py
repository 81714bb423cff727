"""Pictures become the pixel_values of transformers' own processor, bit for bit, or fail one by one."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize as their_smart_resize

from qvlopt.errors import ItemError, RunError, UsageError
from qvlopt.model.preprocess import PictureProcessor, smart_resize
from qvlopt.recipe.schema import PixelLimits

CONFIG = {
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "size": {"shortest_edge": 1024, "longest_edge": 1048576},
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
CLIP = {"image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711]}


def processor_at(folder: Path, limits: PixelLimits | None = None, **changes: object) -> PictureProcessor:
    (folder / "preprocessor_config.json").write_text(json.dumps({**CONFIG, **changes}), encoding="utf-8")
    return PictureProcessor.from_folder(folder, limits)


def noise(width: int, height: int) -> Image.Image:
    rng = np.random.default_rng(width * 10007 + height)
    return Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8))


@pytest.mark.parametrize("size", [(64, 64), (96, 64), (33, 47), (1, 1), (26, 28), (332, 27), (640, 480), (8, 1600), (1500, 1100)])
@pytest.mark.parametrize("changes", [{}, CLIP], ids=["half", "clip"])
def test_pixel_values_are_those_of_transformers_bit_for_bit(tmp_path: Path, size: tuple[int, int], changes: dict[str, object]) -> None:
    picture = processor_at(tmp_path, **changes).process(noise(*size))
    theirs = Qwen2VLImageProcessorPil(**{k: v for k, v in {**CONFIG, **changes}.items() if k != "image_processor_type"})
    expected = theirs(images=[noise(*size)], return_tensors="np")
    assert np.array_equal(picture.pixel_values.numpy(), expected["pixel_values"])
    assert (1, *picture.grid) == tuple(expected["image_grid_thw"][0])
    assert picture.pixel_values.dtype == torch.float32
    assert picture.size == (picture.grid[1] * 16, picture.grid[0] * 16)


@given(st.integers(1, 5000), st.integers(1, 5000), st.sampled_from([28, 32]), st.integers(1, 10**6), st.integers(0, 10**7))
@settings(max_examples=300, deadline=None)
def test_resizing_follows_the_rule_of_transformers(height: int, width: int, factor: int, low: int, more: int) -> None:
    if max(height, width) > 200 * min(height, width):
        return
    high = max(low, factor**2) + more
    theirs = their_smart_resize(height, width, factor=factor, min_pixels=low, max_pixels=high)
    assert smart_resize(height, width, factor=factor, min_pixels=low, max_pixels=high) == theirs
    assert all(side > 0 and side % factor == 0 for side in theirs)


@pytest.mark.parametrize("size", [(26, 28), (1, 1), (332, 27)])
def test_a_side_below_one_visual_token_is_enlarged(tmp_path: Path, size: tuple[int, int]) -> None:
    width, height = processor_at(tmp_path).resized(*size)
    assert width >= 32
    assert height >= 32


def test_aspect_200_is_accepted_and_201_fails_the_item_from_its_size_alone(tmp_path: Path) -> None:
    processor = processor_at(tmp_path)
    assert processor.grid(8, 1600)
    with pytest.raises(ItemError, match="8x1608 is above 200"):
        processor.resized(8, 1608)


def test_the_recipes_upper_limit_is_obeyed(tmp_path: Path) -> None:
    processor = processor_at(tmp_path, PixelLimits(min=1024, max=4096))
    picture = processor.process(noise(512, 512))
    assert picture.grid[0] * picture.grid[1] // 4 == 4
    assert (processor.min_pixels, processor.max_pixels) == (1024, 4096)


def test_the_recipes_lower_limit_is_obeyed(tmp_path: Path) -> None:
    picture = processor_at(tmp_path, PixelLimits(min=16384, max=65536)).process(noise(32, 32))
    assert picture.size[0] * picture.size[1] >= 16384


@pytest.mark.parametrize(("low", "high", "why"), [(1, 1023, "below one visual token"), (4096, 2048, "leave no size")])
def test_limits_that_cannot_be_kept_are_refused(tmp_path: Path, low: int, high: int, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        processor_at(tmp_path, PixelLimits(min=low, max=high))


def test_a_strip_that_no_size_brings_under_the_recipes_limit_fails_as_an_item(tmp_path: Path) -> None:
    with pytest.raises(ItemError, match=r"3200x32 cannot be kept within 4096 pixels"):
        processor_at(tmp_path, PixelLimits(min=1024, max=4096)).resized(3200, 32)


def test_separate_combined_and_older_settings_files_give_the_same_pixels(tmp_path: Path) -> None:
    separate, combined, older = (tmp_path / name for name in ("separate", "combined", "older"))
    for folder in (separate, combined, older):
        folder.mkdir()
    (combined / "processor_config.json").write_text(json.dumps({"processor_class": "Qwen3VLProcessor", "image_processor": CONFIG}))
    old = {k: v for k, v in CONFIG.items() if k != "size"} | {"min_pixels": 1024, "max_pixels": 1048576}
    (older / "preprocessor_config.json").write_text(json.dumps(old))
    expected = processor_at(separate)
    assert PictureProcessor.from_folder(combined) == expected
    assert PictureProcessor.from_folder(older) == expected


def test_a_processor_config_without_pictures_falls_back_to_the_separate_file(tmp_path: Path) -> None:
    (tmp_path / "processor_config.json").write_text('{"processor_class": "Qwen3VLProcessor"}')
    assert processor_at(tmp_path).patch_size == 16


@pytest.mark.parametrize(("changes", "why"), [
    ({"do_resize": False}, "do_resize is False"),
    ({"patch_size": None}, "patch_size is missing"),
    ({"size": {}}, "size: shortest_edge is missing"),
    ({"image_processor_type": "CLIPImageProcessor"}, "CLIPImageProcessor"),
])  # fmt: skip
def test_settings_that_mean_another_rule_are_refused(tmp_path: Path, changes: dict[str, object], why: str) -> None:
    with pytest.raises(RunError, match=why):
        processor_at(tmp_path, **changes)


def test_a_folder_without_picture_settings_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="no picture settings"):
        PictureProcessor.from_folder(tmp_path)
