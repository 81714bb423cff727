"""One loader for every picture in every command: file or bytes in, RGB picture out, by the contract's policies.

Orientation from EXIF is applied, transparency is composited on white, 16-bit grey is scaled by 1/257, an animation gives
its first frame. Whatever is wrong with one picture is an ItemError that names it, so that the other items go on.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import IO, NamedTuple

import numpy as np
from PIL import ExifTags, Image, ImageOps
from PIL.ImageFile import ImageFile

from qvlopt.errors import ItemError

MAX_PIXELS = 200_000_000
"""A picture with this many pixels or more, by its header, is refused before anything is decoded."""

MAX_ASPECT = 200
"""The processor of Qwen's checkpoints refuses a picture more than this many times as long as wide; 200 itself is taken."""

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "AVIF", "JPEG2000")
"""Pillow's decoders that are used. Others are left out on purpose: some start programs (EPS), some read other files."""

VIDEO_SUFFIXES = frozenset({".avi", ".m4v", ".mkv", ".mov", ".mp4", ".mpeg", ".mpg", ".webm", ".wmv"})

SIXTEEN_BIT = frozenset({"I;16", "I;16B", "I;16L", "I;16N"})


class PictureHeader(NamedTuple):
    """What a picture's header says: (width, height) as they will be loaded, and how many frames or pages it has."""

    size: tuple[int, int]
    frames: int


def load_picture(source: Path | bytes, *, root: Path | None = None, name: str | None = None) -> Image.Image:
    """The picture in mode RGB, decoded and turned upright.

    With `root`, a file outside that folder is refused. `name` is what messages call the picture. Raises ItemError for a
    file that is missing, empty, damaged, too large, a video, or in a mode that has no agreed meaning as colours.
    """
    with _opened(source, root, name) as image:
        ImageOps.exif_transpose(image, in_place=True)  # decodes all pixels of the first frame
        mode = image.mode
        if mode in SIXTEEN_BIT or mode == "I":
            return _from_integers(image)
        if mode == "F":
            raise ValueError("mode F (floating point) has no agreed range of brightness")
        return _on_white(image) if image.has_transparency_data else image.convert("RGB")


def read_header(source: Path | bytes, *, root: Path | None = None, name: str | None = None) -> PictureHeader:
    """Size and number of frames without decoding the pixels. Raises ItemError as `load_picture` does, and for the aspect."""
    with _opened(source, root, name) as image:
        width, height = image.size
        if max(width, height) > MAX_ASPECT * min(width, height):
            raise ValueError(f"the aspect ratio of {width}x{height} is above {MAX_ASPECT}")
        size = (height, width) if _is_turned(image) else (width, height)
        # a phone's MPO carries previews, not frames
        return PictureHeader(size, 1 if image.format == "MPO" else getattr(image, "n_frames", 1))


def leaves_folder(name: str) -> bool:
    """True for a picture's name that is empty, absolute or climbs with `..`, by the rules of POSIX or of Windows."""
    posix, windows = PurePosixPath(name), PureWindowsPath(name)
    is_absolute = posix.is_absolute() or bool(windows.drive) or bool(windows.root)
    return not name or "\0" in name or is_absolute or ".." in posix.parts or ".." in windows.parts


@contextmanager
def _opened(source: Path | bytes, root: Path | None, name: str | None) -> Iterator[ImageFile]:
    """The picture with its header read; whatever goes wrong while it is open becomes an ItemError that names it."""
    name = name or ("picture in memory" if isinstance(source, bytes) else str(source))
    try:
        with _stream(source, root) as stream:
            image = _identified(stream)
            width, height = image.size
            if width * height >= MAX_PIXELS:
                raise ValueError(f"{width}x{height} is {width * height:,} pixels, at least the limit of {MAX_PIXELS:,}; not decoded")
            yield image
    except MemoryError:
        raise  # says something about the machine, not about the picture
    except Exception as error:  # a decoder may raise anything on a damaged file, and only this item shall fail
        strerror = error.strerror if isinstance(error, OSError) else None  # without it the file would be named twice
        reason = strerror or str(error) or type(error).__name__
        raise ItemError(f"{name}: {reason}") from error


def _stream(source: Path | bytes, root: Path | None) -> IO[bytes]:
    if isinstance(source, bytes):
        return io.BytesIO(_not_empty(source))
    if source.suffix.lower() in VIDEO_SUFFIXES:
        raise ValueError("is a video; this version evaluates pictures only")
    if root is not None and not _lies_inside(source, root):
        raise ValueError(f"lies outside {root}")
    if not source.exists():
        raise ValueError("is missing")
    if not source.is_file():
        raise ValueError("is no regular file")  # a pipe would be waited for
    if source.stat().st_size == 0:
        raise ValueError("is empty (0 bytes)")
    return source.open("rb")


def _not_empty(data: bytes) -> bytes:
    if not data:
        raise ValueError("is empty (0 bytes)")
    return data


def _lies_inside(path: Path, root: Path) -> bool:
    """Links may lead to a place inside `root` or, in a hub cache (REPO/snapshots/REVISION/...), to REPO/blobs."""
    folder, target = root.resolve(), path.resolve()
    if target.is_relative_to(folder):
        return True
    snapshots = next((parent for parent in folder.parents if parent.name == "snapshots"), None)
    return snapshots is not None and target.is_relative_to(snapshots.parent / "blobs")


def _identified(stream: IO[bytes]) -> ImageFile:
    """The decoder that knows the first bytes.

    `Image.open` is not used: it warns from 89 M and refuses from 179 M pixels by a process-wide setting, which stays as
    it is; this module checks its own limit on the header instead.
    """
    Image.init()
    start = stream.read(16)
    for name in FORMATS:
        factory, accepts = Image.OPEN.get(name, (None, None))
        if factory is None or (accepts is not None and accepts(start) is not True):
            continue
        stream.seek(0)
        return factory(stream, "")
    raise ValueError(f"is no picture in a known format ({', '.join(FORMATS)})")


def _is_turned(image: ImageFile) -> bool:
    """True when EXIF orientation swaps width and height. A PNG's EXIF after its pixels is not seen by this."""
    if image.format == "TIFF" or (image.format == "PNG" and "exif" not in image.info):
        return False  # Pillow turns a TIFF's size itself; asking a PNG further would decode it
    return image.getexif().get(ExifTags.Base.Orientation, 1) in (5, 6, 7, 8)


def _on_white(image: Image.Image) -> Image.Image:
    layers = image.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", layers.size, "white"), layers).convert("RGB")


def _from_integers(image: Image.Image) -> Image.Image:
    """16-bit grey as RGB: 0..65535 becomes 0..255, rounded; a pixel of the transparent grey becomes white."""
    values = np.asarray(image)
    low, high = int(values.min()), int(values.max())
    if low < 0 or high > 65535:
        raise ValueError(f"mode {image.mode} with values from {low} to {high}, expected 0 to 65535")
    grey = ((values.astype(np.uint32) + 128) // 257).astype(np.uint8)
    clear = image.info.get("transparency")
    if isinstance(clear, int):
        grey[values == clear] = 255
    return Image.fromarray(grey).convert("RGB")
