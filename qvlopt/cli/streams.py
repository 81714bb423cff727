"""What the command line writes to, whatever becomes of those who read it.

Results on stdout: a reader that has gone (`| head`) is no failure, a disk that is full is. What is said on stderr is said
if that can be done, and never ends the work.
"""

from __future__ import annotations

import io
import os
import sys
from typing import TextIO, cast

from rich.console import Console

WIDTH_OFF_TERMINAL = 140
"""Columns of tables in a file, pipe or CI log, where there is no width to fit."""


class Unread(io.TextIOBase):
    """A stream that nobody needs to read: what it cannot take is dropped."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._stream.encoding

    def isatty(self) -> bool:
        return self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()

    def write(self, text: str) -> int:
        try:
            self._stream.write(text)
            self._stream.flush()
        except (OSError, ValueError):  # ValueError: closed
            sys.stderr = self._stream = _nowhere()
        return len(text)


class ResultConsole(Console):
    """Rich ends the whole process with status 1 when the reader has gone; here the caller learns of it and decides."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def prepare_stdout(*, is_json: bool) -> None:
    """JSON is UTF-8 whatever the locale says; in text, what the locale's encoding lacks is spelled out."""
    if not isinstance(sys.stdout, io.TextIOWrapper):
        return
    if is_json:
        sys.stdout.reconfigure(encoding="utf-8")
    else:
        sys.stdout.reconfigure(errors="backslashreplace")


def give_up_stdout() -> None:
    """Leaves a stdout that cannot be written, so that Python does not try once more at exit."""
    sys.stdout = _nowhere()


def result_console() -> Console:
    """For results, on stdout."""
    console = ResultConsole(highlight=False, markup=False, emoji=False, force_terminal=_is_terminal(sys.stdout))
    if not console.is_terminal:
        console.width = WIDTH_OFF_TERMINAL
    return console


def error_console() -> Console:
    """For progress, warnings and failures, on stderr."""
    stream = None if sys.stderr is None else cast(TextIO, Unread(sys.stderr))
    return Console(file=stream, stderr=True, highlight=False, force_terminal=_is_terminal(sys.stderr))


def _is_terminal(stream: TextIO | None) -> bool:
    """FORCE_COLOR and the like, which CI systems set for everybody, do not make a terminal of a pipe."""
    return stream is not None and stream.isatty()


def _nowhere() -> TextIO:
    return open(os.devnull, "w")
