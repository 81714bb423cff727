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


def test_on_a_terminal_there_is_a_bar_that_goes_away() -> None:
    stream = io.StringIO()
    work_on(RichProgress(Console(file=stream, force_terminal=True, width=100)))
    assert "\x1b" in stream.getvalue()
    assert "3/3" in stream.getvalue()


def test_silence(capsys: pytest.CaptureFixture[str]) -> None:
    work_on(SilentProgress())
    assert capsys.readouterr() == ("", "")
