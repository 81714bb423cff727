"""The command line as it is typed: commands, help, refusals, and what is not in this version."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import qvlopt
from qvlopt import api
from qvlopt.cli.app import VERBS, _status
from tests.documents import check_document

COMMANDS = [*(verb.name for verb in VERBS), "inspect"]
HEAVY = ("torch", "numpy", "transformers", "onnxruntime", "onnx", "datasets", "pandas", "PIL", "huggingface_hub")


def qvlopt_process(*words: str, code: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    """`qvlopt WORDS` in a process of its own; `code` runs in it first."""
    program = f"import sys\n{code}\nfrom qvlopt.cli.app import main\nmain({list(words)!r})\n"
    paths = [str(Path(qvlopt.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)} | environment
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=False)


def test_every_command_of_the_contract_is_there() -> None:
    expected = {"run", "calibrate", "quantize-awq", "quantize-int8", "export", "evaluate", "bench", "inspect", "doctor"}
    assert set(COMMANDS) == expected


@pytest.mark.parametrize("words", [["--help"], ["calibrate", "--help"], ["inspect", "-h"]])
def test_help_loads_no_heavy_package(words: list[str]) -> None:
    loaded = f"import atexit\natexit.register(lambda: print('LOADED', *[name for name in {HEAVY!r} if name in sys.modules]))"
    done = qvlopt_process(*words, code=loaded)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "LOADED"
    assert "Usage: qvlopt" in done.stdout


def test_importing_the_package_and_its_api_loads_no_heavy_package() -> None:
    done = subprocess.run(
        [sys.executable, "-c", f"import sys, qvlopt.api, qvlopt.errors; print([name for name in {HEAVY!r} if name in sys.modules])"],
        capture_output=True,
        text=True,
        cwd=Path(qvlopt.__file__).parents[1],
        check=True,
    )
    assert done.stdout.strip() == "[]"


def test_a_wrong_recipe_is_refused_before_anything_heavy_is_loaded() -> None:
    loaded = f"import atexit\natexit.register(lambda: print('LOADED', *[name for name in {HEAVY!r} if name in sys.modules]))"
    done = qvlopt_process("quantize-awq", "--set", "quantize_awq.bits=5", code=loaded)
    assert done.returncode == 2
    assert done.stdout.splitlines() == ["LOADED"]
    assert "quantize_awq.bits" in done.stderr


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_on_stdout(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert _status([command, "--help"]) == 0
    out, err = capsys.readouterr()
    assert f"Usage: qvlopt {command}" in out
    assert "--json" in out
    assert err == ""


@pytest.mark.parametrize("command", [verb.name for verb in VERBS])
def test_every_command_that_reads_a_recipe_has_the_options_of_all(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    _status([command, "--help"])
    out = capsys.readouterr().out
    options = ("--recipe", "--set", "--model", "--output", "--overwrite", "--resume", "--dry-run", "--json", "--quiet", "-v", "--threads")
    assert [option for option in options if option not in out] == []


def test_the_bare_command_shows_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert _status([]) == 0
    assert "quantize-awq" in capsys.readouterr().out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert _status(["--version"]) == 0
    assert capsys.readouterr().out == f"{qvlopt.__version__}\n"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["calibrat"], "No such command 'calibrat'. Did you mean 'calibrate'?"),
        (["calibrate", "--sett", "a=b"], "No such option: --sett"),
        (["calibrate", "--threads", "many"], "--threads"),
        (["calibrate", "extra"], "extra"),
        (["inspect"], "PATH"),
        (["calibrate", "--recipe"], "--recipe"),
    ],
)
def test_a_wrong_command_line_is_status_2_with_one_line_and_where_to_look(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert _status(words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert said in err.splitlines()[0]
    assert "--help" in err.splitlines()[1]


def test_a_wrong_command_line_answers_in_json_when_asked(capsys: pytest.CaptureFixture[str]) -> None:
    assert _status(["evaluate", "--json", "--foo"]) == 2
    document = json.loads(capsys.readouterr().out)
    check_document(document)
    assert (document["command"], document["exit_code"]) == ("evaluate", 2)


def test_overwrite_and_resume_exclude_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    assert _status(["calibrate", "--overwrite", "--resume"]) == 2
    assert "exclude each other" in capsys.readouterr().err


def test_inspect_of_nothing_is_a_usage_error(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert _status(["inspect", str(tmp_path / "none")]) == 2
    assert "there is no file or folder" in capsys.readouterr().err


def test_candidates_reach_evaluate(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[Any] = []

    def evaluate(recipe: str, candidates: list[str], **_given: object) -> Any:
        seen.extend([recipe, candidates])
        raise KeyboardInterrupt

    monkeypatch.setattr(api, "evaluate", evaluate)
    assert _status(["evaluate", "a", "b", "--recipe", "r"]) == 130
    assert seen == ["r", ["a", "b"]]
    assert "go on with: qvlopt evaluate --resume a b --recipe r" in capsys.readouterr().err


def test_telemetry_and_bars_of_the_libraries_are_off() -> None:
    code = "import atexit, os\natexit.register(lambda: print(os.environ['HF_HUB_DISABLE_TELEMETRY'], os.environ['HF_HUB_DISABLE_PROGRESS_BARS']))"
    assert qvlopt_process("--version", code=code, HF_HUB_DISABLE_TELEMETRY="0").stdout.splitlines()[-1] == "1 1"


def test_no_colour_and_no_bar_reach_a_pipe() -> None:
    done = qvlopt_process("inspect", "nowhere", NO_COLOR="1")
    assert done.returncode == 2
    assert "\x1b" not in done.stderr + done.stdout


@pytest.mark.parametrize("when", ["atexit.register(again)", "threading._register_atexit(again)", "sys.modules['last'] = Last()"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_of_a_command_that_is_done_leaves_its_status(when: str, number: int) -> None:
    """While threads are waited for, while exit functions run, and when the interpreter has given up its own handlers."""
    program = f"""
import atexit, os, sys, threading
def again():
    os.kill(os.getpid(), {number})
class Last:
    def __del__(self, kill=os.kill, own=os.getpid()):
        kill(own, {number})
{when}
sys.argv = ["qvlopt", "inspect", "nowhere"]
from qvlopt.__main__ import main
main()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=Path(qvlopt.__file__).parents[1], check=False)
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 2), done.stderr


def test_a_reader_that_leaves_early_is_no_failure() -> None:
    code = "import os\nread, write = os.pipe()\nos.dup2(write, 1)\nos.close(read)\nos.close(write)"
    done = qvlopt_process("inspect", "nowhere", "--json", code=code)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "Broken" not in done.stderr


def test_the_module_runs_as_the_command_does() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "qvlopt", "--version"], capture_output=True, text=True, cwd=Path(qvlopt.__file__).parents[1], check=False
    )
    assert (done.returncode, done.stdout) == (0, f"{qvlopt.__version__}\n")


@pytest.mark.parametrize(("code", "status", "said"), [("None", 0, ""), ("3", 3, ""), ("'no such thing'", 1, "no such thing\n")])
def test_the_status_is_what_the_command_left_with(code: str, status: int, said: str) -> None:
    script = f"import sys, qvlopt.cli.app as app; app.main = lambda: sys.exit({code}); from qvlopt.__main__ import main; main()"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (status, said)
