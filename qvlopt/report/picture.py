"""Pictures inside a page: made small, encoded anew from their pixels alone, so that no metadata travels along."""

from __future__ import annotations

import base64
import io
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from PIL.Image import Image

MOST_SIDE = 720
"""Pixels of the longer side; enough to read what a model misread, and small enough for hundreds in one page."""

LOSSLESS_BYTES = 60_000
"""Up to this a picture stays PNG: text and line art without the traces of JPEG."""

FEW_COLOURS, FEW_PIXELS = 4096, 256 * 256
"""A picture with more of both is a photo: PNG is not tried on it, which would take longer than all else."""

QUALITY = 82


class Embedded(NamedTuple):
    """A picture as a data URL, (width, height) of what is shown, and whether that is smaller than the picture was."""

    url: str
    size: tuple[int, int]
    is_reduced: bool


def embed(image: Image) -> Embedded:
    """`image` in mode RGB for an `<img>`: at most MOST_SIDE pixels long, PNG where that is small, else JPEG."""
    from PIL import Image as pil

    scale = min(1.0, MOST_SIDE / max(image.size))
    size = (max(1, round(image.width * scale)), max(1, round(image.height * scale)))
    plain = pil.new("RGB", size)  # a new picture has no EXIF, no colour profile and no comments to take along
    plain.paste(image.convert("RGB") if scale == 1 else image.convert("RGB").resize(size, pil.Resampling.LANCZOS, reducing_gap=3))
    is_photo = size[0] * size[1] > FEW_PIXELS and plain.getcolors(FEW_COLOURS) is None
    data, kind = b"" if is_photo else _encoded(plain, "PNG", optimize=True), "png"
    if not 0 < len(data) <= LOSSLESS_BYTES:
        data, kind = _encoded(plain, "JPEG", quality=QUALITY, optimize=True), "jpeg"
    return Embedded(f"data:image/{kind};base64,{base64.b64encode(data).decode('ascii')}", size, scale < 1)


def _encoded(image: Image, form: str, **options: int | bool) -> bytes:
    stream = io.BytesIO()
    image.save(stream, form, **options)
    return stream.getvalue()
