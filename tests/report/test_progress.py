from __future__ import annotations

import io

import pytest
from rich.console import Console

from qvlopt.report.progress import Progress, RichProgress, SilentProgress


def work_on(progress: Progress) -> None:
    progress.start(3, "reading [three] things")
    progress.advance()
    progress.advance(2, text="nearly")
    progress.start(1, "writing")
    progress.advance()
    progress.finish()
    progress.finish()


def test_off_a_terminal_each_piece_of_work_is_one_plain_line() -> None:
    stream = io.StringIO()
    work_on(RichProgress(Console(file=stream)))
    assert stream.getvalue() == "reading [three] things\nwriting\n"


def test_off_a_terminal_long_work_says_now_and_then_how_far_it_is() -> None:
    stream, now = io.StringIO(), [0.0]
    progress = RichProgress(Console(file=stream), clock=lambda: now[0])
    progress.start(100, "evaluate x")
    for _ in range(7):
        now[0] += 10
        progress.advance(10, f"evaluate x, {1:.1f} items/s")
    progress.finish()
    assert stream.getvalue() == "evaluate x\n30 of 100: evaluate x, 1.0 items/s\n60 of 100: evaluate x, 1.0 items/s\n"


def test_on_a_terminal_there_is_a_bar_that_goes_away() -> None:
    stream = io.StringIO()
    work_on(RichProgress(Console(file=stream, force_terminal=True, width=100)))
    assert "\x1b" in stream.getvalue()
    assert "3/3" in stream.getvalue()


def test_silence(capsys: pytest.CaptureFixture[str]) -> None:
    work_on(SilentProgress())
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("is_terminal", [False, True])
def test_a_name_in_what_the_work_is_called_acts_on_no_terminal(is_terminal: bool) -> None:
    stream = io.StringIO()
    progress = RichProgress(Console(file=stream, force_terminal=is_terminal, width=100))
    progress.start(2, "evaluate \x1b]0;title\x07a\n::error::x")
    progress.advance(text="evaluate \x07b")
    progress.finish()
    assert "\\x1b]0;title\\x07a" in stream.getvalue()
    assert "\x07" not in stream.getvalue()
    assert not any(line.lstrip().startswith("::") for line in stream.getvalue().splitlines())
