"""Parses `manifest.jsonl` line by line into checked rows; every fault is told with its file and line.

The text is UTF-8 whatever the locale says, with or without a byte order mark, with LF or CRLF; blank lines are skipped.
Half of a surrogate pair, which JSON may spell though it is no character, becomes U+FFFD: no tokenizer or file takes it.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qvlopt.errors import RunError, UsageError

TASKS = ("ocr", "vqa", "doc", "chart", "ocrbench", "grounding", "choice", "text")
KEYS = ("id", "images", "question", "answers", "task", "cluster", "split", "video", "videos", "size", "kind")
"""Keys of a row; `size` and `kind` are for people and not read, `video` and `videos` fail the item by name."""

A_LINE = 'write one object a line, such as {"id": "1", "images": ["a.png"], "question": "What is it?", "answers": ["a cup"]}'
SHOWN = 100
"""Characters of a wrong value in a message."""
HALF = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True)
class Row:
    """One line of a manifest. Texts are as in the file; `task`, `cluster` and `split` are None where it leaves them out."""

    origin: str
    id: str
    images: tuple[str, ...]
    videos: tuple[str, ...]
    question: str
    answers: tuple[str, ...]
    task: str | None
    cluster: str | None
    split: str | None


def read_rows(path: Path, *, columns: Mapping[str, str]) -> list[Row]:
    """Every row of the file. `columns` maps our keys to the file's. Raises RunError with file and line, or when there is no file."""
    unknown = sorted(set(columns) - set(KEYS))
    if unknown:
        raise UsageError(f"columns: unknown key {unknown[0]!r}, expected one of {', '.join(KEYS)}", hint="it maps our keys to the file's")
    try:
        lines = path.read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n")
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror}", hint="give the folder that holds manifest.jsonl, or a .jsonl file") from error
    theirs = {columns.get(key, key): key for key in KEYS}
    return [_row(_parse(line, f"{path}:{number}"), theirs, f"{path}:{number}") for number, line in enumerate(lines, 1) if line.strip()]


def _parse(line: bytes, origin: str) -> dict[str, Any]:
    try:
        value = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise RunError(f"{origin}: byte {error.start + 1} is not UTF-8", hint="save the file as UTF-8") from error
    except (ValueError, RecursionError) as error:
        raise RunError(f"{origin}: not valid JSON: {error}", hint=A_LINE) from error
    if not isinstance(value, dict):
        raise RunError(f"{origin}: expected an object with id, images, question and answers, got {type(value).__name__}", hint=A_LINE)
    return {_whole(key): _whole(item) for key, item in value.items()}


def _whole(value: Any) -> Any:
    """`value` without halves of surrogate pairs in its texts."""
    if isinstance(value, str):
        return HALF.sub("\ufffd", value)
    if isinstance(value, list):
        return [_whole(item) for item in value]
    return {_whole(key): _whole(item) for key, item in value.items()} if isinstance(value, dict) else value


def _row(found: Mapping[str, Any], theirs: Mapping[str, str], origin: str) -> Row:
    for key in found:
        if key not in theirs:
            near = difflib.get_close_matches(key, theirs, n=1)
            hint = f"did you mean {near[0]}?" if near else "map the file's names with columns: {ours: theirs}, or remove the key"
            raise RunError(f"{origin}: unknown key {_shown(key)}, expected one of {', '.join(theirs)}", hint=hint)
    values = {theirs[key]: value for key, value in found.items()}
    task = _optional(values, "task", origin)
    if task is not None and task not in TASKS:
        raise RunError(f"{origin}: task is {_shown(task)}, expected one of {', '.join(TASKS)}", hint="correct or remove the key")
    videos = [values[key] for key in ("video", "videos") if values.get(key) is not None]
    return Row(
        origin=origin,
        id=_identifier(values.get("id"), origin),
        images=_texts(values.get("images"), "images", origin),
        videos=tuple(name for value in videos for name in _texts(value, "videos", origin)),
        question=_question(values.get("question"), origin),
        answers=_texts(values.get("answers"), "answers", origin),
        task=task,
        cluster=_optional(values, "cluster", origin),
        split=_optional(values, "split", origin),
    )


def _identifier(value: object, origin: str) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
        raise RunError(f"{origin}: id is {_shown(value)}, expected text or a whole number", hint="give every row an id of its own")
    return str(value)


def _question(value: object, origin: str) -> str:
    if not isinstance(value, str):
        raise RunError(f"{origin}: question is {_shown(value)}, expected text", hint=A_LINE)
    return value


def _optional(values: Mapping[str, Any], key: str, origin: str) -> str | None:
    value = values.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
        raise RunError(f"{origin}: {key} is {_shown(value)}, expected text", hint="correct or remove the key")
    return str(value)


def _texts(value: object, key: str, origin: str) -> tuple[str, ...]:
    """A text or a list of texts; answers may be whole numbers, or objects with the key `answer` as VQAv2 has them."""
    if value is None:
        return ()
    return tuple(_text(item, key, origin) for item in (value if isinstance(value, list) else [value]))


def _text(item: object, key: str, origin: str) -> str:
    if key == "answers" and isinstance(item, dict):
        item = item.get("answer")
    if isinstance(item, str):
        return item
    if key == "answers" and isinstance(item, int) and not isinstance(item, bool):
        return str(item)
    raise RunError(f"{origin}: {key} holds {_shown(item)}, expected text or a list of texts", hint=A_LINE)


def _shown(value: object) -> str:
    """As Python writes it, shortened: a row may hold a whole book where a word is expected."""
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."
