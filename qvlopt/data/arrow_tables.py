"""Sets of the datasets library: folders that `save_to_disk` wrote, and repositories on the hub. Their tables are memory-mapped."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from qvlopt.data.columns import check_columns, check_table
from qvlopt.data.rows import Record
from qvlopt.data.table_rows import TableRows
from qvlopt.errors import ItemError, NotFetchedError, RunError, UsageError

LIGHT_ROWS = 1024
ONE, SEVERAL = "state.json", "dataset_dict.json"
"""Files that `save_to_disk` leaves in the folder of one table, and of several by split."""

HUB_SET = re.compile(r"(?P<id>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?::(?P<config>[\w.-]+))?(?:@(?P<revision>[\w./-]+))?")


class HubSet(NamedTuple):
    """A repository of the hub, one of its configurations, and a branch, tag or commit. `download`: it may be fetched."""

    id: str
    config: str | None
    revision: str | None
    download: bool = True

    def __str__(self) -> str:
        return self.id + (f":{self.config}" if self.config else "") + (f"@{self.revision}" if self.revision else "")


def hub_set(text: str) -> HubSet | None:
    """What `ORGANISATION/NAME[:CONFIGURATION][@REVISION]` means; None where the text is not written so."""
    match = HUB_SET.fullmatch(text)
    return HubSet(match["id"], match["config"], match["revision"]) if match else None


class ArrowTable:
    """One split. A row is found again by its number from 0."""

    def __init__(self, dataset: Any, columns: Mapping[str, str], place: str, folder: Path) -> None:
        check_columns(columns)
        self.dataset = dataset.with_format("arrow")
        labels = {name: feature.names for name, feature in dataset.features.items() if type(feature).__name__ == "ClassLabel"}
        self.rows = TableRows(self, check_table(dataset.column_names, columns, place), labels, place, folder)

    def records(self) -> Iterator[Record]:
        light = self.dataset.select_columns(self.rows.light_columns(self.dataset.column_names))
        number = 0
        for table in light.iter(batch_size=LIGHT_ROWS):
            for found in table.to_pylist():
                yield self.rows.record(found, number, number)
                number += 1

    def cell(self, row: int, column: str) -> Any:
        """The value of a column of pictures in a row: bytes and path, not decoded."""
        import pyarrow

        try:
            return self.dataset.select_columns([column])[row].column(0)[0].as_py()
        except (OSError, IndexError, pyarrow.ArrowException) as error:
            raise ItemError(f"{self.rows.place}:{row + 1}: cannot be read: {error}") from error


def is_saved(folder: Path) -> bool:
    """Whether `save_to_disk` wrote this folder."""
    return (folder / ONE).is_file() or (folder / SEVERAL).is_file()


def open_saved(folder: Path, split: str | None, columns: Mapping[str, str]) -> ArrowTable:
    """The table in a folder of `save_to_disk`, or that of the split. Raises UsageError for a split that is not there."""
    import datasets

    if (folder / SEVERAL).is_file():
        names = sorted(path.parent.name for path in folder.glob(f"*/{ONE}"))
        folder = folder / _one_of(names, split, str(folder))
    try:
        dataset = datasets.load_from_disk(str(folder))
    except Exception as error:  # whatever a damaged folder makes of it: KeyError, Arrow's errors, ValueError
        raise RunError(f"{folder} cannot be read as a saved data set: {type(error).__name__}: {error}", hint="save it again") from error
    return ArrowTable(dataset, columns, str(folder), folder)


def open_hub(wanted: HubSet, split: str | None, columns: Mapping[str, str]) -> ArrowTable:
    """The split of a repository, from the datasets library's cache where it is there; it is downloaded otherwise.

    Raises UsageError for a configuration or split that is not named or not there, RunError when the set cannot be had.
    """
    import datasets
    from datasets import config

    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    offline = config.HF_HUB_OFFLINE or os.environ.get("HF_HUB_OFFLINE", "").upper() in {"1", "ON", "YES", "TRUE"}
    try:
        with _offline(offline or not wanted.download):
            builder = datasets.load_dataset_builder(wanted.id, wanted.config, revision=wanted.revision)
        _check_revision(builder, wanted)
        if builder.info.splits:  # known before anything is downloaded, where the card says so
            _one_of(list(builder.info.splits), split, str(wanted))
        builder.download_and_prepare()
        chosen = _one_of(list(builder.info.splits), split, str(wanted))
        dataset = builder.as_dataset(split=chosen)
    except (UsageError, RunError):
        raise
    except Exception as error:  # the hub, the network and the cache have errors of their own kinds
        if isinstance(error, ValueError) and "onfig" in str(error):
            raise UsageError(f"{wanted}: {_line(error)}", hint="name one as ORGANISATION/NAME:CONFIGURATION") from error
        reason = "HF_HUB_OFFLINE is set" if offline else _line(error) if wanted.download else "a dry run downloads nothing"
        raise (RunError if wanted.download else NotFetchedError)(
            f"there is no file or folder {wanted}, and the set of that name is not in the cache {config.HF_DATASETS_CACHE}: {reason}",
            hint="download it once with a connection, or give the path of a local copy",
        ) from error
    return ArrowTable(dataset, columns, f"{wanted.id}@{str(builder.hash)[:12]}/{chosen}", Path(builder.cache_dir))


@contextmanager
def _offline(value: bool) -> Iterator[None]:
    """The datasets library looks into its cache only."""
    from datasets import config

    before = config.HF_HUB_OFFLINE
    config.HF_HUB_OFFLINE = value
    try:
        yield
    finally:
        config.HF_HUB_OFFLINE = before


def _check_revision(builder: Any, wanted: HubSet) -> None:
    """Without the hub the library takes whatever its cache holds; a revision that was asked for must be that one."""
    is_cached = type(builder).__module__.endswith(".cache.cache")
    if is_cached and wanted.revision and not str(builder.hash).startswith(wanted.revision):
        raise RunError(
            f"{wanted}: the hub cannot be asked, and the cache holds {builder.hash}, which need not be that revision",
            hint="name the commit that is in the cache, or run with a connection",
        )


def _one_of(names: list[str], split: str | None, where: str) -> str:
    if split in names:
        return str(split)
    if split is None and len(names) == 1:
        return names[0]
    problem = "several splits" if split is None else f"no split {split!r}"
    raise UsageError(f"{where} has {problem}; splits: {', '.join(names)}", hint="set the entry's split")


def _line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
