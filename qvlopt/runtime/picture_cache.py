"""Features of pictures that were encoded before. A picture is what the tower sees of it: no name, no file, no time.

In memory up to a number of bytes and, where a folder is given, on disk as well, up to another. Files there are read as
data only (safetensors), checked against the shapes that are expected, and dropped when they are anything else.
"""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from qvlopt.graphs import names
from qvlopt.model.preprocess import Picture
from qvlopt.runtime.byte_cache import ByteCache, cache_limit_bytes
from qvlopt.runtime.vision_encoder import PictureFeatures

SHARE = 16
MOST_BYTES = 1 << 30
"""One part in SHARE of the memory at hand, MOST_BYTES at most: at 2B's shape, 30 pictures of 1024x1024 or more of smaller ones."""
FOLDER_BYTES = 4 << 30


def picture_key(picture: Picture, graph_digest: str) -> str:
    """Hex SHA-256 of the pixels that the tower sees, how they are laid out, and the graph.

    `pixel_values` hold each byte of the resized picture through the checkpoint's own table, so they stand for it and for the
    limits that it was resized by. The shape is part of the key: the same bytes in another grid are another picture.
    """
    array = np.ascontiguousarray(picture.pixel_values.numpy())
    digest = hashlib.sha256(f"{graph_digest}/{array.dtype.str}/{array.shape}/{picture.grid}/{picture.size}/".encode())
    digest.update(array.data)
    return digest.hexdigest()


class PictureCache:
    """Features by `picture_key`. `memory` and the folder hold what they say and no more; the least lately used goes first."""

    def __init__(self, limit_bytes: int | None = None, *, folder: Path | None = None, folder_bytes: int = FOLDER_BYTES) -> None:
        limit = cache_limit_bytes(SHARE, MOST_BYTES) if limit_bytes is None else limit_bytes
        self.memory: ByteCache[PictureFeatures] = ByteCache(limit)
        self._folder = folder
        self._folder_bytes = folder_bytes

    def get(self, key: str, *, tokens: int, hidden: int, taps: int) -> PictureFeatures | None:
        """The features of a picture of so many tokens, or None."""
        known = self.memory.get(key)
        if known is None and self._folder is not None:
            known = _read(self._folder / f"{key}.safetensors", (tokens, hidden), (taps, tokens, hidden))
            if known is not None:
                self.memory.put(key, known, known.nbytes)
        return known

    def put(self, key: str, features: PictureFeatures) -> None:
        """Keeps features; a disk that cannot take them is no error."""
        self.memory.put(key, features, features.nbytes)
        if self._folder is not None:
            with suppress(OSError):
                _write(self._folder, key, features, self._folder_bytes)


def _read(path: Path, embeds: tuple[int, ...], deepstack: tuple[int, ...]) -> PictureFeatures | None:
    """A file's features; None, and the file is gone, when it is not what was written."""
    try:
        stored = load_file(path)
        os.utime(path)
    except FileNotFoundError:
        return None
    except (OSError, SafetensorError, ValueError):
        stored = {}
    features = PictureFeatures(*(stored.get(name, np.empty(0)) for name in (names.IMAGE_EMBEDS, names.DEEPSTACK)))
    if (features.image_embeds.shape, features.deepstack.shape) == (embeds, deepstack) and {a.dtype for a in features} == {np.dtype(np.float32)}:
        return features
    with suppress(OSError):
        path.unlink()
    return None


def _write(folder: Path, key: str, features: PictureFeatures, limit_bytes: int) -> None:
    """Complete or absent; then the files that were not used for longest go until the folder is within its limit."""
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / f".{key}.tmp-{os.getpid()}"
    try:
        save_file({names.IMAGE_EMBEDS: features.image_embeds, names.DEEPSTACK: features.deepstack}, temporary)
        os.replace(temporary, folder / f"{key}.safetensors")
    finally:
        temporary.unlink(missing_ok=True)
    used = [(path.stat(), path) for path in folder.glob("*.safetensors")]
    total = sum(stat.st_size for stat, _ in used)
    for stat, path in sorted(used, key=lambda entry: entry[0].st_mtime_ns):
        if total <= limit_bytes:
            return
        path.unlink(missing_ok=True)
        total -= stat.st_size
