"""A picture becomes `pixel_values`: the one path that calibrate, evaluate, bench, torch and ONNX share.

Resizing is Pillow's on uint8 by the checkpoint's own rule and limits; normalising is a table of 256 values a channel, so
that every engine sees the same bits. Oracle in the tests: transformers' `Qwen2VLImageProcessorPil`, equal bit for bit.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from qvlopt.errors import ItemError, RunError, UsageError
from qvlopt.model.positions import Grid
from qvlopt.model.settings import RESTORE, Settings
from qvlopt.model.vision import VisionConfig
from qvlopt.recipe.schema import PixelLimits

CHANNELS = 3
MAX_ASPECT = 200
"""smart_resize of transformers' Qwen2-VL processors refuses pictures longer than this many times their width."""


@dataclass(frozen=True)
class Picture:
    """One preprocessed picture: `pixel_values` float32 [N, patch_dim] and its grid of patches, N = rows * columns.

    `size` is (width, height) in pixels after resizing. Compared and hashed by identity.
    """

    pixel_values: torch.Tensor
    grid: Grid
    size: tuple[int, int]

    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        return self is other


@dataclass(frozen=True)
class PictureProcessor:
    """The checkpoint's rule for pictures, with its own pixel limits or the recipe's. Limits are pixels after resizing."""

    patch_size: int
    temporal_patch_size: int
    merge_size: int
    min_pixels: int
    max_pixels: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    rescale_factor: float
    resample: int
    limits_from_recipe: bool

    @classmethod
    def from_folder(cls, folder: Path, limits: PixelLimits | None = None) -> PictureProcessor:
        """Reads `preprocessor_config.json`, or the `image_processor` of a combined `processor_config.json`.

        Raises RunError when neither is there or a key is missing or unknown, UsageError for limits that cannot be kept.
        """
        config, where = _read_config(folder)
        values = Settings(config, str(where))
        low, high = (limits.min, limits.max) if limits is not None else _own_limits(config, where)
        processor = cls(
            patch_size=values.whole("patch_size"),
            temporal_patch_size=values.whole("temporal_patch_size"),
            merge_size=values.whole("merge_size"),
            min_pixels=low,
            max_pixels=high,
            mean=values.numbers("image_mean", CHANNELS),
            std=values.numbers("image_std", CHANNELS),
            rescale_factor=values.number("rescale_factor", 1 / 255),
            resample=int(Image.Resampling.BICUBIC) if config.get("resample") is None else _resampling(config["resample"], where),
            limits_from_recipe=limits is not None,
        )
        if 0 in processor.std:
            raise RunError(f"{where}: image_std holds 0, by which nothing can be divided", hint=RESTORE)
        processor._check_limits()
        return processor

    @classmethod
    def for_tower(cls, folder: Path, vision: VisionConfig, limits: PixelLimits | None = None) -> PictureProcessor:
        """`from_folder`, and RunError when it would cut patches that the vision tower of the same folder cannot take."""
        processor = cls.from_folder(folder, limits)
        ours = (processor.patch_size, processor.temporal_patch_size, processor.merge_size, CHANNELS)
        towers = (vision.patch_size, vision.temporal_patch_size, vision.spatial_merge_size, vision.in_channels)
        if ours != towers:
            raise RunError(
                f"{folder}: patch_size, temporal_patch_size, merge_size and channels of the picture settings are {ours},"
                f" those of config.json {towers}",
                hint="take both files from the original checkpoint",
            )
        return processor

    @property
    def factor(self) -> int:
        """Both sides of a resized picture are multiples of this: the side of one merged token in pixels."""
        return self.patch_size * self.merge_size

    def resized(self, width: int, height: int) -> tuple[int, int]:
        """(width, height) after resizing; small pictures are enlarged. Needs only the header's numbers.

        Raises ItemError for an aspect above 200, or when the recipe's pixel limits cannot be kept for this shape.
        """
        if width < 1 or height < 1:
            raise ItemError(f"a picture of {width}x{height} pixels is empty")
        if max(width, height) > MAX_ASPECT * min(width, height):
            raise ItemError(f"aspect ratio of {width}x{height} is above {MAX_ASPECT}, which the checkpoint's processor refuses")
        new_height, new_width = smart_resize(height, width, factor=self.factor, min_pixels=self.min_pixels, max_pixels=self.max_pixels)
        if self.limits_from_recipe and new_height * new_width > self.max_pixels:
            raise ItemError(
                f"{width}x{height} cannot be kept within {self.max_pixels} pixels (pixels.max): "
                f"its sides would be {new_width}x{new_height}, multiples of {self.factor}"
            )
        return new_width, new_height

    def grid(self, width: int, height: int) -> Grid:
        """Rows and columns of patches that a picture of this size becomes."""
        new_width, new_height = self.resized(width, height)
        return new_height // self.patch_size, new_width // self.patch_size

    def process(self, image: Image.Image) -> Picture:
        """`pixel_values` of an RGB picture: merge x merge blocks row by row, each patch channel, time, row, column."""
        if image.mode != "RGB":
            raise ItemError(f"picture mode {image.mode}, expected RGB: load it with qvlopt.data.pictures.load_picture")
        size = self.resized(*image.size)
        if size != image.size:
            image = image.resize(size, resample=self.resample)
        pixels = np.asarray(image, dtype=np.uint8)
        grid = (size[1] // self.patch_size, size[0] // self.patch_size)
        return Picture(torch.from_numpy(self._patches(pixels, grid)), grid, size)

    def _patches(self, pixels: np.ndarray, grid: Grid) -> np.ndarray:
        """uint8 [height, width, 3] to float32 [N, channels * temporal * patch * patch]."""
        rows, cols, merge, patch = grid[0] // self.merge_size, grid[1] // self.merge_size, self.merge_size, self.patch_size
        blocks = pixels.reshape(rows, merge, patch, cols, merge, patch, -1).transpose(0, 3, 1, 4, 6, 2, 5)
        channels = blocks.shape[4]
        out = np.empty((*blocks.shape[:5], self.temporal_patch_size, patch, patch), dtype=np.float32)
        for channel, table in enumerate(self._tables()):
            # a still picture fills the temporal patch with copies of itself
            out[:, :, :, :, channel] = table[blocks[:, :, :, :, channel, None]]
        return out.reshape(grid[0] * grid[1], channels * self.temporal_patch_size * patch * patch)

    def _tables(self) -> list[np.ndarray]:
        """Normalised float32 value of each byte, a table a channel: rescaled in float64, the rest in float32."""
        values = (np.arange(256, dtype=np.float64) * self.rescale_factor).astype(np.float32)
        return [(values - np.float32(mean)) / np.float32(std) for mean, std in zip(self.mean, self.std, strict=True)]

    def _check_limits(self) -> None:
        if self.min_pixels < 1 or self.min_pixels > self.max_pixels:
            raise UsageError(
                f"pixels: min {self.min_pixels} and max {self.max_pixels} leave no size",
                hint="give 1 <= min <= max; they count the pixels of a picture after resizing",
            )
        if self.max_pixels < self.factor**2:
            raise UsageError(
                f"pixels.max: {self.max_pixels} is below one visual token of {self.factor}x{self.factor} = {self.factor**2} pixels",
                hint=f"raise pixels.max to at least {self.factor**2}",
            )


def smart_resize(height: int, width: int, *, factor: int, min_pixels: int, max_pixels: int) -> tuple[int, int]:
    """(height, width) as multiples of `factor` with their product within the limits and the aspect about kept.

    The rule of `smart_resize` in transformers (models/qwen2_vl), whose rounding is Python's, half to even. Long strips
    may stay above `max_pixels`, since no side goes below `factor`.
    """
    new_height, new_width = round(height / factor) * factor, round(width / factor) * factor
    if new_height * new_width > max_pixels:
        shrink = math.sqrt(height * width / max_pixels)
        new_height = max(factor, math.floor(height / shrink / factor) * factor)
        new_width = max(factor, math.floor(width / shrink / factor) * factor)
    elif new_height * new_width < min_pixels:
        grow = math.sqrt(min_pixels / (height * width))
        new_height, new_width = math.ceil(height * grow / factor) * factor, math.ceil(width * grow / factor) * factor
    return new_height, new_width


def _read_config(folder: Path) -> tuple[dict[str, Any], Path]:
    """The image processor's settings and the file they stand in; transformers 5 writes one combined file."""
    for name in ("processor_config.json", "preprocessor_config.json"):  # the order of transformers
        path = folder / name
        if not path.is_file():
            continue
        try:
            config = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise RunError(f"{path}: not valid JSON ({error})", hint=RESTORE) from error
        config = config.get("image_processor") if name == "processor_config.json" and isinstance(config, dict) else config
        if isinstance(config, dict):
            _check_steps(config, path)
            return config, path
    raise RunError(
        f"{folder}: no picture settings, expected preprocessor_config.json or processor_config.json with image_processor",
        hint="copy the file from the original checkpoint",
    )


def _check_steps(config: dict[str, Any], where: Path) -> None:
    """Every step of the rule must be on; a checkpoint that turns one off needs another rule."""
    for step in ("do_resize", "do_rescale", "do_normalize"):
        if config.get(step, True) is not True:
            raise RunError(f"{where}: {step} is {config[step]!r}, only true is supported")
    kind = config.get("image_processor_type", "Qwen2VLImageProcessor")
    if not str(kind).startswith("Qwen2VLImageProcessor"):
        raise RunError(f"{where}: image_processor_type is {kind!r}, expected Qwen2VLImageProcessor or Qwen2VLImageProcessorFast")


def _own_limits(config: dict[str, Any], where: Path) -> tuple[int, int]:
    """(min, max) pixels; `min_pixels` and `max_pixels`, the older spelling, win over `size` as in transformers."""
    values = Settings(config, str(where))
    size = values.section("size")
    low = values.whole("min_pixels") if config.get("min_pixels") else size.whole("shortest_edge")
    high = values.whole("max_pixels") if config.get("max_pixels") else size.whole("longest_edge")
    return low, high


def _resampling(value: object, where: Path) -> int:
    """Pillow's number of a filter."""
    if type(value) is not int or value not in tuple(Image.Resampling):
        raise RunError(f"{where}: resample is {value!r}, expected one of Pillow's filters, such as 3 for bicubic", hint=RESTORE)
    return int(Image.Resampling(value))
