"""A picture is known by what the tower sees of it; a wrong one is never served, from memory or from disk."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from qvlopt.model.preprocess import Picture
from qvlopt.runtime.picture_cache import PictureCache, picture_key
from qvlopt.runtime.vision_encoder import PictureFeatures

SIZES = {"tokens": 2, "hidden": 3, "taps": 2}


def picture(values: np.ndarray | None = None, grid: tuple[int, int] = (2, 4)) -> Picture:
    pixels = np.arange(8 * 6, dtype=np.float32).reshape(8, 6) if values is None else values
    return Picture(torch.from_numpy(pixels), grid, (grid[1] * 16, grid[0] * 16))


def features(seed: int) -> PictureFeatures:
    random = np.random.default_rng(seed)
    return PictureFeatures(random.normal(size=(2, 3)).astype(np.float32), random.normal(size=(2, 2, 3)).astype(np.float32))


def same(got: PictureFeatures | None, expected: PictureFeatures) -> bool:
    return got is not None and all(np.array_equal(a, b) for a, b in zip(got, expected, strict=True))


def test_equal_pixels_are_one_picture_whatever_object_holds_them() -> None:
    assert picture_key(picture(), "g") == picture_key(picture(), "g")
    strided = torch.from_numpy(np.repeat(picture().pixel_values.numpy(), 2, axis=1))[:, ::2]
    assert picture_key(replace(picture(), pixel_values=strided), "g") == picture_key(picture(), "g")


def test_equal_bytes_in_another_shape_and_other_graphs_are_other_pictures() -> None:
    pixels = picture().pixel_values.numpy()
    changed = pixels.copy()
    changed[7, 5] += 1
    keys = [
        picture_key(picture(), "g"),
        picture_key(picture(), "another model"),
        picture_key(picture(grid=(4, 2)), "g"),
        picture_key(picture(pixels.reshape(6, 8)), "g"),
        picture_key(picture(pixels.view(np.int32)), "g"),
        picture_key(picture(changed), "g"),
    ]
    assert len(set(keys)) == len(keys)


def test_pixels_changed_in_place_are_another_picture() -> None:
    shown = picture()
    before = picture_key(shown, "g")
    shown.pixel_values[0, 0] = 5
    assert picture_key(shown, "g") != before


def test_memory_holds_its_bytes_and_forgets_the_oldest() -> None:
    cache = PictureCache(2 * features(0).nbytes)
    for number in range(3):
        cache.put(str(number), features(number))
    assert cache.get("0", **SIZES) is None
    assert same(cache.get("2", **SIZES), features(2))
    assert cache.memory.bytes == 2 * features(0).nbytes


def test_the_folder_serves_another_process_to_the_bit(tmp_path: Path) -> None:
    PictureCache(1000, folder=tmp_path / "new").put("k", features(1))
    other = PictureCache(1000, folder=tmp_path / "new")
    assert same(other.get("k", **SIZES), features(1))
    assert other.memory.bytes == features(1).nbytes
    assert other.get("unknown", **SIZES) is None
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["k.safetensors"]


@pytest.mark.parametrize("damage", ["cut", "text", "shape", "dtype", "bit", "another's"])
def test_a_file_that_is_not_what_was_written_is_dropped(tmp_path: Path, damage: str) -> None:
    cache = PictureCache(0, folder=tmp_path)
    stored = features(1)
    if damage == "shape":
        stored = PictureFeatures(stored.image_embeds.reshape(3, 2), stored.deepstack)
    if damage == "dtype":
        stored = PictureFeatures(stored.image_embeds.astype(np.float64), stored.deepstack)
    cache.put("k", stored)
    path = tmp_path / "k.safetensors"
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:-8])
    if damage == "bit":
        path.write_bytes(path.read_bytes()[:-1] + bytes([path.read_bytes()[-1] ^ 1]))
    if damage == "another's":  # as a careless copy would leave it
        cache.put("other", features(3))
        (tmp_path / "other.safetensors").replace(path)
    if damage == "text":
        path.write_text("no tensors")
    assert cache.get("k", **SIZES) is None
    assert not path.exists()
    cache.put("k", features(2))
    assert same(cache.get("k", **SIZES), features(2))


def test_the_folder_keeps_to_its_limit_and_to_what_is_used(tmp_path: Path) -> None:
    PictureCache(0, folder=tmp_path).put("a", features(0))
    size = (tmp_path / "a.safetensors").stat().st_size
    cache = PictureCache(0, folder=tmp_path, folder_bytes=2 * size)
    cache.put("b", features(1))
    os.utime(tmp_path / "a.safetensors", (1, 1))
    os.utime(tmp_path / "b.safetensors", (2, 2))
    assert cache.get("a", **SIZES) is not None  # used: now newer than b
    cache.put("c", features(2))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.safetensors", "c.safetensors"]


def test_what_killed_processes_left_in_the_folder_goes(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        ended.wait()
    kept = {f".x.tmp-{os.getppid()}", "mine.txt", ".note.tmp-x"}
    for name in {*kept, f".x.tmp-{ended.pid}"}:
        (tmp_path / name).touch()
    PictureCache(0, folder=tmp_path).put("k", features(1))
    assert {path.name for path in tmp_path.iterdir()} == {*kept, "k.safetensors"}


def test_a_disk_that_cannot_be_written_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    cache = PictureCache(1000, folder=tmp_path / "file" / "below")
    cache.put("k", features(1))
    assert same(cache.get("k", **SIZES), features(1))
