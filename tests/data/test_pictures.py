"""The picture policies of docs/contract.md, section 4, and the faults of other loaders that must not come back."""

from __future__ import annotations

import contextlib
import io
import os
import struct
import warnings
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from qvlopt.data import pictures
from qvlopt.data.pictures import PictureHeader, load_picture, read_header
from qvlopt.errors import ItemError


def encoded(image: Image.Image, file_format: str, **options: Any) -> bytes:
    stream = io.BytesIO()
    image.save(stream, file_format, **options)
    return stream.getvalue()


def gradient(width: int = 96, height: int = 64) -> Image.Image:
    rows, cols = np.mgrid[0:height, 0:width]
    return Image.fromarray(np.stack([cols * 255 // width, rows * 255 // height, (rows + cols) % 256], axis=-1).astype(np.uint8))


def pixels(data: bytes | Path) -> np.ndarray:
    image = load_picture(data)
    assert image.mode == "RGB"
    return np.asarray(image)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_gives_the_pixels_of_the_upright_picture(orientation: int) -> None:
    upright = gradient()
    undo = {2: 0, 3: 3, 4: 1, 5: 5, 6: 2, 7: 6, 8: 4}  # the transposition that a camera held this way has applied
    stored = upright if orientation == 1 else upright.transpose(Image.Transpose(undo[orientation]))
    exif = Image.Exif()
    exif[0x0112] = orientation
    settings: dict[str, dict[str, Any]] = {"PNG": {}, "TIFF": {}, "WEBP": {"lossless": True}, "JPEG": {"quality": 95}, "AVIF": {"quality": 100}}
    for file_format, options in settings.items():
        data = encoded(stored, file_format, exif=exif, **options)
        assert read_header(data).size == (96, 64)
        assert np.abs(pixels(data).astype(int) - np.asarray(upright)).mean() < (4 if file_format in ("JPEG", "AVIF") else 1e-9)


def test_colours_stored_under_clear_pixels_do_not_reach_the_picture() -> None:
    visible = np.asarray(gradient())
    alpha = np.zeros((64, 96), np.uint8)
    alpha[:, 48:] = 255
    loaded = []
    for hidden in (0, 137):
        colours = np.where(alpha[..., None] > 0, visible, hidden).astype(np.uint8)
        loaded.append(pixels(encoded(Image.fromarray(np.dstack([colours, alpha]), "RGBA"), "PNG")))
    assert np.array_equal(loaded[0], loaded[1])
    assert (loaded[0][:, :48] == 255).all()
    assert np.array_equal(loaded[0][:, 48:], visible[:, 48:])


def test_half_clear_black_is_mid_grey_on_white() -> None:
    assert pixels(encoded(Image.new("RGBA", (4, 4), (0, 0, 0, 128)), "PNG"))[0, 0].tolist() == [127, 127, 127]


def test_a_clear_palette_entry_is_white() -> None:
    image = Image.new("P", (8, 4), 0)
    image.putpalette([0, 0, 0, 200, 10, 10])
    image.paste(1, (4, 0, 8, 4))
    result = pixels(encoded(image, "PNG", transparency=0))
    assert result[0, 0].tolist() == [255, 255, 255]
    assert result[0, 7].tolist() == [200, 10, 10]


def test_grey_with_alpha_is_composited_on_white() -> None:
    result = pixels(encoded(Image.merge("LA", [Image.new("L", (2, 1), 9), Image.fromarray(np.array([[0, 255]], np.uint8))]), "PNG"))
    assert result[0].tolist() == [[255, 255, 255], [9, 9, 9]]


@pytest.mark.parametrize("file_format", ["PNG", "TIFF", "PPM"])
def test_sixteen_bit_grey_keeps_all_256_levels(file_format: str) -> None:
    ramp = np.tile(np.arange(256, dtype=np.uint16) * 257, (4, 1))
    assert np.array_equal(pixels(encoded(Image.fromarray(ramp), file_format))[0, :, 1], np.arange(256))


def test_big_endian_sixteen_bit_tiff_reads_the_same() -> None:
    ramp = np.tile(np.arange(256, dtype=np.uint16) * 257, (4, 1))
    image = Image.frombytes("I;16B", (256, 4), ramp.astype(">u2").tobytes())
    assert np.array_equal(pixels(encoded(image, "TIFF"))[0, :, 0], np.arange(256))


def test_sixteen_bit_values_are_rounded_to_the_nearest_level() -> None:
    values = np.array([[0, 128, 129, 385, 386, 65535]], np.uint16)
    assert pixels(encoded(Image.fromarray(values), "PNG"))[0, :, 0].tolist() == [0, 0, 1, 1, 2, 255]


def test_the_clear_grey_of_a_sixteen_bit_png_is_white() -> None:
    values = np.array([[1000, 2000]], np.uint16)
    assert pixels(encoded(Image.fromarray(values), "PNG", transparency=1000))[0, :, 0].tolist() == [255, 8]


@pytest.mark.parametrize("values", [np.array([[0, 70_000]], np.int32), np.array([[-1, 5]], np.int32)])
def test_integers_beyond_sixteen_bits_are_refused_by_the_mode(values: np.ndarray) -> None:
    with pytest.raises(ItemError, match="mode I with values"):
        load_picture(encoded(Image.fromarray(values), "TIFF"))


def test_floating_point_pictures_are_refused_by_the_mode() -> None:
    with pytest.raises(ItemError, match="mode F"):
        load_picture(encoded(Image.fromarray(np.ones((2, 2), np.float32)), "TIFF"))


@pytest.mark.parametrize(("mode", "file_format"), [("CMYK", "JPEG"), ("L", "PNG"), ("1", "PNG"), ("P", "PNG"), ("YCbCr", "JPEG"), ("LAB", "TIFF")])
def test_other_modes_become_rgb(mode: str, file_format: str) -> None:
    source = gradient() if mode != "LAB" else Image.new("LAB", (96, 64), (128, 128, 128))
    image = source if source.mode == mode else source.convert(mode)
    assert pixels(encoded(image, file_format)).shape == (64, 96, 3)


def test_a_cmyk_picture_keeps_its_colours() -> None:
    red = encoded(Image.new("RGB", (8, 8), (250, 0, 0)).convert("CMYK"), "TIFF")
    assert pixels(red)[0, 0].tolist() == [250, 0, 0]


@pytest.mark.parametrize("file_format", ["GIF", "PNG", "WEBP"])
def test_an_animation_gives_its_first_frame_and_the_header_tells(file_format: str) -> None:
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "lime", "blue")]
    options = {"lossless": True} if file_format == "WEBP" else {}
    data = encoded(frames[0], file_format, save_all=True, append_images=frames[1:], duration=100, **options)
    assert pixels(data)[0, 0].tolist() == [255, 0, 0]
    assert read_header(data) == PictureHeader(size=(8, 8), frames=3)


def test_two_hundred_million_pixels_are_refused_before_decoding(tmp_path: Path) -> None:
    path = tmp_path / "flat.png"
    path.write_bytes(_header_only_png(20_000, 10_000))
    with pytest.raises(ItemError, match=r"flat\.png: 20000x10000 is 200,000,000 pixels"):
        load_picture(path)
    with pytest.raises(ItemError, match="200,000,000 pixels"):
        read_header(path)


@pytest.mark.parametrize("size", [(13_000, 9_000), (18_000, 11_000)])
def test_pictures_that_pillow_warns_of_or_refuses_are_read_without_touching_its_guard(size: tuple[int, int]) -> None:
    guard = Image.MAX_IMAGE_PIXELS
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert read_header(_header_only_png(*size)).size == size
    assert guard == Image.MAX_IMAGE_PIXELS


def test_a_hundred_million_pixels_are_decoded() -> None:
    data = encoded(Image.new("1", (10_000, 10_000), 1), "PNG")
    assert load_picture(data).size == (10_000, 10_000)


@pytest.mark.parametrize(("size", "is_taken"), [((8, 1600), True), ((8, 1608), False), ((1608, 8), False), ((1093, 5), False)])
def test_the_header_tells_an_aspect_above_200(size: tuple[int, int], is_taken: bool) -> None:
    data = encoded(Image.new("RGB", size), "PNG")
    if is_taken:
        assert read_header(data).size == size
    else:
        with pytest.raises(ItemError, match="aspect ratio"):
            read_header(data)


@pytest.mark.parametrize("size", [(1, 1), (26, 28), (332, 27)])
def test_tiny_pictures_load(size: tuple[int, int]) -> None:
    assert load_picture(encoded(Image.new("RGB", size), "PNG")).size == size


@pytest.mark.parametrize("file_format", ["PNG", "JPEG", "GIF", "TIFF", "WEBP", "BMP"])
def test_a_cut_file_is_an_item_error_that_names_it(file_format: str, tmp_path: Path) -> None:
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 96, 3), np.uint8))
    data = encoded(noise, file_format)
    path = tmp_path / "cut.bin"
    path.write_bytes(data[: len(data) * 7 // 10])
    with pytest.raises(ItemError, match=r"cut\.bin: "):
        load_picture(path)


def test_empty_missing_and_disguised_files_are_item_errors(tmp_path: Path) -> None:
    (tmp_path / "empty.png").touch()
    (tmp_path / "text.jpg").write_text("not a picture")
    (tmp_path / "folder.png").mkdir()
    os.mkfifo(tmp_path / "pipe.png")
    for name, reason in {
        "empty.png": "empty",
        "text.jpg": "no picture",
        "gone.png": "missing",
        "folder.png": "regular",
        "pipe.png": "regular",
    }.items():
        with pytest.raises(ItemError, match=rf"{name}.*{reason}|{reason}.*{name}"):
            load_picture(tmp_path / name)
    with pytest.raises(ItemError, match="empty"):
        load_picture(b"")


def test_a_video_is_named_as_such(tmp_path: Path) -> None:
    (tmp_path / "clip.MP4").write_bytes(b"\0\0\0\x18ftypmp42")
    with pytest.raises(ItemError, match=r"clip\.MP4: is a video"):
        load_picture(tmp_path / "clip.MP4")


def test_postscript_is_not_run() -> None:
    with pytest.raises(ItemError, match="no picture in a known format"):
        load_picture(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n")


def test_any_damage_of_a_byte_is_an_item_error_or_a_picture() -> None:
    good = encoded(gradient(24, 16), "PNG")
    for position in range(len(good)):
        data = good[:position] + bytes([good[position] ^ 0x55]) + good[position + 1 :]
        with contextlib.suppress(ItemError):
            assert load_picture(data).mode == "RGB"


def test_links_out_of_the_folder_are_refused_and_hub_caches_are_not(tmp_path: Path) -> None:
    secret = tmp_path / "secret.png"
    gradient().save(secret)
    root = tmp_path / "set"
    root.mkdir()
    (root / "link.png").symlink_to(secret)
    with pytest.raises(ItemError, match="outside"):
        load_picture(root / "link.png", root=root)
    with pytest.raises(ItemError, match="outside"):
        load_picture(root / ".." / "secret.png", root=root)
    snapshot = tmp_path / "hub" / "snapshots" / "0a1b"
    blobs = tmp_path / "hub" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    secret.rename(blobs / "digest")
    (snapshot / "page.png").symlink_to(blobs / "digest")
    assert load_picture(snapshot / "page.png", root=snapshot).size == (96, 64)


def test_accents_and_spaces_in_paths_are_fine(tmp_path: Path) -> None:
    folder = tmp_path / "扫描 été"
    folder.mkdir()
    gradient().save(folder / "ß.png")
    assert load_picture(folder / "ß.png", root=folder).size == (96, 64)


@pytest.mark.parametrize("name", ["", "/etc/passwd", "../x.png", "a/../../x.png", "C:\\x.png", "\\\\server\\x.png", "a\\..\\x.png", "a\0.png"])
def test_names_that_leave_their_folder_are_told(name: str) -> None:
    assert pictures.leaves_folder(name)


def test_names_inside_their_folder_are_told() -> None:
    assert not any(pictures.leaves_folder(name) for name in ("a.png", "pictures/a.png", "a..b/c.png", "./a.png"))


def _header_only_png(width: int, height: int) -> bytes:
    """A valid one-bit PNG header and the start of its data: enough to be identified, nothing to decode."""
    small = encoded(Image.new("1", (8, 8)), "PNG")
    chunk = b"IHDR" + struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    return small[:12] + chunk + struct.pack(">I", zlib.crc32(chunk)) + small[33:]
