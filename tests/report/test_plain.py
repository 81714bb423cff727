from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qvlopt.report.plain import json_text, safe, short


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain text, ümlaut, 漢字, عربي", "plain text, ümlaut, 漢字, عربي"),
        ("\x1b[31mred\x07", "\\x1b[31mred\\x07"),
        ("a\nb\rc\td", "a\\nb\\rc\\td"),
        ("\x9b31m\x85\u2028", "\\x9b31m\\x85\\u2028"),
        ("abc\u202edcba", "abc\\u202edcba"),
        ("\ud800", "\\ud800"),
        ("::error file=a::made up", "\\::error file=a::made up"),
        ("  ::set-output name=x::y", "  \\::set-output name=x::y"),
        ("a::b", "a::b"),
        ("x ##[error]y", "x #\\#[error]y"),
        ("##vso[task.setvariable]a", "#\\#vso[task.setvariable]a"),
        ("## a heading", "## a heading"),
    ],
)
def test_text_is_shown_and_never_obeyed(text: str, shown: str) -> None:
    assert safe(text) == shown


def test_lines_are_kept_when_asked_for() -> None:
    assert safe("a\n::b\n\x1bc", keep_lines=True) == "a\n\\::b\n\\x1bc"


@given(st.text())
def test_no_text_holds_a_control_character_or_a_line_break_afterwards(text: str) -> None:
    shown = safe(text)
    assert shown.isprintable() or not re.search("[\x00-\x1f\x7f-\x9f\u2028\u2029]", shown)
    assert not shown.lstrip().startswith("::")
    shown.encode("utf-8")


LEAVES = st.none() | st.booleans() | st.floats() | st.text()
JSON = st.recursive(LEAVES, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=8)


@given(JSON)
def test_any_value_gives_strict_json_in_utf_8_that_nothing_obeys(value: Any) -> None:
    text = json_text(value)
    text.encode("utf-8")
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e]", text)
    assert "##[" not in text
    json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def test_what_json_lacks_becomes_null() -> None:
    assert json.loads(json_text({"a": float("nan"), "b": (1, float("-inf"))})) == {"a": None, "b": [1, None]}


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("text", ["\x9b31m", "abc\u202edcba", "\x1b]0;x\x07", "##[error]x", "##vso[a]b", "::error::x", "a\u2028b\nc", "漢字 é"])
def test_what_a_terminal_would_obey_is_escaped_in_json_and_reads_back(text: str, indent: int | None) -> None:
    shown = json_text({"said": text}, indent=indent)
    assert json.loads(shown) == {"said": text}
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028\u202e]|##(vso)?\\[", shown)
    assert not any(line.lstrip().startswith("::") for line in shown.splitlines())


def test_a_text_of_any_length_is_shown_by_its_start_and_its_length() -> None:
    assert short("a word") == "a word"
    assert short("x" * 12_345).startswith("xxx")
    assert short("x" * 12_345).endswith("... (12,345 characters)")
    assert len(short("x" * 12_345)) < 1000
