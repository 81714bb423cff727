"""Makes samples of the rows of a set: one question about some pictures, with its right answers.

Nothing is decoded here. What is wrong with a row ends the command, with file and line; what is wrong with a picture
fails its item when the picture is asked for.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from qvlopt.data.pictures import PictureHeader, leaves_folder, load_picture, read_header
from qvlopt.data.rows import Row, read_rows
from qvlopt.data.sets import LOCK, MANIFEST, LockedSet, canonical_sha256, file_sha256, open_set
from qvlopt.errors import ItemError, UsageError


@dataclass(frozen=True)
class ImageRef:
    """A picture that is read when asked for. `name` is its path relative to `root`, the set's folder.

    `digest` is its SHA-256 where that is known already. Every method raises ItemError when the picture is unusable.
    """

    name: str
    root: Path
    digest: str | None = None
    is_video: bool = False

    @property
    def path(self) -> Path:
        return self.root / self.name

    def load(self) -> Image.Image:
        """The picture in mode RGB, upright (pictures.load_picture)."""
        self._refuse_video()
        return load_picture(self.path, root=self.root)

    def header(self) -> PictureHeader:
        """Size and frames without decoding (pictures.read_header)."""
        self._refuse_video()
        return read_header(self.path, root=self.root)

    def sha256(self) -> str:
        """SHA-256 of the file's bytes in hex."""
        if self.digest is not None:
            return self.digest
        if not os.path.isfile(self.path):
            raise ItemError(f"{self.path}: is missing")
        return file_sha256(self.path)

    def _refuse_video(self) -> None:
        if self.is_video:
            raise ItemError(f"{self.path}: is a video; this version evaluates pictures only")


@dataclass(frozen=True)
class Sample:
    """One item. `cluster` joins the items that share a picture; `origin` is `file:line`. Texts are as in the file."""

    id: str
    images: tuple[ImageRef, ...]
    question: str
    answers: tuple[str, ...]
    task: str
    cluster: str
    origin: str


@dataclass(frozen=True)
class SampleSet:
    """Chosen items in the order of the file. `digest` covers ids, texts, clusters and the bytes of the pictures, not the order."""

    samples: tuple[Sample, ...]
    digest: str
    name: str


def read_samples(
    entry_path: Path,
    *,
    task: str | None = None,
    limit: int | None = None,
    split: str | None = None,
    seed: int = 0,
    columns: Mapping[str, str] | None = None,
) -> SampleSet:
    """The items of a folder with `manifest.jsonl`, or of one `.jsonl` file, that belong to `task` and `split`.

    `limit` picks that many by a seeded hash of the ids, the same ones in every run. `columns` maps our keys to the
    file's. A folder with `lock.json` is verified first. Raises UsageError for ids that clash, pictures outside the
    folder and a choice that leaves nothing; RunError for a set that is missing, broken or changed.
    """
    is_file = entry_path.suffix == ".jsonl"
    path, root = (entry_path, entry_path.parent) if is_file else (entry_path / MANIFEST, entry_path)
    locked = open_set(root) if not is_file and (root / LOCK).exists() else None
    rows = read_rows(path, columns=columns or {})
    if not rows:
        raise UsageError(f"{path} has no rows", hint="write one item a line")
    _refuse_clashes(rows)
    rows = _of_task(_of_split(rows, split, path), task, path)
    make = _SampleMaker(root, locked)
    samples = tuple(make(row, task) for row in _limited(rows, limit, seed))
    name = locked.name if locked else entry_path.stem
    return SampleSet(samples, canonical_sha256(sorted((_identity(sample) for sample in samples), key=lambda identity: str(identity[0]))), name)


class _SampleMaker:
    """Turns rows into samples; a picture is hashed once, however many rows ask about it."""

    def __init__(self, root: Path, locked: LockedSet | None) -> None:
        self.root = root
        self.locked = locked
        self.pictures: dict[str, ImageRef] = {}

    def __call__(self, row: Row, task: str | None) -> Sample:
        images = [self._picture(name, row.origin) for name in row.images]
        images += [ImageRef(_contained(name, self.root, row.origin), self.root, is_video=True) for name in row.videos]
        # the same bytes under two names are the same picture
        shown = sorted({(image.digest or image.name)[:16] for image in images})
        cluster = row.cluster or "+".join(shown) or row.id
        return Sample(row.id, tuple(images), row.question, row.answers, row.task or task or "", cluster, row.origin)

    def _picture(self, name: str, origin: str) -> ImageRef:
        if name not in self.pictures:
            self.pictures[name] = ImageRef(_contained(name, self.root, origin), self.root, self._digest(name))
        return self.pictures[name]

    def _digest(self, name: str) -> str | None:
        listed = self.locked.files.get(name) if self.locked else None
        if listed is not None:
            return listed.sha256
        path = self.root / name
        return file_sha256(path) if os.path.isfile(path) else None


def _contained(name: str, root: Path, origin: str) -> str:
    if leaves_folder(name):
        raise UsageError(f"{origin}: the picture {name!r} is not a path inside {root}", hint="name pictures relative to the manifest, without '..'")
    return name


def _refuse_clashes(rows: Sequence[Row]) -> None:
    """Ids are compared as text, so that 1 and "1" clash: answers are stored by id and must never replace each other."""
    first: dict[str, str] = {}
    for row in rows:
        if row.id in first:
            line = row.origin.rpartition(":")[2]
            raise UsageError(f"{first[row.id]} and line {line}: both have the id {row.id!r}", hint="give every row an id of its own")
        first[row.id] = row.origin


def _of_split(rows: list[Row], split: str | None, path: Path) -> list[Row]:
    """Rows of the split; a file in which no row names one is a split of its own, whatever it is called."""
    if split is None or all(row.split is None for row in rows):
        return rows
    chosen = [row for row in rows if row.split == split]
    if not chosen:
        found = _found([row.split for row in rows], "splits")
        raise UsageError(f"{path}: no row has the split {split!r}; {found}", hint="change or remove split")
    return chosen


def _of_task(rows: list[Row], task: str | None, path: Path) -> list[Row]:
    """Rows of the task; a row that names none belongs to whatever task is asked for."""
    chosen = [row for row in rows if task is None or row.task in (None, task)]
    if not chosen:
        found = _found([row.task for row in rows], "tasks")
        raise UsageError(f"{path}: no row has the task {task!r}; {found}", hint="change the entry's task or path")
    return chosen


def _found(values: Sequence[str | None], what: str) -> str:
    counts = Counter(value or "none" for value in values)
    return f"{what} in the file: " + (", ".join(f"{value} ({count})" for value, count in counts.items()))


def _limited(rows: list[Row], limit: int | None, seed: int) -> list[Row]:
    """A subset that depends on the seed and the ids only, and keeps the order of the file: files are often sorted by kind."""
    if limit is None or limit >= len(rows):
        return rows
    by_hash = sorted(rows, key=lambda row: hashlib.sha256(f"{seed}\0{row.id}".encode("utf-8", "surrogatepass")).digest())
    chosen = {row.id for row in by_hash[:limit]}
    return [row for row in rows if row.id in chosen]


def _identity(sample: Sample) -> list[object]:
    pictures = [image.digest or f"missing {image.name}" for image in sample.images]
    return [sample.id, sample.question, list(sample.answers), sample.task, sample.cluster, pictures]
