"""Gathers what a command warns of, from `logging` and `warnings`, shows it on stderr and keeps it for the JSON."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console

from qvlopt.report.plain import safe, short


class Notices(logging.Handler):
    """Shows each record once as one line; `warnings` holds the texts of those from WARNING up."""

    def __init__(self, console: Console, *, level: int) -> None:
        super().__init__(logging.DEBUG)
        self.warnings: list[str] = []
        self._console = console
        self._shown_from = level
        self._seen: set[tuple[int, str]] = set()

    def emit(self, record: logging.LogRecord) -> None:
        text = safe(short(" ".join(record.getMessage().split())))
        if (record.levelno, text) in self._seen:
            return
        self._seen.add((record.levelno, text))
        if record.levelno >= logging.WARNING:
            self.warnings.append(text)
        if record.levelno >= self._shown_from:
            self._console.print(f"{record.levelname.lower()}: {text}", markup=False, highlight=False, soft_wrap=True)


@contextmanager
def gathered(console: Console, *, is_quiet: bool, verbosity: int) -> Iterator[Notices]:
    """Routes every record and warning to one `Notices` while it lasts."""
    level = logging.CRITICAL + 1 if is_quiet else {0: logging.WARNING, 1: logging.INFO}.get(verbosity, logging.DEBUG)
    notices = Notices(console, level=level)
    root, ours = logging.getLogger(), logging.getLogger("qvlopt")
    before = (root.handlers, root.level, ours.level)
    root.handlers = [notices]
    # Other packages tell what they do only to those who ask twice.
    root.setLevel(logging.WARNING if verbosity < 2 else logging.DEBUG)
    ours.setLevel(min(level, logging.WARNING))
    with warnings.catch_warnings():
        # Only the sentence is for people; file and line of the library are not.
        warnings.showwarning = lambda message, *_rest: ours.warning("%s", message)
        try:
            yield notices
        finally:
            root.handlers, root.level, ours.level = before
