"""What headers tell before a run starts."""

from __future__ import annotations

from pathlib import Path

from PIL import Image

from qvlopt.data.preflight import check_pictures
from qvlopt.data.samples import ImageRef, Sample


def sample(folder: Path, name: str) -> Sample:
    return Sample(name, (ImageRef(name, folder),), "q", ("a",), "ocr", name, f"x:{name}")


def test_unusable_pictures_are_skipped_with_their_reason_and_the_others_go_on(tmp_path: Path) -> None:
    Image.new("RGB", (64, 32)).save(tmp_path / "good.png")
    Image.new("RGB", (8, 1600)).save(tmp_path / "strip.png")
    Image.new("RGB", (8, 1608)).save(tmp_path / "long.png")
    Image.new("RGB", (1, 1)).save(tmp_path / "dot.png")
    (tmp_path / "empty.png").touch()
    names = ["long.png", "good.png", "gone.png", "strip.png", "empty.png", "clip.mov", "dot.png"]
    result = check_pictures([sample(tmp_path, name) for name in names])
    assert [item.id for item in result.usable] == ["good.png", "strip.png", "dot.png"]
    assert result.sizes == {"good.png": ((64, 32),), "strip.png": ((8, 1600),), "dot.png": ((1, 1),)}
    assert [skipped.id for skipped in result.skipped] == ["long.png", "gone.png", "empty.png", "clip.mov"]
    for skipped, reason in zip(result.skipped, ["aspect ratio", "missing", "empty", "video"], strict=True):
        assert skipped.id in skipped.reason
        assert reason in skipped.reason
    assert result.remarks == ()


def test_animations_are_said_once(tmp_path: Path) -> None:
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "lime")]
    for name in ("a.gif", "b.gif"):
        frames[0].save(tmp_path / name, save_all=True, append_images=frames[1:])
    result = check_pictures([sample(tmp_path, "a.gif"), sample(tmp_path, "b.gif")])
    assert len(result.usable) == 2
    assert result.remarks == ("2 pictures have more than one frame; the first frame is used (such as a.gif: 2 frames)",)


def test_an_item_without_pictures_is_usable() -> None:
    text = Sample("t", (), "q", ("a",), "text", "t", "x:1")
    assert check_pictures([text]).usable == (text,)
