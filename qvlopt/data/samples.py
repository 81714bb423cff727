"""Makes samples of the rows of a set: one question about some pictures, with its right answers.

Nothing is decoded here. What is wrong with a row ends the command, with file and line; what is wrong with a picture
fails its item when the picture is asked for.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from qvlopt.data.arrow_tables import HubSet
from qvlopt.data.cells import Cell, StoredPicture, bytes_of, path_of
from qvlopt.data.columns import LETTERS
from qvlopt.data.pictures import PictureHeader, leaves_folder, load_picture, read_header
from qvlopt.data.rows import Row, make_row
from qvlopt.data.set_files import is_manifest, read_records
from qvlopt.data.sets import LOCK, MANIFEST, LockedSet, canonical_sha256, file_sha256, open_set
from qvlopt.data.subset import choose
from qvlopt.errors import ItemError, UsageError


@dataclass(frozen=True)
class ImageRef:
    """A picture that is read when asked for. `name` is its path relative to `root`, the set's folder.

    `stored`: where it is inside a file of the set, if it is no file of its own; `name` then says so for people.
    `digest` is its SHA-256 where that is known already. Every method raises ItemError when the picture is unusable.
    """

    name: str
    root: Path
    digest: str | None = None
    is_video: bool = False
    stored: StoredPicture | None = None

    @property
    def path(self) -> Path:
        return self.root / self.name

    def load(self) -> Image.Image:
        """The picture in mode RGB, upright (pictures.load_picture)."""
        if self.stored is not None:
            return load_picture(self.stored.read(), name=self.stored.name)
        self._refuse_video()
        return load_picture(self.path, root=self.root)

    def header(self) -> PictureHeader:
        """Size and frames without decoding (pictures.read_header)."""
        if self.stored is not None:
            return read_header(self.stored.read(), name=self.stored.name)
        self._refuse_video()
        return read_header(self.path, root=self.root)

    def sha256(self) -> str:
        """SHA-256 of the file's bytes in hex."""
        if self.digest is not None:
            return self.digest
        if self.stored is not None:
            return hashlib.sha256(self.stored.read()).hexdigest()
        if not os.path.isfile(self.path):
            raise ItemError(f"{self.path}: is missing")
        return file_sha256(self.path)

    def _refuse_video(self) -> None:
        if self.is_video:
            raise ItemError(f"{self.path}: is a video; this version evaluates pictures only")


@dataclass(frozen=True)
class Sample:
    """One item. `cluster` joins the items that share a picture; `origin` is `file:line` or `file:row`. Texts are as in the file.

    `choices` are the options in the order of their letters, `stratum` the kind of item that subsets are spread over,
    `dataset` the source within a benchmark; all only where the file has them.
    """

    id: str
    images: tuple[ImageRef, ...]
    question: str
    answers: tuple[str, ...]
    task: str
    cluster: str
    origin: str
    choices: tuple[str, ...] = ()
    stratum: str | None = None
    dataset: str | None = None


@dataclass(frozen=True)
class SampleSet:
    """Chosen items in the order of the file. `digest` covers ids, texts, clusters and the bytes of the pictures, not the order."""

    samples: tuple[Sample, ...]
    digest: str
    name: str


def read_samples(
    entry_path: Path | HubSet,
    *,
    task: str | None = None,
    limit: int | None = None,
    split: str | None = None,
    seed: int = 0,
    columns: Mapping[str, str] | None = None,
) -> SampleSet:
    """The items of a set (set_files.FORMATS) that belong to `task` and `split`.

    `limit` picks that many by a seeded hash of the ids, the same ones in every run (subset.choose). `columns` maps our
    keys to the file's. A folder with `lock.json` is verified first. Pictures stay where they are; those of the chosen
    items are hashed. Raises UsageError for ids that clash, pictures outside the folder and a choice that leaves nothing;
    RunError for a set that is missing, broken or changed.
    """
    locked, place, name = None, str(entry_path), str(entry_path)
    if isinstance(entry_path, Path):
        manifest = is_manifest(entry_path)
        place = str(entry_path / MANIFEST if manifest else entry_path)
        locked = open_set(entry_path) if manifest and (entry_path / LOCK).exists() else None
        name = locked.name if locked else entry_path.stem
    rows = [make_row(record) for record in read_records(entry_path, split=split, columns=columns or {})]
    if not rows:
        raise UsageError(f"{place} has no rows", hint="write one item a line")
    _refuse_clashes(rows)
    rows = _of_task(_of_split(rows, split, place), task, place)
    make = _SampleMaker(locked)
    samples = tuple(make(row, task) for row in choose(rows, limit, seed))
    return SampleSet(samples, canonical_sha256(sorted((_identity(sample) for sample in samples), key=lambda identity: str(identity[0]))), name)


class _SampleMaker:
    """Turns rows into samples; a picture's file is hashed once, however many rows ask about it."""

    def __init__(self, locked: LockedSet | None) -> None:
        self.locked = locked
        self.pictures: dict[Path, ImageRef] = {}

    def __call__(self, row: Row, task: str | None) -> Sample:
        cell = row.images
        images = list(self._stored(cell, row)) if isinstance(cell, Cell) else [self._file(name, row) for name in cell]
        images += [ImageRef(_contained(name, row), row.folder, is_video=True) for name in row.videos]
        # the same bytes under two names are the same picture
        shown = sorted({(image.digest or image.name)[:16] for image in images})
        return Sample(
            id=row.id,
            images=tuple(images),
            question=with_choices(row.question, row.choices),
            answers=row.answers,
            task=row.task or task or "",
            cluster=row.cluster or "+".join(shown) or row.id,
            origin=row.origin,
            choices=row.choices,
            stratum=row.stratum,
            dataset=row.dataset,
        )

    def _stored(self, cell: Cell, row: Row) -> Iterator[ImageRef]:
        """The pictures of a cell; one that cannot be read now fails its item later, as a file would."""
        try:
            items = cell.items()
        except ItemError:
            items = [None]
        for index, item in enumerate(items):
            name = path_of(item)
            if name is not None:
                yield self._file(name, row)
                continue
            stored = StoredPicture(cell, index)
            try:
                digest = hashlib.sha256(bytes_of(item)).hexdigest()
            except ValueError:
                digest = None
            yield ImageRef(stored.name, row.folder, digest, stored=stored)

    def _file(self, name: str, row: Row) -> ImageRef:
        path = row.folder / _contained(name, row)
        if path not in self.pictures:
            self.pictures[path] = ImageRef(name, row.folder, self._digest(name, path))
        return self.pictures[path]

    def _digest(self, name: str, path: Path) -> str | None:
        listed = self.locked.files.get(name) if self.locked else None
        if listed is not None:
            return listed.sha256
        return file_sha256(path) if os.path.isfile(path) else None


def with_choices(question: str, choices: Sequence[str]) -> str:
    """The question with its options, one a line as `A. text`, unless it lists them already."""
    if not choices or re.search(r"^\s*[(\[]?A[)\].:]\s", question, re.MULTILINE):
        return question
    return "\n".join([question, *(f"{letter}. {text}" for letter, text in zip(LETTERS, choices, strict=False))])


def _contained(name: str, row: Row) -> str:
    if leaves_folder(name):
        hint = "name pictures relative to the file that lists them, without '..'"
        raise UsageError(f"{row.origin}: the picture {name!r} is not a path inside {row.folder}", hint=hint)
    return name


def _refuse_clashes(rows: Sequence[Row]) -> None:
    """Ids are compared as text, so that 1 and "1" clash: answers are stored by id and must never replace each other."""
    first: dict[str, str] = {}
    for row in rows:
        if row.id in first:
            file, _, number = row.origin.rpartition(":")
            word = "line" if file.endswith((".jsonl", ".tsv")) else "row"
            other = f"{word} {number}" if first[row.id].rpartition(":")[0] == file else row.origin
            raise UsageError(f"{first[row.id]} and {other}: both have the id {row.id!r}", hint="give every row an id of its own")
        first[row.id] = row.origin


def _of_split(rows: list[Row], split: str | None, path: str) -> list[Row]:
    """Rows of the split; a file in which no row names one is a split of its own, whatever it is called."""
    if split is None or all(row.split is None for row in rows):
        return rows
    chosen = [row for row in rows if row.split == split]
    if not chosen:
        found = _found([row.split for row in rows], "splits")
        raise UsageError(f"{path}: no row has the split {split!r}; {found}", hint="change or remove split")
    return chosen


def _of_task(rows: list[Row], task: str | None, path: str) -> list[Row]:
    """Rows of the task; a row that names none belongs to whatever task is asked for."""
    chosen = [row for row in rows if task is None or row.task in (None, task)]
    if not chosen:
        found = _found([row.task for row in rows], "tasks")
        raise UsageError(f"{path}: no row has the task {task!r}; {found}", hint="change the entry's task or path")
    return chosen


def _found(values: Sequence[str | None], what: str) -> str:
    counts = Counter(value or "none" for value in values)
    return f"{what} in the file: " + (", ".join(f"{value} ({count})" for value, count in counts.items()))


def _identity(sample: Sample) -> list[object]:
    pictures = [image.digest or f"missing {image.name}" for image in sample.images]
    identity: list[object] = [sample.id, sample.question, list(sample.answers), sample.task, sample.cluster, pictures]
    return [*identity, list(sample.choices), sample.dataset] if sample.choices or sample.dataset else identity
