"""Answers that an engine gave already, kept by what they depend on: nothing that is finished is asked again, after a kill either.

One file a set of conditions (weights, processor, tokenizer, engine, settings, code), one line an answer, appended as soon as
it is there. A line that a kill cut short is left out. Wrong lines cannot come in: a line's key says which question about
which pictures it answers.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import qvlopt
from qvlopt.artifact.digest import digest_of, sha256_file
from qvlopt.data.preflight import Size
from qvlopt.data.samples import Sample
from qvlopt.errors import ItemError
from qvlopt.runtime.engine import Answer

ANSWERING_CODE = ("data", "model", "quant", "graphs", "runtime")
"""Sub-packages that answers depend on."""


@dataclass(frozen=True)
class Kept:
    """An answer with the sizes of its pictures after resizing and the digest of what the engine was given."""

    answer: Answer
    sizes: tuple[Size, ...]
    inputs: str


class AnswerCache:
    """The answers under one set of conditions. A context manager."""

    def __init__(self, path: Path, *, is_fresh: bool = False) -> None:
        """Reads what `path` holds, or ignores it when everything is to be asked anew (`is_fresh`). Raises OSError."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._kept = {} if is_fresh or not path.exists() else _read(path)
        self._file: BinaryIO = open(path, "ab", buffering=0)  # noqa: SIM115
        if self._file.tell() and not _ends_with_line(path):
            self._file.write(b"\n")

    def __enter__(self) -> AnswerCache:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def get(self, sample: Sample, max_new_tokens: int) -> Kept | None:
        """What was answered to this question about these pictures, if it was."""
        key = _key(sample, max_new_tokens)
        kept = self._kept.get(key) if key else None
        return replace(kept, answer=replace(kept.answer, id=sample.id)) if kept else None

    def put(self, rows: Iterable[tuple[Sample, Kept]], max_new_tokens: int) -> None:
        """Appends answers and waits until the disk has them. Failed ones are not kept: they are worth another try."""
        lines = []
        for sample, kept in rows:
            key = _key(sample, max_new_tokens)
            if key is None or kept.answer.error is not None or key in self._kept:
                continue
            self._kept[key] = kept
            lines.append(json.dumps(_row(key, kept), separators=(",", ":")) + "\n")
        if lines:
            self._file.write("".join(lines).encode("ascii"))
            os.fsync(self._file.fileno())


def cache_path(folder: Path, fingerprint: Mapping[str, Any], batch: int) -> Path:
    """The file for answers of an engine with this fingerprint, asked in batches of this size, by this version of the code."""
    return folder / "answers" / f"{digest_of({'fingerprint': dict(fingerprint), 'batch': batch, 'code': _code_digest()})}.jsonl"


@functools.cache
def _code_digest() -> str:
    package = Path(qvlopt.__file__).parent
    files = sorted(path for name in ANSWERING_CODE for path in (package / name).rglob("*.py"))
    return digest_of({str(path.relative_to(package)): sha256_file(path) for path in files})


def _key(sample: Sample, max_new_tokens: int) -> str | None:
    """None for an item whose pictures cannot be read."""
    try:
        return digest_of([sample.question, [image.sha256() for image in sample.images], max_new_tokens])
    except (ItemError, OSError, UnicodeError):
        return None


def _row(key: str, kept: Kept) -> dict[str, Any]:
    answer = asdict(kept.answer)
    del answer["id"], answer["error"]
    return {"key": key, **answer, "sizes": kept.sizes, "inputs": kept.inputs}


def _read(path: Path) -> dict[str, Kept]:
    found: dict[str, Kept] = {}
    for line in path.read_bytes().splitlines():
        try:
            row = json.loads(line)
            answer = Answer("", tuple(row["token_ids"]), row["text"], row["stop"], row["prompt_tokens"], new_tokens=row.get("new_tokens"))
            found[row["key"]] = Kept(answer, tuple((width, height) for width, height in row["sizes"]), row["inputs"])
        except (ValueError, KeyError, TypeError):
            continue  # cut short by a kill
    return found


def _ends_with_line(path: Path) -> bool:
    with open(path, "rb") as handle:
        handle.seek(-1, os.SEEK_END)
        return handle.read(1) == b"\n"
