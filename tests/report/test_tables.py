"""One table for people on a terminal and in Markdown; foreign text is shown and never acts."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from qvlopt.report.tables import Column, Table, markdown_text, to_markdown, to_rich

TABLE = Table("Scores", (Column("set"), Column("n", "right")), (("ocr", "300"), ("vqa", "7")))


def printed(table: Table) -> str:
    console = Console(file=io.StringIO(), width=100)
    console.print(to_rich(table))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_rows_stand_in_both_forms() -> None:
    text = printed(TABLE)
    assert "Scores" in text
    assert "│ ocr │ 300 │" in text
    assert "│ vqa │   7 │" in text
    assert to_markdown(TABLE) == "### Scores\n\n| set | n |\n| --- | ---: |\n| ocr | 300 |\n| vqa | 7 |\n"


@pytest.mark.parametrize("hostile", ["\x1b[31mred\x1b[0m", "[bold]x[/bold]", "a\nb", "[link=http://x]y[/link]", "\u202eevil"])
def test_foreign_text_neither_styles_nor_breaks_the_terminal(hostile: str) -> None:
    text = printed(Table("t", (Column("a"),), ((hostile,),)))
    assert "\x1b" not in text
    assert "\u202e" not in text
    assert len(text.splitlines()) == 6
    if hostile.startswith("["):
        assert hostile in text


@pytest.mark.parametrize(
    "hostile", ["a|b", "<script>", "`x`", "![x](http://y)", "@someone", "a\nb", "::error::x", "https://x.y", "www.x.y", "&lt;", "__x__", "*x*", "#1"]
)
def test_foreign_text_is_no_markdown(hostile: str) -> None:
    text = markdown_text(hostile)
    assert not set(text) & set("|<>`[]@*\n")
    assert "www." not in text
    assert "://" not in text
    assert "::" not in text
    line = to_markdown(Table("t", (Column("a"), Column("b")), ((hostile, "x"),))).splitlines()[-1]
    assert line.count("|") == 3


def test_plain_words_and_numbers_stay_readable() -> None:
    assert markdown_text("ocr exact_match: +1.25 points (n = 38), -0.5!") == "ocr exact_match: +1.25 points (n = 38), -0.5!"


def test_a_cell_that_holds_a_book_is_shortened() -> None:
    book = Table("t", (Column("a"),), (("word " * 50_000,),))
    assert len(to_markdown(book)) < 2000
    stream = io.StringIO()
    Console(file=stream, width=200).print(to_rich(book))
    assert "250,000 characters" in " ".join(stream.getvalue().split())
