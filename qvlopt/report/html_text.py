"""Pieces of an HTML page from foreign text: everything is escaped, controls are spelled out, nothing can act."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any

from qvlopt.report.difference import Side, difference
from qvlopt.report.plain import CONTROL

MOST_TEXT = 1500
"""Characters of a text that a page shows; items.jsonl has all of it."""


def shown(text: str) -> str:
    """`text` as HTML that shows exactly it; line breaks stay, other controls and direction signs are spelled out."""
    lines = (CONTROL.sub(lambda match: match.group().encode("unicode_escape").decode("ascii"), line) for line in text.split("\n"))
    return html.escape("\n".join(lines), quote=True)


def said(text: str, kind: str = "") -> str:
    """A text block with the reading direction of its own letters; an empty text is said to be one."""
    if not text.strip():
        return f'<span class="note">{"nothing" if not text else "only white space"}</span>'
    return f'<bdi dir="auto" class="said {kind}">{shown(_cut(text))}</bdi>'


def differing(base: str, answer: str) -> tuple[str, str]:
    """Both texts as blocks: what only the base says is marked as deleted, what only the answer says as inserted."""
    pieces = difference(_cut(base), _cut(answer))
    return _marked(pieces, "first", "del", base), _marked(pieces, "second", "ins", answer)


def table(heads: Sequence[str], rows: Sequence[Sequence[str]], *, numbers: Sequence[int] = ()) -> str:
    """A table of cells that are HTML already; the columns `numbers` stand to the right."""
    kinds = ["number" if column in numbers else "text" for column in range(len(heads))]
    head = "".join(f'<th class="{kind}" scope="col">{text}</th>' for kind, text in zip(kinds, heads, strict=True))
    body = "".join("<tr>" + "".join(f'<td class="{kind}">{cell}</td>' for kind, cell in zip(kinds, row, strict=True)) + "</tr>\n" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>\n{body}</tbody></table></div>'


def plain_tables(value: Any, title: str = "") -> list[str]:
    """JSON values as blocks with a table each, whatever their keys: scalars as two columns, lists of objects as rows."""
    if isinstance(value, Mapping):
        scalars = [(shown(_words(key)), _scalar(item)) for key, item in value.items() if not isinstance(item, Mapping | list | tuple)]
        known = [(key, cell) for key, cell in scalars if cell]
        own = [_block(title, table(("figure", "value"), known))] if known else []
        return own + [block for key, item in value.items() if isinstance(item, Mapping | list | tuple) for block in plain_tables(item, _words(key))]
    if not value:
        return []
    if all(isinstance(item, Mapping) for item in value):
        keys = list(dict.fromkeys(key for item in value for key in item))
        return [_block(title, table([shown(_words(key)) for key in keys], [[_scalar(item.get(key)) for key in keys] for item in value]))]
    return [_block(title, f"<ul>{''.join(f'<li>{shown(str(item))}</li>' for item in value)}</ul>")]


def _block(title: str, inner: str) -> str:
    return f"<div>{f'<h3>{shown(title)}</h3>' if title else ''}{inner}</div>"


def _marked(pieces: Sequence[tuple[Side, str]], side: Side, tag: str, whole: str) -> str:
    if not whole.strip():
        return said(whole)
    marked = [shown(text) if piece == "both" else f"<{tag}>{shown(text)}</{tag}>" for piece, text in pieces if piece in ("both", side)]
    return f'<bdi dir="auto" class="said">{"".join(marked)}</bdi>'


def _cut(text: str) -> str:
    return text if len(text) <= MOST_TEXT else f"{text[:MOST_TEXT]}… ({len(text):,} characters)"


def _words(key: str) -> str:
    return str(key).replace("_", " ")


def _scalar(value: Any) -> str:
    """A cell: numbers to five digits, nothing for null, whatever else as text."""
    if value is None:
        return ""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return shown(str(value))
    return f"{value:,}" if isinstance(value, int) else f"{value:.5g}"
