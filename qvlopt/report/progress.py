"""Progress of long work: a protocol for whoever works, a bar on a terminal, a line elsewhere, or nothing."""

from __future__ import annotations

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


class RichProgress:
    """A bar on `console` when that is a terminal, else one plain line for each piece of work."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar: RichBar | None = None

    def start(self, total: int, text: str) -> None:
        self.finish()
        if not self._console.is_terminal:
            self._console.print(safe(text), markup=False, highlight=False, soft_wrap=True)
            return
        columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self._bar = RichBar(*columns, console=self._console, transient=True, redirect_stdout=False, redirect_stderr=False)
        self._bar.add_task(safe(text), total=total)
        self._bar.start()

    def advance(self, n: int = 1, text: str | None = None) -> None:
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], advance=n, description=None if text is None else safe(text))

    def finish(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
