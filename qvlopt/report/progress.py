"""Progress of long work: a protocol for whoever works, a bar on a terminal, a line elsewhere, or nothing."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichBar

from qvlopt.report.plain import safe


class Progress(Protocol):
    """One piece of work after another: `start`, any number of `advance`, `finish`. A second `start` finishes the first."""

    def start(self, total: int, text: str) -> None:
        """Begins work of `total` steps, called `text`."""

    def advance(self, n: int = 1, text: str | None = None) -> None:
        """`n` more steps are done; `text` replaces what the work is called."""

    def finish(self) -> None:
        """The work is over, done or not. May be called without a `start`."""


class SilentProgress:
    """Shows nothing."""

    def start(self, total: int, text: str) -> None:
        pass

    def advance(self, n: int = 1, text: str | None = None) -> None:
        pass

    def finish(self) -> None:
        pass


EVERY_S = 30.0
"""Seconds between two lines where there is no terminal."""


class RichProgress:
    """A bar on `console` when that is a terminal, else a plain line for each piece of work and one now and then for how far it is."""

    def __init__(self, console: Console, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._clock = clock
        self._bar: RichBar | None = None
        self._done = self._total = 0
        self._told = 0.0

    def start(self, total: int, text: str) -> None:
        self.finish()
        self._done, self._total, self._told = 0, total, self._clock()
        if not self._console.is_terminal:
            self._console.print(safe(text), markup=False, highlight=False, soft_wrap=True)
            return
        columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self._bar = RichBar(*columns, console=self._console, transient=True, redirect_stdout=False, redirect_stderr=False)
        self._bar.add_task(safe(text), total=total)
        self._bar.start()

    def advance(self, n: int = 1, text: str | None = None) -> None:
        self._done += n
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], advance=n, description=None if text is None else safe(text))
        elif not self._console.is_terminal and self._clock() - self._told >= EVERY_S:
            self._told = self._clock()
            shown = f"{self._done} of {self._total}" + (f": {text}" if text else "")
            self._console.print(safe(shown), markup=False, highlight=False, soft_wrap=True)

    def finish(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
