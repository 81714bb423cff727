"""Finished parts of work that has not ended: what a killed run leaves beside its output, and the next run goes on with.

A part is a small JSON record that names its files with their SHA-256. It gets its name when all of it is written, so it is
there whole or not at all whatever ends the process; a part whose file does not match (a crash of the machine) is not there.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from qvlopt.artifact.digest import sha256_file
from qvlopt.errors import QvloptError, RunError, UsageError

log = logging.getLogger(__name__)

HEAD = "unfinished.json"
"""Says which result the parts belong to; without it nothing in the folder is ours."""


class Parts:
    """The parts in one folder. Names of parts and files are without folders."""

    def __init__(self, folder: Path) -> None:
        """Makes the folder if it is missing."""
        self.folder = folder
        folder.mkdir(exist_ok=True)

    def path(self, file: str) -> Path:
        """Where a part's file is, or is to be written before `keep`."""
        return self.folder / file

    def record(self, part: str) -> dict[str, Any] | None:
        """What was kept of a part, after its files were read and found as they were; else None."""
        try:
            kept = json.loads(self._record(part).read_bytes())
            files, fields = dict(kept["files"]), dict(kept["fields"])
            return fields if all(sha256_file(self.folder / name) == digest for name, digest in files.items()) else None
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def keep(self, part: str, fields: Mapping[str, Any], files: Mapping[str, str] | Sequence[str] = ()) -> None:
        """Records that a part is finished. `files` are in the folder already, with their SHA-256 where it is known."""
        digests = dict(files) if isinstance(files, Mapping) else {name: sha256_file(self.folder / name) for name in files}
        new = self.folder / f"{part}.json.new"
        new.write_text(json.dumps({"files": digests, "fields": dict(fields)}), encoding="utf-8")
        os.replace(new, self._record(part))

    def drop(self, part: str, *files: str) -> None:
        """Forgets a part and removes its files, the record first."""
        self._record(part).unlink(missing_ok=True)
        for file in files:
            self.path(file).unlink(missing_ok=True)

    def remove(self) -> None:
        """Removes the folder with all parts."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _record(self, part: str) -> Path:
        return self.folder / f"{part}.json"


def parts_folder(destination: Path) -> Path:
    """The folder beside an output that keeps its parts until it is finished."""
    real = Path(os.path.realpath(destination))
    return real.parent / f".{real.name}.part"


@contextmanager
def unfinished(destination: Path, *, digest: str, conditions: Mapping[str, str], overwrite: bool = False) -> Iterator[Parts]:
    """The parts of the result `digest`, those of an earlier run if it was killed, interrupted or ran out of disk.

    They stay after the block, for the caller to `remove` once the output has its name, except where one of our own errors
    ends it: such a run would fail again. `conditions` are what else decides the bytes (versions, threads): parts made under
    others are dropped with a warning. Raises UsageError for parts of another result, unless `overwrite`. The destination's
    lock must be held.
    """
    folder = parts_folder(destination)
    _check_head(folder, {"digest": digest, "conditions": dict(conditions)}, overwrite=overwrite)
    try:
        parts = Parts(folder)
        (folder / HEAD).write_text(json.dumps({"digest": digest, "conditions": dict(conditions)}), encoding="utf-8")
    except OSError as error:
        raise RunError(f"{folder} cannot be made: {error.strerror}", hint="Choose another --output.") from error
    try:
        yield parts
    except QvloptError:
        parts.remove()
        raise


def discard_unfinished(destination: Path, digest: str) -> None:
    """Removes the parts of this very result, which is finished. Those of another are kept."""
    folder = parts_folder(destination)
    if folder.is_symlink():
        return
    try:
        head = json.loads((folder / HEAD).read_bytes())
    except (OSError, ValueError):
        return
    if isinstance(head, dict) and head.get("digest") == digest:
        shutil.rmtree(folder, ignore_errors=True)


def _check_head(folder: Path, expected: Mapping[str, Any], *, overwrite: bool) -> None:
    if not os.path.lexists(folder):
        return
    if folder.is_symlink() or not folder.is_dir():
        raise UsageError(f"{folder} is in the way: it is not a folder of qvlopt", hint="Move it away, or choose another --output.")
    try:
        found = json.loads((folder / HEAD).read_bytes())
    except (OSError, ValueError):
        found = None
    if found == expected or not any(folder.iterdir()):
        return
    if found is None:
        raise UsageError(f"{folder} is in the way: it has no readable {HEAD}", hint="Move it away, or choose another --output.")
    same = found.get("digest") == expected["digest"]
    if not same and not overwrite:
        raise UsageError(
            f"{folder} holds unfinished work on another result, with digest {str(found.get('digest'))[:12]}, expected {expected['digest'][:12]}",
            hint="Finish it with its own recipe and --resume, drop it with --overwrite, or choose another --output.",
        )
    if same:
        log.warning("%s was begun under other conditions (%s): it is dropped", folder, _differences(found.get("conditions"), expected["conditions"]))
    shutil.rmtree(folder)


def _differences(before: object, now: Mapping[str, str]) -> str:
    then = before if isinstance(before, dict) else {}
    return ", ".join(f"{key} {then.get(key)}, now {value}" for key, value in now.items() if then.get(key) != value)
