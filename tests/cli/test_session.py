"""One command from call to exit status: streams, warnings, failures and the JSON document."""

from __future__ import annotations

import io
import json
import logging
import os
import shlex
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from rich.console import Console

from qvlopt import api
from qvlopt.cli.app import _status
from qvlopt.cli.session import resume_hint
from qvlopt.errors import NotComparableError, Problem, RecipeProblems, RunError, UsageError
from qvlopt.report.progress import Progress
from tests.documents import check_document


@dataclass
class FakeResult:
    """A finished calibrate: numbers that a schema accepts, one line of output."""

    exit_code: int = 0
    extra: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {"output": "out/x", "samples": 1, "images": 1, "tokens": 4, "layers": 2, "skipped": [], "digest": "ab"} | self.extra

    def render(self, console: Console) -> None:
        console.print("two layers")


Work = Callable[[dict[str, Any]], FakeResult]


@pytest.fixture
def calibrate(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Runs `qvlopt calibrate WORDS` with `work` in place of the command; status, stdout and stderr come back."""

    def called(work: Work, *words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(api, "calibrate", lambda recipe, **given: work({"recipe": recipe, **given}))
        status = _status(["calibrate", *words])
        return status, *capsys.readouterr()

    return called


def raising(error: BaseException) -> Work:
    def work(_given: dict[str, Any]) -> FakeResult:
        raise error

    return work


def test_a_result_goes_to_stdout_and_nothing_else_does(calibrate: Callable[..., tuple[int, str, str]]) -> None:
    def work(given: dict[str, Any]) -> FakeResult:
        print("a library chats")
        progress: Progress = given["progress"]
        progress.start(2, "calibrating 2 layers")
        progress.advance()
        logging.getLogger("qvlopt.x").warning("a layer saw little")
        return FakeResult()

    assert calibrate(work) == (0, "two layers\n", "a library chats\ncalibrating 2 layers\nwarning: a layer saw little\n")


def test_quiet_leaves_the_result_alone(calibrate: Callable[..., tuple[int, str, str]]) -> None:
    def work(given: dict[str, Any]) -> FakeResult:
        given["progress"].start(2, "calibrating")
        logging.getLogger("qvlopt.x").warning("a layer saw little")
        return FakeResult()

    assert calibrate(work, "--quiet") == (0, "two layers\n", "")


def test_json_is_one_document_with_the_warnings_in_it(calibrate: Callable[..., tuple[int, str, str]]) -> None:
    def work(_given: dict[str, Any]) -> FakeResult:
        logging.getLogger("qvlopt.x").warning("a layer\nsaw little")
        warnings.warn("soon gone", DeprecationWarning, stacklevel=1)
        warnings.warn("be careful", UserWarning, stacklevel=1)
        return FakeResult(extra={"worst": float("nan")})

    status, out, _ = calibrate(work, "--json")
    document = json.loads(out)
    check_document(document)
    assert (status, document["exit_code"], document["command"], document["output"]) == (0, 0, "calibrate", "out/x")
    assert document["warnings"][0] == "a layer saw little"
    assert "be careful" in document["warnings"]
    assert document["worst"] is None


def test_a_warning_is_shown_once(calibrate: Callable[..., tuple[int, str, str]]) -> None:
    def work(_given: dict[str, Any]) -> FakeResult:
        for _ in range(3):
            logging.getLogger("qvlopt.x").warning("again")
        return FakeResult()

    assert calibrate(work)[2] == "warning: again\n"


@pytest.mark.parametrize(
    ("words", "shown"),
    [((), ""), (("-v",), "info: layer 1 of 2\n"), (("-v", "-v"), "info: layer 1 of 2\ndebug: a detail\ninfo: another package\n")],
)
def test_information_is_shown_when_asked_for(calibrate: Callable[..., tuple[int, str, str]], words: tuple[str, ...], shown: str) -> None:
    def work(_given: dict[str, Any]) -> FakeResult:
        logging.getLogger("qvlopt.x").info("layer 1 of 2")
        logging.getLogger("qvlopt.x").debug("a detail")
        logging.getLogger("another").info("another package")
        return FakeResult()

    assert calibrate(work, *words)[2] == shown


def test_logging_is_as_before_after_a_command(calibrate: Callable[..., tuple[int, str, str]]) -> None:
    root = logging.getLogger()
    before = (root.handlers[:], root.level, logging.getLogger("qvlopt").level)
    calibrate(lambda _given: FakeResult(), "-v", "-v")
    assert (root.handlers, root.level, logging.getLogger("qvlopt").level) == before


@pytest.mark.parametrize("code", [0, 1, 3, 4, 5])
def test_the_status_is_the_results(calibrate: Callable[..., tuple[int, str, str]], code: int) -> None:
    status, out, _ = calibrate(lambda _given: FakeResult(exit_code=code), "--json")
    assert (status, json.loads(out)["exit_code"]) == (code, code)


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (UsageError("no such key", "look here"), 2, "error: no such key\n  look here\n"),
        (NotComparableError("no baseline"), 4, "error: no baseline\n"),
        (RunError("a shard is missing"), 5, "error: a shard is missing\n"),
        (RecipeProblems([Problem("r.yaml:3", "a: bad"), Problem("r.yaml:4", "b: bad")]), 2, "r.yaml:3: a: bad\n  r.yaml:4: b: bad\n"),
        (FileNotFoundError(2, "No such file or directory"), 5, "error: the working directory does not exist any more\n"),
        (MemoryError(), 5, "error: not enough memory\n"),
        (PermissionError(13, "Permission denied", "out"), 5, "error: out: Permission denied\n  check that it is there"),
        (OSError(28, "No space left on device"), 5, "error: the disk is full\n  free some space, or write elsewhere with --output\n"),
        (OSError(27, "File too large", "out"), 5, "error: a file became larger than allowed\n"),
        (ValueError("two\nlines"), 5, "error: ValueError: two lines\n"),
        (SystemExit(1), 5, "error: SystemExit: 1\n"),
        (AssertionError(), 5, "error: AssertionError\n"),
    ],
)
def test_every_failure_is_short_and_has_its_status(
    calibrate: Callable[..., tuple[int, str, str]], error: BaseException, code: int, said: str
) -> None:
    status, out, err = calibrate(raising(error))
    assert (status, out) == (code, "")
    assert said in err
    assert "Traceback" not in err


def test_a_failure_in_json_is_one_document_too(calibrate: Callable[..., tuple[int, str, str]]) -> None:
    status, out, err = calibrate(raising(RecipeProblems([Problem("r.yaml:3", "a: bad")])), "--json")
    document = json.loads(out)
    check_document(document)
    assert (status, document["exit_code"]) == (2, 2)
    assert document["error"]["problems"] == [{"where": "r.yaml:3", "message": "a: bad"}]
    assert err.startswith("error: 1 problem in the recipe")


def test_verbose_shows_where_a_failure_happened(calibrate: Callable[..., tuple[int, str, str]]) -> None:
    err = calibrate(raising(ValueError("odd")), "-v")[2]
    assert "Traceback" in err
    assert "test_session.py" in err


def test_a_result_that_cannot_be_shown_is_status_5(calibrate: Callable[..., tuple[int, str, str]]) -> None:
    class Unshowable(FakeResult):
        def render(self, console: Console) -> None:
            raise KeyError("table", console)

    status, _, err = calibrate(lambda _given: Unshowable())
    assert status == 5
    assert "KeyError" in err


def test_a_result_that_is_no_json_is_one_document_too(calibrate: Callable[..., tuple[int, str, str]]) -> None:
    status, out, err = calibrate(lambda _given: FakeResult(extra={"odd": object()}), "--json")
    document = json.loads(out)
    check_document(document)
    assert (status, document["exit_code"]) == (5, 5)
    assert "TypeError" in document["error"]["message"]
    assert "TypeError" in err


@pytest.mark.parametrize("words", [(), ("--json",)])
def test_a_stdout_that_cannot_be_written_is_status_5_and_no_traceback(words: tuple[str, ...]) -> None:
    done = _in_a_process("json.dumps", *words, stdout="/dev/full")
    assert done.returncode == 5
    assert done.stderr.decode() == "error: the disk is full\n  free some space, or write elsewhere with --output\n"


@pytest.mark.parametrize("words", [["--help"], ["--version"], ["run", "--help"]])
def test_help_that_cannot_be_written_is_status_5_and_no_traceback(words: list[str]) -> None:
    done = subprocess.run(["/bin/sh", "-c", f"exec {sys.executable} -m qvlopt {shlex.join(words)} > /dev/full"], capture_output=True, check=False)
    assert (done.returncode, done.stderr.decode().splitlines()[0]) == (5, "error: the disk is full")


@pytest.mark.parametrize(("command", "status"), [("--help", 0), ("inspect builtin:nano", 0), ("inspect builtin:nano --json", 0), ("inspect none", 2)])
def test_a_reader_that_has_gone_changes_no_status(command: str, status: int) -> None:
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run([sys.executable, "-m", "qvlopt", *command.split()], stdout=write, stderr=write, check=False)
    os.close(write)
    assert done.returncode == status


def test_a_stderr_that_cannot_be_written_ends_no_work(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    class Full(io.StringIO):
        def write(self, _text: str) -> int:
            raise OSError(28, "No space left on device")

    def work(_recipe: str, **given: Any) -> FakeResult:
        given["progress"].start(2, "calibrating")
        logging.getLogger("qvlopt.x").warning("a layer saw little")
        return FakeResult()

    monkeypatch.setattr(api, "calibrate", work)
    monkeypatch.setattr(sys, "stderr", Full())
    assert _status(["calibrate", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["warnings"] == ["a layer saw little"]


@pytest.mark.parametrize("words", [(), ("--json",)])
def test_a_locale_without_the_signs_changes_nothing_but_the_signs(words: tuple[str, ...]) -> None:
    done = _in_a_process(ascii("扫 é"), *words)
    assert (done.returncode, done.stderr) == (0, b"")
    if words:
        assert json.loads(done.stdout.decode("utf-8"))["output"] == "扫 é"
    else:
        assert done.stdout == b"\\u626b \\xe9\n"


def test_what_ci_systems_set_makes_no_terminal_of_a_pipe() -> None:
    done = _in_a_process("'x'", FORCE_COLOR="1", GITHUB_ACTIONS="true", TTY_COMPATIBLE="1", TTY_INTERACTIVE="1")
    assert b"\x1b" not in done.stdout + done.stderr


def _in_a_process(said: str, *words: str, stdout: str | None = None, **environment: str) -> subprocess.CompletedProcess[bytes]:
    """`qvlopt calibrate WORDS` that gives one text, in a process with an ASCII locale."""
    program = (
        "import json, sys\n"
        "from qvlopt import api\n"
        "from qvlopt.cli.app import main\n"
        "class Result:\n"
        "    exit_code = 0\n"
        f"    def to_json(self): return {{'output': str({said})}}\n"
        f"    def render(self, console): console.print({said}, style='bold red')\n"
        "api.calibrate = lambda recipe, **given: Result()\n"
        f"main(['calibrate', *{list(words)!r}])\n"
    )
    variables = os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"} | environment
    with open(stdout or os.devnull, "wb") as target:
        stream = target if stdout else subprocess.PIPE
        return subprocess.run([sys.executable, "-c", program], env=variables, stdout=stream, stderr=subprocess.PIPE, check=False)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_is_130_and_prints_the_command_that_goes_on(calibrate: Callable[..., tuple[int, str, str]], number: int) -> None:
    def work(_given: dict[str, Any]) -> FakeResult:
        os.kill(os.getpid(), number)
        signal.pause()
        return FakeResult()

    status, out, err = calibrate(work, "--set", "name=a b")
    assert (status, out) == (130, "")
    assert "go on with: qvlopt calibrate --resume --set 'name=a b'\n" in err


@pytest.mark.parametrize(
    ("typed", "resumed"),
    [
        (["evaluate", "--resume", "a b"], "evaluate --resume 'a b'"),
        (["evaluate", "--", "-odd-"], "evaluate --resume -- -odd-"),
        (["run", "--overwrite", "--json"], "run --overwrite --json"),
    ],
)
def test_the_command_that_goes_on_is_one_that_can(typed: list[str], resumed: str) -> None:
    assert resume_hint(typed) == f"go on with: qvlopt {resumed}"


@pytest.mark.parametrize(
    ("started", "program"),
    [("/x/qvlopt/__main__.py", [sys.executable, "-m", "qvlopt"]), ("/not/on the/path/qvlopt", ["/not/on the/path/qvlopt"]), ("pytest", ["qvlopt"])],
)
def test_the_command_that_goes_on_starts_the_same_program(monkeypatch: pytest.MonkeyPatch, started: str, program: list[str]) -> None:
    monkeypatch.setattr(sys, "argv", [started])
    assert resume_hint(["run"]) == f"go on with: {shlex.join([*program, 'run', '--resume'])}"


def test_inspect_keeps_nothing_to_go_on_with() -> None:
    assert resume_hint(["inspect", "x"]) is None


def test_sigterm_is_as_before_after_a_command(calibrate: Callable[..., tuple[int, str, str]]) -> None:
    before = signal.getsignal(signal.SIGTERM)
    calibrate(lambda _given: FakeResult())
    assert signal.getsignal(signal.SIGTERM) is before


def test_foreign_text_reaches_no_terminal_unescaped(calibrate: Callable[..., tuple[int, str, str]]) -> None:
    def work(_given: dict[str, Any]) -> FakeResult:
        logging.getLogger("qvlopt.x").warning("\x1b[31mred [bold]plain[/bold]")
        raise RunError("\x1b]0;title\x07\r::error::made up")

    err = calibrate(work)[2]
    assert "\x1b" not in err
    assert "\r" not in err
    assert "[bold]plain[/bold]" in err


def test_the_options_reach_the_api(calibrate: Callable[..., tuple[int, str, str]]) -> None:
    seen: dict[str, Any] = {}

    def work(given: dict[str, Any]) -> FakeResult:
        seen.update(given)
        return FakeResult()

    words = "--recipe 4090d --set a.b=1 --set c=2 --model m --output o --overwrite --resume --dry-run --threads 2"
    assert calibrate(work, *words.split())[0] == 0
    del seen["progress"]
    assert seen == {
        "recipe": "4090d",
        "settings": ["a.b=1", "c=2"],
        "model": "m",
        "output": "o",
        "threads": 2,
        "overwrite": True,
        "resume": True,
        "dry_run": True,
    }


def test_without_options_a_command_takes_the_demo_recipe(calibrate: Callable[..., tuple[int, str, str]]) -> None:
    seen: dict[str, Any] = {}

    def work(given: dict[str, Any]) -> FakeResult:
        seen.update(given)
        return FakeResult()

    calibrate(work)
    assert (seen["recipe"], seen["settings"], seen["model"], seen["overwrite"]) == ("demo", (), None, False)
