"""Text for terminals, logs and JSON that cannot act: foreign text is shown, never obeyed."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""C0 and C1 controls (escape sequences start with one), line separators, signs that turn the reading direction, halves of
surrogate pairs."""
COMMAND = re.compile(r"^(\s*)(?=::)|(?<=#)(?=#(?:\[|vso\[|teamcity\[))", re.MULTILINE)
"""Where the log of a CI job would take text for a command: `::` at the start of a line, `##[`, `##vso[` and
`##teamcity[` anywhere."""
ACTIVE_IN_JSON = re.compile(rf"(?!\n){CONTROL.pattern}|(?<=#)#(?=\[|vso\[|teamcity\[)")
"""The same inside a JSON document, where only line breaks between its values are left to stand."""
SHORT = 500
"""Characters that people are shown of a text that may be any length; JSON has all of it."""


def safe(text: str, *, keep_lines: bool = False) -> str:
    """`text` as one line (or as its lines) in which control characters are spelled out and no CI command is recognised."""
    lines = text.split("\n") if keep_lines else [text]
    return "\n".join(COMMAND.sub(r"\1\\", CONTROL.sub(_spelled, line)) for line in lines)


def short(text: str) -> str:
    """`text`, or its start and how long it is."""
    return text if len(text) <= SHORT else f"{text[:SHORT]}... ({len(text):,} characters)"


def json_text(value: Any, *, indent: int | None = 2) -> str:
    """One JSON document, readable and in UTF-8's whole range; NaN and infinities become null, which JSON has.

    With `indent` None it is one line. What a terminal or the log of a CI job would obey is there as `\\uXXXX`, so printing
    the document is harmless and reading it gives the text as it was.
    """
    text = json.dumps(finite(value), ensure_ascii=False, indent=indent, allow_nan=False)
    return ACTIVE_IN_JSON.sub(lambda match: f"\\u{ord(match.group()):04x}", text)


def finite(value: Any) -> Any:
    """A copy that strict JSON in UTF-8 can hold: NaN and infinities become null, halves of surrogate pairs are spelled out."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode("utf-8")
    if isinstance(value, Mapping):
        return {finite(str(key)): finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value


def _spelled(match: re.Match[str]) -> str:
    return match.group().encode("unicode_escape").decode("ascii")
