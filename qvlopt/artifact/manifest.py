"""`qvlopt.json`: what an artifact is, what it was made from, and the digest of every file in it."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, FiniteFloat, ValidationError

import qvlopt
from qvlopt.artifact.containment import contained_file, escapes
from qvlopt.artifact.digest import sha256_file
from qvlopt.errors import RunError

MANIFEST = "qvlopt.json"
CARD = "README.md"
"""The artifact's card, which is for people: one that somebody edited makes the artifact no worse."""
SCHEMA_VERSION = 1

WEIGHT_SUFFIXES = (".safetensors", ".safetensors.index.json", ".onnx", ".onnx.data", ".onnx_data", ".bin")
"""Files that engines pick up by their name: one that the manifest does not list is a fault, not an extra."""


def _contained(name: str) -> str:
    if escapes(name):
        raise ValueError(f"the path {name!r} leaves the folder")
    return name


class Record(BaseModel):
    """Base of all records: no unknown keys, no changes after the check."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class SourceRecord(Record):
    """The checkpoint that was the input: hub id or path, commit if it has one, digest of its content."""

    path: str
    revision: str | None = None
    digest: str


class ParentRecord(Record):
    """An artifact that was an input, such as calibration statistics."""

    kind: str
    digest: str


class ModuleRecord(Record):
    """One module before and after: dtype as `inspect` shows it, bytes stored, SHA-256 of the stored bytes."""

    name: str
    dtype_before: str
    dtype_after: str
    bytes_before: int
    bytes_after: int
    sha256_before: str | None = None
    sha256_after: str | None = None


class LayerRecord(Record):
    """The loss of plain rounding and of what was chosen, and what that was.

    Where compensation was asked for: the loss of what was chosen on held-out pictures, and of the best without compensation.
    """

    name: str
    rounding_loss: FiniteFloat
    loss: FiniteFloat
    method: str
    held_out_loss: FiniteFloat | None = None
    held_out_uncompensated: FiniteFloat | None = None


class CheckRecord(Record):
    """The self-check before the folder got its name: the worst value found, and what it was in words."""

    passed: bool
    worst: FiniteFloat | None = None
    detail: str = ""


class FileRecord(Record):
    sha256: str
    bytes: int


class Manifest(Record):
    """The content of `qvlopt.json`; `digest` is that of everything the result depends on, not of the files."""

    schema_version: Literal[1] = 1
    tool: Literal["qvlopt"] = "qvlopt"
    version: str = qvlopt.__version__
    kind: str
    digest: str
    recipe: dict[str, Any]
    source: SourceRecord | None = None
    parents: tuple[ParentRecord, ...] = ()
    modules: tuple[ModuleRecord, ...] = ()
    layers: tuple[LayerRecord, ...] = ()
    coverage: dict[str, Any] | None = None
    check: CheckRecord | None = None
    changes: dict[str, str] = {}
    """Files of the source that are not byte-identical here, and why."""
    files: dict[Annotated[str, AfterValidator(_contained)], FileRecord] = {}
    versions: dict[str, str] = {}
    seconds: FiniteFloat = 0.0
    peak_rss_bytes: int = 0


def read_manifest(folder: Path) -> Manifest:
    """Raises RunError when there is none, when it is broken or names paths outside, and when a newer qvlopt wrote it."""
    path = contained_file(folder, MANIFEST, named_by=str(folder))
    try:
        text = path.read_bytes()
    except OSError as error:
        raise RunError(f"{folder} has no readable {MANIFEST}: {error.strerror}", hint="Is it a folder that qvlopt wrote?") from error
    try:
        return Manifest.model_validate_json(text)
    except ValidationError as error:
        version = _schema_version(text)
        if version > SCHEMA_VERSION:
            raise RunError(f"{path} has schema version {version}, this qvlopt reads {SCHEMA_VERSION}", hint="Update qvlopt.") from error
        first = error.errors(include_url=False, include_context=False)[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise RunError(f"{path} is broken at {where}: {first['msg']}", hint="Make the artifact again.") from error


def read_intact(folder: Path) -> Manifest:
    """The manifest of an artifact whose files are as it says, the card apart; RunError naming one that is not. Reads them all."""
    manifest = read_manifest(folder)
    problems = verify_files(folder, but=(CARD,))
    if problems:
        raise RunError(f"{folder} is damaged: {problems[0]}", hint="Copy it again from where it came, or make it again.")
    return manifest


def write_manifest(folder: Path, manifest: Manifest) -> Manifest:
    """Writes `qvlopt.json` with the digest of every other file of the folder filled in, and returns that manifest.

    Raises RunError when the folder holds links or anything that is neither a file nor a folder.
    """
    files: dict[str, FileRecord] = {}
    for name in sorted(stored_files(folder)):
        path = folder / name
        if path.is_symlink() or not path.is_file():
            raise RunError(f"{path} is not a regular file, so it cannot be part of an artifact")
        if name != MANIFEST:
            files[name] = FileRecord(sha256=sha256_file(path), bytes=path.stat().st_size)
    complete = manifest.model_copy(update={"files": files})
    (folder / MANIFEST).write_text(complete.model_dump_json(indent=2) + "\n", encoding="utf-8")
    return complete


def verify_files(folder: Path, *, hashes: bool = True, but: Collection[str] = ()) -> list[str]:
    """What is wrong with the files of an artifact, in words; empty when all is as the manifest says.

    Finds listed files that are missing, changed or outside, and weight files that are not listed. Other extra files are no
    fault. Without `hashes` only sizes are compared. Files in `but` may be what they like. Raises RunError when the manifest cannot be read.
    """
    manifest = read_manifest(folder)
    problems = []
    for name, record in manifest.files.items():
        problem = None if name in but else _file_problem(folder, name, record, hashes)
        if problem:
            problems.append(f"{name} {problem}")
    foreign = sorted(name for name in stored_files(folder) if name.endswith(WEIGHT_SUFFIXES) and name not in manifest.files)
    return problems + [f"{name} is not part of this artifact" for name in foreign]


def stored_files(folder: Path) -> Iterator[str]:
    """Relative names, with `/`, of all that is in a folder and its sub-folders and is no folder; links are not followed."""
    for place, folders, files in os.walk(folder):
        links = [name for name in folders if os.path.islink(os.path.join(place, name))]
        for name in (*files, *links):
            yield Path(place, name).relative_to(folder).as_posix()


def _file_problem(folder: Path, name: str, record: FileRecord, hashes: bool) -> str | None:
    try:
        path = contained_file(folder, name, named_by=MANIFEST)
    except RunError as error:
        return f"is refused: {error.message}"
    if not path.is_file():
        return "is missing"
    size = path.stat().st_size
    if size != record.bytes:
        return f"has {size} bytes, expected {record.bytes}"
    if hashes and sha256_file(path) != record.sha256:
        return "has another content than the manifest says"
    return None


def _schema_version(text: bytes) -> int:
    """The version that a manifest claims; 0 when it claims none."""
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError):
        return 0
    version = fields.get("schema_version") if isinstance(fields, dict) else None
    return version if isinstance(version, int) else 0
