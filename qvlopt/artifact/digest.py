"""SHA-256 of files, bytes and plain values: how results are recognised and compared."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any


def sha256_file(path: Path) -> str:
    """Hex SHA-256 of a file's content, read in pieces; raises OSError."""
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def sha256_bytes(data: bytes) -> str:
    """Hex SHA-256 of `data`."""
    return hashlib.sha256(data).hexdigest()


def digest_of(value: Any) -> str:
    """Hex SHA-256 of a JSON value, whatever the order of its keys.

    Tuples count as lists. Raises TypeError for what JSON cannot hold and ValueError for NaN and infinities.
    """
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return sha256_bytes(text.encode())
