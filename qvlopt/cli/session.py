"""Runs one command from its call to the exit status: streams, warnings, failures, interrupts and the JSON document."""

from __future__ import annotations

import errno
import os
import shlex
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from types import FrameType
from typing import Any, NamedTuple

from rich.console import Console

from qvlopt import __version__
from qvlopt.api import Result
from qvlopt.cli.notices import gathered
from qvlopt.cli.options import Voice
from qvlopt.errors import Problem, QvloptError, RecipeProblems
from qvlopt.report.plain import json_text, safe
from qvlopt.report.progress import Progress, RichProgress, SilentProgress

SCHEMA_VERSION = 1
INTERRUPTED = 130
INTERNAL = 5
WIDTH_OFF_TERMINAL = 140
"""Columns of tables in a file, pipe or CI log, where there is no width to fit."""


class Failure(NamedTuple):
    """Why a command did not end well: one line, what to do, and with `-v` where it happened."""

    exit_code: int
    message: str
    hint: str | None
    problems: Sequence[Problem] = ()
    details: str = ""

    def to_json(self) -> dict[str, Any]:
        problems = [problem._asdict() for problem in self.problems]
        return {"message": self.message, "hint": self.hint, "problems": problems}


@dataclass(frozen=True)
class Outcome:
    """How a command ended: a result, or a failure."""

    result: Result | None
    failure: Failure | None
    warnings: list[str]
    seconds: float

    @property
    def exit_code(self) -> int:
        return self.failure.exit_code if self.failure else self.result.exit_code if self.result else 0


def perform(command: str, work: Callable[[Progress], Result], voice: Voice, argv: Sequence[str]) -> int:
    """Does `work`, prints what it gave and returns the exit status. Raises nothing."""
    errors = Console(stderr=True, highlight=False)
    started = time.perf_counter()
    result, failure = None, None
    progress = SilentProgress() if voice.quiet else RichProgress(errors)
    with gathered(errors, is_quiet=voice.quiet, verbosity=voice.verbose) as notices:
        try:
            # Whatever a library prints belongs on stderr: stdout is for the result alone.
            with redirect_stdout(sys.stderr), _sigterm_as_interrupt():
                result = work(progress)
        except (Exception, KeyboardInterrupt, SystemExit) as error:
            failure = failure_of(error, argv)
        finally:
            progress.finish()
    outcome = Outcome(result, failure, notices.warnings, time.perf_counter() - started)
    return _print(command, outcome, voice, errors)


def failure_of(error: BaseException, argv: Sequence[str]) -> Failure:
    """What to tell about an exception; anything but our own errors and Ctrl-C is status 5, whatever it is."""
    details = "".join(traceback.format_exception(error))
    if isinstance(error, RecipeProblems):
        return Failure(error.exit_code, error.message, error.hint, error.problems, details)
    if isinstance(error, QvloptError):
        return Failure(error.exit_code, error.message, error.hint, (), details)
    if isinstance(error, KeyboardInterrupt):
        return Failure(INTERRUPTED, "interrupted; finished work is kept", resume_hint(argv), (), details)
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return Failure(INTERNAL, "the disk is full", "free some space, or write elsewhere with --output", (), details)
    if isinstance(error, OSError) and error.filename and error.strerror:
        said = f"{error.filename}: {error.strerror}"
        return Failure(INTERNAL, said, "check that it is there and that you may read and write it", (), details)
    if isinstance(error, MemoryError):
        return Failure(INTERNAL, "not enough memory", "use a smaller batch or fewer samples", (), details)
    said = " ".join(str(error).split())
    message = f"{type(error).__name__}: {said}" if said else type(error).__name__
    return Failure(INTERNAL, message, "not expected: run again with -v for the traceback", (), details)


def resume_hint(argv: Sequence[str]) -> str | None:
    """The command line that goes on where this one was interrupted; None for `inspect`, which keeps nothing."""
    if "inspect" in argv[:1]:
        return None
    kept = [word for word in argv if word not in ("--overwrite", "--resume")]
    return f"go on with: {shlex.join(['qvlopt', *kept, '--resume'])}"


def document(command: str, outcome: Outcome) -> dict[str, Any]:
    """The one JSON document of a command: the common keys, then the result's, or `error`."""
    from qvlopt.artifact.process import peak_rss_bytes

    common = {
        "schema_version": SCHEMA_VERSION,
        "tool": "qvlopt",
        "version": __version__,
        "command": command,
        "exit_code": outcome.exit_code,
        "seconds": round(outcome.seconds, 3),
        "peak_rss_bytes": peak_rss_bytes(),
        "output": None,
        "warnings": outcome.warnings,
    }
    if outcome.failure is not None:
        return common | {"error": outcome.failure.to_json()}
    return common | (outcome.result.to_json() if outcome.result else {})


def _print(command: str, outcome: Outcome, voice: Voice, errors: Console) -> int:
    if outcome.failure is not None:
        _print_failure(outcome.failure, errors, voice)
    try:
        if voice.json:
            sys.stdout.write(json_text(document(command, outcome)) + "\n")
        elif outcome.result is not None:
            outcome.result.render(_console())
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader (`| head`) has gone; the work is done all the same. Python must not try to flush again at exit.
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    except Exception as error:
        failure = failure_of(error, ())
        _print_failure(failure, errors, voice)
        return failure.exit_code
    return outcome.exit_code


def _console() -> Console:
    console = Console(highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = WIDTH_OFF_TERMINAL
    return console


def _print_failure(failure: Failure, errors: Console, voice: Voice) -> None:
    if voice.verbose and failure.details:
        errors.print(safe(failure.details, keep_lines=True), markup=False, soft_wrap=True)
    lines = [safe(line) for line in failure.message.splitlines()]
    hint = [f"  {safe(failure.hint)}"] if failure.hint else []
    errors.print("\n".join([f"error: {lines[0]}", *(f"  {line}" for line in lines[1:]), *hint]), markup=False, soft_wrap=True)


@contextmanager
def _sigterm_as_interrupt() -> Iterator[None]:
    """SIGTERM ends a command as Ctrl-C does: cleaned up, status 130. No effect off the main thread."""

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    try:
        before = signal.signal(signal.SIGTERM, interrupt)
    except ValueError:
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
