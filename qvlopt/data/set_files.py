"""What is at the path of an entry: one file, a manifest, a saved data set, or a folder of files by split; all give records."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from qvlopt.data.arrow_tables import HubSet, hub_set, is_saved, open_hub, open_saved
from qvlopt.data.jsonl_file import JsonlFile
from qvlopt.data.parquet_files import ParquetFile
from qvlopt.data.row_groups import RowGroups
from qvlopt.data.rows import Record
from qvlopt.data.sets import MANIFEST
from qvlopt.data.tsv_file import TsvFile
from qvlopt.errors import RunError, UsageError
from qvlopt.recipe.paths import resolve_path

SUFFIXES = (".parquet", ".jsonl", ".tsv")
SHARD = re.compile(r"(?P<split>.+?)-\d{5}-of-\d{5}(?:-[0-9a-f]+)?")
"""Names of the hub's shards, such as validation-00000-of-00006."""
SPLITS = ("train", "training", "validation", "valid", "val", "dev", "test", "eval", "calibrate")

FORMATS = "a folder with manifest.jsonl, a .jsonl, .parquet or .tsv file or a folder of them, a folder of save_to_disk, or a hub id"


def find_set(value: str, folder: Path, *, download: bool = True) -> Path | HubSet | None:
    """What an entry's path means: a builtin set, a file or folder (the recipe's `folder` goes first), else a hub id; or None.

    Without `download` a set of the hub is read from the cache only.
    """
    found = None if value.endswith(SUFFIXES) else hub_set(value)
    return resolve_path(value, folder, kind="calib") or (found._replace(download=download) if found else None)


def is_manifest(place: Path) -> bool:
    """Whether rows are lines of `manifest.jsonl` in that folder; so is a folder that does not exist, for its error's sake."""
    return (place / MANIFEST).exists() if place.exists() else place.suffix not in SUFFIXES


def read_records(place: Path | HubSet, *, split: str | None, columns: Mapping[str, str]) -> Iterator[Record]:
    """Every record, in the order of the files by name. Raises UsageError or RunError naming the file.

    `split` chooses a table of a saved set or of the hub, and the shards of that name; within files, rows name their own.
    """
    if isinstance(place, HubSet):
        yield from open_hub(place, split, columns).records()
    elif is_manifest(place):
        yield from JsonlFile(place / MANIFEST, columns).records()
    elif place.is_dir() and is_saved(place):
        yield from open_saved(place, split, columns).records()
    else:
        yield from _read_files([place] if place.is_file() else _files(place, split), columns)


def _read_files(paths: Sequence[Path], columns: Mapping[str, str]) -> Iterator[Record]:
    groups, position = RowGroups(), 0
    for path in paths:
        if path.suffix == ".parquet":
            for record in ParquetFile(path, columns, groups).records(position):
                yield record
                position += 1
        elif path.suffix == ".tsv":
            yield from TsvFile(path, columns).records()
        elif path.suffix == ".jsonl":
            yield from JsonlFile(path, columns).records()
        else:
            raise UsageError(f"{path}: files of this kind are not read", hint=f"give {FORMATS}")


def _files(folder: Path, split: str | None) -> list[Path]:
    """The files of a folder that belong to the split; all must be of one kind, and of one split where none is asked for."""
    paths = sorted(path for path in folder.rglob("*") if path.suffix in SUFFIXES and path.is_file() and not _is_hidden(path, folder))
    kinds = sorted({path.suffix for path in paths})
    if not paths:
        raise RunError(f"{folder} holds no set", hint=f"give {FORMATS}")
    if len(kinds) > 1:
        raise UsageError(f"{folder} holds files of several kinds: {', '.join(kinds)}", hint="give one file, or a folder of one kind")
    by_split: dict[str, list[Path]] = {}
    for path in paths:
        by_split.setdefault(_split_of(path, folder), []).append(path)
    if split in by_split:
        return by_split[split]
    if len(by_split) == 1 and (split is None or not _names_a_split(paths[0])):
        return paths
    problem = "several splits or configurations" if split is None else f"no files of the split {split!r}"
    raise UsageError(f"{folder} has {problem}; found {', '.join(by_split)}", hint="set the entry's split, or give the folder or file of one")


def _split_of(path: Path, folder: Path) -> str:
    """The shard's name without its number, behind the folder where one configuration of several lies in it."""
    match = SHARD.fullmatch(path.stem)
    name = match["split"] if match else path.stem
    parts = [part for part in path.relative_to(folder).parent.parts if part not in ("data", name)]
    return "/".join([*parts, name])


def _names_a_split(path: Path) -> bool:
    """Whether a file says which split it is, so that it cannot stand for another one."""
    return SHARD.fullmatch(path.stem) is not None or path.stem in SPLITS


def _is_hidden(path: Path, folder: Path) -> bool:
    return any(part.startswith(".") for part in path.relative_to(folder).parts)
