"""`qvlopt`: every command in one table, the entry point, and nothing that computes."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from inspect import Parameter
from typing import Annotated, Any, NamedTuple

import typer

from qvlopt import __version__, api
from qvlopt.cli.options import Options, Voice, with_options
from qvlopt.cli.session import perform, stdout_lost
from qvlopt.errors import UsageError

ENVIRONMENT = {
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    "TQDM_DISABLE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "DATASETS_VERBOSITY": "error",
    "HF_HUB_VERBOSITY": "error",
}
"""For the libraries below: no telemetry, no bars of their own, no chatter. Set before any of them is imported."""

CANDIDATES_HELP = "Artifact folders, `model` for the source, or `URL#model` for a server. None: every finished artifact of the recipe."
CANDIDATES = Parameter(
    "candidates",
    Parameter.KEYWORD_ONLY,
    annotation=Annotated[list[str] | None, typer.Argument(metavar="[CANDIDATE]...", help=CANDIDATES_HELP)],
    default=None,
)
FOLDER = Parameter(
    "path",
    Parameter.KEYWORD_ONLY,
    annotation=Annotated[str, typer.Argument(metavar="PATH", help="A checkpoint or artifact folder, or builtin:nano.")],
)


class Verb(NamedTuple):
    """A command that reads a recipe: its name, its function in `qvlopt.api`, its help, and whether it takes candidates."""

    name: str
    function: str
    help: str
    takes_candidates: bool = False


VERBS = (
    Verb("run", "run", "Work through the sections of a recipe, skipping what is done."),
    Verb("calibrate", "calibrate", "Collect statistics of every layer over a calibration set."),
    Verb("quantize-awq", "quantize_awq", "Quantise the vision tower's weights by AWQ and write a checkpoint."),
    Verb("evaluate", "evaluate", "Score candidates on OCR, VQA and documents against a baseline.", takes_candidates=True),
    Verb("export", "export", "Write the checkpoint as ONNX graphs that keep DeepStack, checked against torch."),
    Verb("quantize-int8", "quantize_int8", "Write the checkpoint as INT8 ONNX graphs, each layer's error measured."),
    Verb("bench", "bench", "Measure speed and memory by stage, and tell whether they got worse.", takes_candidates=True),
    Verb("doctor", "doctor", "Tell whether a recipe fits this machine: memory, disk, time, packages."),
)


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command line and exits with its status (docs/contract.md, section 2)."""
    os.environ.update(ENVIRONMENT)
    if sys.stdout is None or not sys.stdout.isatty():
        # Typer takes any CI system for a terminal and would colour its help in a pipe.
        os.environ["_TYPER_FORCE_DISABLE_TERMINAL"] = "1"
    words = list(sys.argv[1:] if argv is None else argv)
    sys.exit(_status(words))


def _status(words: list[str]) -> int:
    app = make_app(words)
    try:
        code = app(words, prog_name="qvlopt", standalone_mode=False)
    except typer.TyperException as error:
        return _refused(error, words)
    except typer.Abort:
        return 130
    except SystemExit:
        return stdout_lost(BrokenPipeError(), 0)  # how Rich, which prints the help, takes a reader that has gone
    except OSError as error:
        return stdout_lost(error, 0)
    return code if isinstance(code, int) else 0


def make_app(argv: Sequence[str]) -> typer.Typer:
    """The Typer application. `argv` is what was typed, for the command that resumes an interrupted run."""
    app = typer.Typer(
        help="Quantise the vision side of Qwen3-VL checkpoints, and prove what it cost.",
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
        invoke_without_command=True,
        callback=_top,
    )
    for verb in VERBS:
        arguments = [CANDIDATES] if verb.takes_candidates else []
        app.command(verb.name, help=verb.help)(with_options(Options, _body(verb, argv), *arguments))
    app.command("inspect", help="Show every module of a folder: dtype, shape, bytes.")(with_options(Voice, _inspect(argv), FOLDER))
    return app


def _top(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", metavar="", help="Print the version and exit.")] = False,
) -> None:
    if version:
        print(__version__)
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())


def _body(verb: Verb, argv: Sequence[str]) -> Callable[..., None]:
    def body(options: Options, candidates: list[str] | None = None) -> None:
        arguments: tuple[Any, ...] = (options.recipe, candidates or ()) if verb.takes_candidates else (options.recipe,)
        call = getattr(api, verb.function)
        raise typer.Exit(perform(verb.name, lambda progress: call(*arguments, **options.overrides(), progress=progress), options, argv))

    return body


def _inspect(argv: Sequence[str]) -> Callable[..., None]:
    def body(voice: Voice, path: str) -> None:
        raise typer.Exit(perform("inspect", lambda _progress: api.inspect(path), voice, argv))

    return body


def _refused(error: typer.TyperException, words: list[str]) -> int:
    """A command line that Typer refuses: one line, status 2, and JSON for those who asked for it."""
    command = next((word for word in words if word in {verb.name for verb in VERBS} | {"inspect"}), "")
    usage = UsageError(error.format_message(), f"qvlopt {command} --help".replace("  ", " "))

    def refuse(_progress: object) -> api.Result:
        raise usage

    return perform(command or "qvlopt", refuse, Voice(json="--json" in words), words)
