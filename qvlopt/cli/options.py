"""The options that every command has, declared once (docs/contract.md, section 1)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields
from inspect import Parameter, Signature
from typing import Annotated, Any, get_type_hints

import typer

from qvlopt.api import Overrides


@dataclass(frozen=True)
class Voice:
    """What is printed: `--json`, `--quiet` and the number of `-v`."""

    json: Annotated[bool, typer.Option("--json", metavar="", help="Exactly one JSON document on stdout.")] = False
    quiet: Annotated[bool, typer.Option("--quiet", metavar="", help="No progress and no warnings on stderr.")] = False
    verbose: Annotated[
        int, typer.Option("-v", "--verbose", metavar="", count=True, show_default=False, help="Say more on stderr, tracebacks too.")
    ] = 0


@dataclass(frozen=True)
class Options(Voice):
    """Everything a command that reads a recipe can be told. A flag beats --set beats the file beats the default."""

    recipe: Annotated[str, typer.Option(metavar="FILE_OR_NAME", help="A recipe file, or a shipped one by name, such as 4090d.")] = "demo"
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY.PATH=VALUE", help="Set a value of the recipe (YAML); may be repeated.")
    ] = None
    model: Annotated[str | None, typer.Option(metavar="ID_OR_DIR", help="The source: hub id, folder or builtin:nano.")] = None
    output: Annotated[str | None, typer.Option(metavar="DIR", help="The very folder to write.")] = None
    overwrite: Annotated[bool, typer.Option("--overwrite", metavar="", help="Replace an output made from other inputs.")] = False
    resume: Annotated[bool, typer.Option("--resume", metavar="", help="Go on with interrupted work.")] = False
    dry_run: Annotated[bool, typer.Option("--dry-run", metavar="", help="Print the resolved recipe and the plan; write nothing.")] = False
    threads: Annotated[int | None, typer.Option(metavar="N", help="CPU threads; all that affinity and quota allow when left out.")] = None

    def overrides(self) -> Overrides:
        """The keywords for a function of `qvlopt.api`."""
        return Overrides(
            settings=self.settings or (),
            model=self.model,
            output=self.output,
            threads=self.threads,
            overwrite=self.overwrite,
            resume=self.resume,
            dry_run=self.dry_run,
        )


def with_options(options: type[Voice], body: Callable[..., None], *arguments: Parameter) -> Callable[..., None]:
    """A function for Typer that takes `arguments` and the fields of `options`, and calls `body(options, **arguments)`.

    Typer reads signatures, so one is made here instead of spelling out the same ten options for every command.
    """
    hints = get_type_hints(options, include_extras=True)

    def command(**given: Any) -> None:
        positional = {argument.name: given.pop(argument.name) for argument in arguments}
        body(options(**given), **positional)

    parameters = list(arguments)
    for field in fields(options):
        default = None if field.default is MISSING else field.default
        parameters.append(Parameter(field.name, Parameter.KEYWORD_ONLY, annotation=hints[field.name], default=default))
    command.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    command.__doc__ = body.__doc__
    return command
