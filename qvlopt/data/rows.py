"""Checks the rows of a set, whatever kind of file they come from; every fault is told with its file and line or row.

Half of a surrogate pair, which JSON may spell though it is no character, becomes U+FFFD: no tokenizer or file takes it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from qvlopt.data.cells import Cell
from qvlopt.errors import RunError

TASKS = ("ocr", "vqa", "doc", "chart", "ocrbench", "grounding", "choice", "text")

A_LINE = 'write one object a line, such as {"id": "1", "images": ["a.png"], "question": "What is it?", "answers": ["a cup"]}'
SHOWN = 100
"""Characters of a wrong value in a message."""
SHORT = 40
"""Characters up to which equal texts share their memory: ten people answer `yes` to 200,000 questions."""
HALF = re.compile("[\ud800-\udfff]")


class Record(NamedTuple):
    """What a file says in one row, by our keys. Paths in `images` are relative to `folder`, unless a Cell stands for them."""

    origin: str
    values: Mapping[str, Any]
    folder: Path


@dataclass(frozen=True, slots=True)
class Row:
    """One checked row. Texts are as in the file; `task`, `cluster`, `split` and others are None where it leaves them out."""

    origin: str
    folder: Path
    id: str
    images: tuple[str, ...] | Cell
    videos: tuple[str, ...]
    question: str
    answers: tuple[str, ...]
    task: str | None
    cluster: str | None
    split: str | None
    stratum: str | None
    dataset: str | None
    choices: tuple[str, ...]


def make_row(record: Record) -> Row:
    """Raises RunError, naming the place, for a value of the wrong kind."""
    origin, values, folder = record
    task = _optional(values, "task", origin)
    if task is not None and task not in TASKS:
        raise RunError(f"{origin}: task is {_shown(task)}, expected one of {', '.join(TASKS)}", hint="correct or remove the key")
    videos = [values[key] for key in ("video", "videos") if values.get(key) is not None]
    images = values.get("images")
    return Row(
        origin=origin,
        folder=folder,
        id=_identifier(values.get("id"), origin),
        images=images if isinstance(images, Cell) else _texts(images, "images", origin),
        videos=tuple(name for value in videos for name in _texts(value, "videos", origin)),
        question=_question(values.get("question"), origin),
        answers=(*_texts(values.get("answers"), "answers", origin), *_boxes(values, origin)),
        task=task,
        cluster=_optional(values, "cluster", origin),
        split=_optional(values, "split", origin),
        stratum=_stratum(values.get("stratum")),
        dataset=_optional(values, "dataset", origin),
        choices=_texts(values.get("choices"), "choices", origin),
    )


def without_halves(value: Any) -> Any:
    """`value` without halves of surrogate pairs in its texts."""
    if isinstance(value, str):
        return HALF.sub("\ufffd", value)
    if isinstance(value, list):
        return [without_halves(item) for item in value]
    return {without_halves(key): without_halves(item) for key, item in value.items()} if isinstance(value, dict) else value


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


def _stratum(value: object) -> str | None:
    """Only groups rows, so any value will do."""
    return None if value is None else "+".join(map(str, value)) if isinstance(value, list) else str(value)


def _texts(value: object, key: str, origin: str) -> tuple[str, ...]:
    """A text or a list of texts; answers may be whole numbers, or objects with the key `answer` as VQAv2 has them."""
    if value is None:
        return ()
    return tuple(_text(item, key, origin) for item in (value if isinstance(value, list) else [value]))


def _text(item: object, key: str, origin: str) -> str:
    if key == "answers" and isinstance(item, dict):
        item = item.get("answer")
    if isinstance(item, str):
        return sys.intern(item) if len(item) <= SHORT else item
    if key in ("answers", "choices") and isinstance(item, int) and not isinstance(item, bool):
        return str(item)
    raise RunError(f"{origin}: {key} holds {_shown(item)}, expected text or a list of texts", hint=A_LINE)


def _boxes(values: Mapping[str, Any], origin: str) -> list[str]:
    """Right boxes as the texts that metrics/grounding.py reads; one box or a list of them."""
    texts = []
    for key, unit in (("box", ""), ("box_xywh", " px"), ("box_1000", " /1000")):
        value = values.get(key)
        if value is None:
            continue
        for box in value if isinstance(value, list) and value and isinstance(value[0], list) else [value]:
            if not _is_box(box):
                raise RunError(f"{origin}: {key} is {_shown(box)}, expected four numbers", hint="see docs/data.md, grounding")
            x, y, right, bottom = box
            # the last pixel of a box of width w that begins at x is x + w - 1 (VLMEvalKit, ScreenSpot)
            corners = [x, y, x + right - 1, y + bottom - 1] if key == "box_xywh" else box
            texts.append(f"[{', '.join(f'{corner:.10g}' for corner in corners)}]{unit}")
    return texts


def _is_box(value: object) -> bool:
    return isinstance(value, list) and len(value) == 4 and all(isinstance(side, int | float) and not isinstance(side, bool) for side in value)


def _shown(value: object) -> str:
    """As Python writes it, shortened: a row may hold a whole book where a word is expected."""
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."
