"""Features of pictures that were encoded before. A picture is what the tower sees of it: no name, no file, no time.

In memory up to a number of bytes and, where a folder is given, on disk as well, up to another. Files there are read as
data only (safetensors) and dropped when they are not, to the byte, what was written for that very picture.
"""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from qvlopt.artifact.process import is_another_alive
from qvlopt.graphs import names
from qvlopt.model.preprocess import Picture
from qvlopt.runtime.byte_cache import ByteCache, cache_limit_bytes
from qvlopt.runtime.vision_encoder import PictureFeatures

SHARE = 16
MOST_BYTES = 1 << 30
"""One part in SHARE of the memory at hand, MOST_BYTES at most: at 2B's shape, 30 pictures of 1024x1024 or more of smaller ones."""
FOLDER_BYTES = 4 << 30
_SEAL = "seal"
"""Name of `_seal` in a file's metadata."""


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
            known = _read(self._folder, key, (tokens, hidden), (taps, tokens, hidden))
            if known is not None:
                self.memory.put(key, known, known.nbytes)
        return known

    def put(self, key: str, features: PictureFeatures) -> None:
        """Keeps features; a disk that cannot take them is no error."""
        self.memory.put(key, features, features.nbytes)
        if self._folder is not None:
            with suppress(OSError):
                _write(self._folder, key, features, self._folder_bytes)


def _read(folder: Path, key: str, embeds: tuple[int, ...], deepstack: tuple[int, ...]) -> PictureFeatures | None:
    """The features that were written for this key; None, and the file is gone, when it holds anything else."""
    path = folder / f"{key}.safetensors"
    try:
        with safe_open(path, framework="numpy") as file:
            features = PictureFeatures(file.get_tensor(names.IMAGE_EMBEDS), file.get_tensor(names.DEEPSTACK))
            seal = (file.metadata() or {}).get(_SEAL)
        os.utime(path)
    except FileNotFoundError:
        return None
    except (OSError, SafetensorError, ValueError):
        features, seal = None, None
    expected = [(shape, np.dtype(np.float32)) for shape in (embeds, deepstack)]
    if features is not None and [(array.shape, array.dtype) for array in features] == expected and seal == _seal(key, features):
        return features
    with suppress(OSError):
        path.unlink()
    return None


def _seal(key: str, features: PictureFeatures) -> str:
    """Hex SHA-256 of the key and of the features' bytes: what makes a file this picture's."""
    digest = hashlib.sha256(key.encode())
    for array in features:
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


def _write(folder: Path, key: str, features: PictureFeatures, limit_bytes: int) -> None:
    """Complete or absent; then the files that were not used for longest go until the folder is within its limit."""
    folder.mkdir(parents=True, exist_ok=True)
    for left in folder.glob(".*.tmp-*"):
        if left.suffix.removeprefix(".tmp-").isdecimal() and not is_another_alive(int(left.suffix.removeprefix(".tmp-"))):
            left.unlink(missing_ok=True)
    temporary = folder / f".{key}.tmp-{os.getpid()}"
    try:
        tensors = {names.IMAGE_EMBEDS: features.image_embeds, names.DEEPSTACK: features.deepstack}
        save_file(tensors, temporary, metadata={_SEAL: _seal(key, features)})
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
