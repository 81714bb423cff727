"""Tables of plain text: the same rows for a terminal and for a Markdown file."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

from qvlopt.report.plain import safe, short

if TYPE_CHECKING:
    from rich.table import Table as RichTable

ACTIVE = re.compile(r"[\\`*\[\]<>&|~$@#]|(?<!\w)_|_(?!\w)|:(?=[:/])|(?<=:):|(?<=\bwww)\.")
"""What means something to Markdown, HTML or a forge inside a line: marks, mentions, links, commands of a CI log."""


class Column(NamedTuple):
    """A column's heading and where its text stands."""

    title: str
    align: Literal["left", "right"] = "left"


@dataclass(frozen=True)
class Table:
    """Rows of cells, one a column. Foreign text in them is shown, never obeyed."""

    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[str, ...], ...]


def to_rich(table: Table) -> RichTable:
    """For a console; the title stands above, on the left."""
    from rich.table import Table as RichTable
    from rich.text import Text

    shown = RichTable(title=safe(table.title), title_justify="left")
    for title, align in table.columns:
        shown.add_column(title, justify=align, overflow="fold")
    for row in table.rows:
        shown.add_row(*(Text(safe(short(cell))) for cell in row))
    return shown


def to_markdown(table: Table) -> str:
    """A GitHub-flavoured table under a heading; every active character of a cell is spelled as an entity."""
    head = [column.title for column in table.columns]
    rule = ["---:" if column.align == "right" else "---" for column in table.columns]
    rows = [[markdown_text(short(cell)) for cell in row] for row in table.rows]
    lines = [f"| {' | '.join(cells)} |" for cells in (head, rule, *rows)]
    return "\n".join([f"### {markdown_text(table.title)}", "", *lines, ""])


def markdown_text(text: str) -> str:
    """`text` as Markdown that shows exactly it, in one line."""
    return ACTIVE.sub(lambda match: f"&#{ord(match.group())};", safe(text))
