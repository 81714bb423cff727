"""Locked sets: a folder with `manifest.jsonl`, its pictures, and `lock.json` with the SHA-256 of every file.

lock.json: {"schema_version": 1, "name", "licence", "files": {path: {"sha256", "bytes", "kind"}}, "digest"}; `digest` is
over the table of files, so that one line tells which version of a set was used.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from qvlopt.data.pictures import leaves_folder
from qvlopt.errors import RunError

LOCK = "lock.json"
MANIFEST = "manifest.jsonl"
SCHEMA_VERSION = 1
RESTORE = "install qvlopt again, or restore the set's folder from where it came"


@dataclass(frozen=True)
class LockedFile:
    """SHA-256 (hex), size in bytes, and kind: `manifest`, `picture` or `text`."""

    sha256: str
    bytes: int
    kind: str


@dataclass(frozen=True)
class LockedSet:
    """A verified set: every file is as the lock says. `files` by path relative to `folder`, with `/`."""

    folder: Path
    name: str
    licence: str
    digest: str
    files: Mapping[str, LockedFile]


def open_set(path: str | Path) -> LockedSet:
    """The set in that folder after comparing every file with its lock.

    Raises RunError for a lock that is missing or malformed, and for a file that is missing, changed or of another size.
    """
    folder = Path(path)
    locked = _read_lock(folder)
    for name, file in locked.files.items():
        _verify(folder / name, file)
    return locked


def write_lock(folder: Path, *, name: str, licence: str) -> LockedSet:
    """Writes `lock.json` over every file that is in the folder now, replacing an older lock."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path != folder / LOCK)
    files = {path.relative_to(folder).as_posix(): _describe(path) for path in paths}
    locked = LockedSet(folder, name, licence, _digest(files), files)
    table = {path: asdict(file) for path, file in files.items()}
    document = {"schema_version": SCHEMA_VERSION, "name": name, "licence": licence, "files": table, "digest": locked.digest}
    temporary = folder / f".{LOCK}.tmp"
    temporary.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    os.replace(temporary, folder / LOCK)
    return locked


def file_sha256(path: Path) -> str:
    """SHA-256 of a file's bytes in hex."""
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def canonical_sha256(value: object) -> str:
    """SHA-256 in hex of a value's JSON with sorted keys, no spaces, UTF-8."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _describe(path: Path) -> LockedFile:
    pictures = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".tif", ".tiff", ".bmp")
    kind = "manifest" if path.name == MANIFEST else "picture" if path.suffix.lower() in pictures else "text"
    return LockedFile(file_sha256(path), path.stat().st_size, kind)


def _digest(files: Mapping[str, LockedFile]) -> str:
    return canonical_sha256({path: asdict(file) for path, file in files.items()})


def _read_lock(folder: Path) -> LockedSet:
    path = folder / LOCK
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        files = {name: _locked_file(name, entry) for name, entry in document["files"].items()}
        locked = LockedSet(folder, str(document["name"]), str(document["licence"]), str(document["digest"]), files)
    except FileNotFoundError as error:
        raise RunError(f"{path} is missing: the set cannot be verified", hint=RESTORE) from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise RunError(f"{path} is no valid lock: {type(error).__name__}: {error}", hint=RESTORE) from error
    if document.get("schema_version") != SCHEMA_VERSION:
        raise RunError(f"{path} has schema_version {document.get('schema_version')!r}, this version reads {SCHEMA_VERSION}")
    if _digest(files) != locked.digest:
        raise RunError(f"{path} was changed: its files have digest {_digest(files)[:12]}, it names {locked.digest[:12]}", hint=RESTORE)
    return locked


def _locked_file(name: str, entry: Mapping[str, Any]) -> LockedFile:
    if leaves_folder(name):
        raise ValueError(f"the path {name!r} leaves the set's folder")
    return LockedFile(str(entry["sha256"]), int(entry["bytes"]), str(entry["kind"]))


def _verify(path: Path, file: LockedFile) -> None:
    if not path.is_file():
        raise RunError(f"{path} is missing, though {LOCK} lists it", hint=RESTORE)
    size = path.stat().st_size
    if size != file.bytes:
        raise RunError(f"{path} was changed: {size} bytes, {LOCK} says {file.bytes}", hint=RESTORE)
    found = file_sha256(path)
    if found != file.sha256:
        raise RunError(f"{path} was changed: SHA-256 {found[:12]}..., {LOCK} says {file.sha256[:12]}...", hint=RESTORE)
