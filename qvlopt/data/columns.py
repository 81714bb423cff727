"""What a row may hold, and the names that published sets give to it.

Schemas: the cards of VQAv2, TextVQA, DocVQA, InfographicVQA, ChartQA, OCRBench and OCRBench v2 on the hub, and the TSV files of
VLMEvalKit. docs/data.md shows one row of each.
"""

from __future__ import annotations

import difflib
import string
from collections.abc import Iterable, Mapping

from qvlopt.errors import RunError, UsageError

KEYS = ("id", "images", "question", "answers", "task", "cluster", "split", "video", "videos", "stratum", "dataset", "choices")
BOXES = ("box", "box_xywh", "box_1000")
"""Right boxes of grounding items: corners in pixels or fractions; corner and size in pixels; corners in thousandths."""

UNREAD = ("size", "kind")
"""Keys of our own manifests that are for people."""

ALIASES: Mapping[str, tuple[str, ...]] = {
    "id": ("question_id", "questionId", "index"),
    "images": ("image", "image_path", "imgname"),
    "question": ("query",),
    "answers": ("answer", "label", "labels"),
    "stratum": ("answer_type", "question_type", "human_or_machine", "type", "category", "question_types"),
    "dataset": ("dataset_name",),
    "choices": ("options",),
    "box": ("bbox",),
}
"""Names that are taken where our own is not there, the first one found."""

TEXTVQA = ("question_tokens", "image_id", "image_width", "image_height", "flickr_original_url", "flickr_300k_url", "image_classes")
DOCUMENTS = ("docId", "ucsf_document_id", "ucsf_document_page_no", "data_split", "image_url", "ocr", "operation/reasoning")
OTHERS = ("set_name", "ocr_tokens", "multiple_choice_answer", "eval", "bbox_list", "content", "hint")
IGNORED = frozenset((*TEXTVQA, *DOCUMENTS, *OTHERS))
"""Columns of the published sets that say nothing we read; in a manifest they are no mistake."""

LETTERS = string.ascii_uppercase
"""Columns of VLMEvalKit's files with the options of a choice: A, B, ... without a gap."""


def check_columns(columns: Mapping[str, str]) -> None:
    """Raises UsageError for a recipe's `columns` that map a key which no row has."""
    unknown = sorted(set(columns) - {*KEYS, *BOXES})
    if unknown:
        expected = ", ".join((*KEYS, *BOXES))
        raise UsageError(f"columns: unknown key {unknown[0]!r}, expected one of {expected}", hint="it maps our keys to the file's")


def names_of(key: str, columns: Mapping[str, str]) -> tuple[str, ...]:
    """The file's names for one of our keys, in the order in which they are looked for; `columns` leaves only one."""
    return (columns[key],) if key in columns else (key, *ALIASES.get(key, ()))


def found_names(present: Iterable[str], columns: Mapping[str, str]) -> dict[str, str]:
    """Our keys with the names that the file has for them."""
    there = set(present)
    candidates = {key: next((name for name in names_of(key, columns) if name in there), None) for key in (*KEYS, *BOXES)}
    return {key: name for key, name in candidates.items() if name is not None}


def check_table(present: Iterable[str], columns: Mapping[str, str], where: str) -> dict[str, str]:
    """`found_names` of a table, whose columns hold for every row. Raises UsageError for a mapped name that is
    not there and RunError without a column for the question, with the columns that it has.
    """
    there = list(present)
    for key, name in columns.items():
        if name not in there:
            raise UsageError(f"{where}: there is no column {name!r} for {key}; columns: {', '.join(there)}", hint="correct the entry's columns")
    found = found_names(there, columns)
    if "question" not in found:
        expected = ", ".join(names_of("question", {}))
        hint = "map the set's names with the entry's columns, such as {question: prompt, answers: target}"
        raise RunError(f"{where}: no column for the question ({expected}); columns: {', '.join(there)}", hint=hint)
    return found


def check_keys(present: Iterable[str], columns: Mapping[str, str], origin: str) -> None:
    """A manifest's own line has no unknown keys, since a misspelt one would silently be left out. Raises RunError."""
    aliases = (name for names in ALIASES.values() for name in names)
    known = {*KEYS, *BOXES, *UNREAD, *aliases, *IGNORED, *columns.values()}
    for key in present:
        if key not in known and not (len(key) == 1 and key in LETTERS):
            near = difflib.get_close_matches(key, (*KEYS, *BOXES), n=1)
            hint = f"did you mean {near[0]}?" if near else "map the file's names with columns: {ours: theirs}, or remove the key"
            shown = repr(key) if len(key) <= 100 else f"{key[:100]!r}..."
            raise RunError(f"{origin}: unknown key {shown}, expected one of {', '.join((*KEYS, *BOXES))}", hint=hint)


def lettered(values: Mapping[str, object]) -> list[object]:
    """The options in columns A, B, ... up to the first that is missing or empty."""
    options = []
    for letter in LETTERS:
        if values.get(letter) in (None, ""):
            break
        options.append(values[letter])
    return options
