"""Runs one command from its call to the exit status: streams, warnings, failures, interrupts and the JSON document."""

from __future__ import annotations

import errno
import os
import shlex
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any, NamedTuple

from rich.console import Console

from qvlopt import __version__
from qvlopt.api import Result
from qvlopt.cli.notices import gathered
from qvlopt.cli.options import Voice
from qvlopt.cli.streams import error_console, give_up_stdout, prepare_stdout, result_console
from qvlopt.errors import Problem, QvloptError, RecipeProblems
from qvlopt.report.plain import json_text, safe
from qvlopt.report.progress import Progress, RichProgress, SilentProgress

SCHEMA_VERSION = 1
INTERRUPTED = 130
INTERNAL = 5
DISK_FULL = {errno.ENOSPC: "the disk is full", errno.EDQUOT: "the disk quota is used up", errno.EFBIG: "a file became larger than allowed"}


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
    prepare_stdout(is_json=voice.json)
    errors = error_console()
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
    if isinstance(error, OSError) and error.errno in DISK_FULL:
        return Failure(INTERNAL, DISK_FULL[error.errno], "free some space, or write elsewhere with --output", (), details)
    if isinstance(error, OSError) and error.filename and error.strerror:
        said = f"{error.filename}: {error.strerror}"
        return Failure(INTERNAL, said, "check that it is there and that you may read and write it", (), details)
    if isinstance(error, FileNotFoundError) and not error.filename:
        return Failure(INTERNAL, "the working directory does not exist any more", "change to one that does", (), details)
    if isinstance(error, MemoryError):
        return Failure(INTERNAL, "not enough memory", "use a smaller batch or fewer samples", (), details)
    said = " ".join(str(error).split())
    message = f"{type(error).__name__}: {said}" if said else type(error).__name__
    return Failure(INTERNAL, message, "not expected: run again with -v for the traceback", (), details)


def stdout_lost(error: OSError, exit_code: int) -> int:
    """The status of a command, which ended with `exit_code`, when stdout cannot be written."""
    give_up_stdout()
    if isinstance(error, BrokenPipeError):  # the reader (`| head`) has gone; the work is done all the same
        return exit_code
    _print_failure(failure_of(error, ()), error_console(), Voice())
    return INTERNAL


def resume_hint(argv: Sequence[str]) -> str | None:
    """The command line that goes on where this one was interrupted; None for `inspect`, which keeps nothing.

    With --overwrite it is the same command again, which leaves alone what it has finished.
    """
    if not argv or argv[0] == "inspect":
        return None
    command, *words = [word for word in argv if word != "--resume"]
    ways = [] if "--overwrite" in words else ["--resume"]
    return f"go on with: {shlex.join([*_program(), command, *ways, *words])}"


def _program() -> list[str]:
    """How to start qvlopt again: its plain name if the shell finds this very program by it."""
    started = sys.argv[0]
    if started.endswith(os.path.join("qvlopt", "__main__.py")):
        return [sys.executable, "-m", "qvlopt"]
    return ["qvlopt"] if os.path.basename(started) != "qvlopt" or shutil.which("qvlopt") == started else [started]


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
        _show(command, outcome, voice)
    except OSError as error:
        return stdout_lost(error, outcome.exit_code)
    except Exception as error:
        failed = replace(outcome, result=None, failure=failure_of(error, ()))
        return INTERNAL if outcome.failure else _print(command, failed, voice, errors)
    return outcome.exit_code


def _show(command: str, outcome: Outcome, voice: Voice) -> None:
    if sys.stdout is None:  # closed by whoever started us: nobody listens
        return
    if voice.json:
        sys.stdout.write(json_text(document(command, outcome)) + "\n")
    elif outcome.result is not None:
        outcome.result.render(result_console())
    sys.stdout.flush()


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
