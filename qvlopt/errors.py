"""The errors that end a command, each with its exit status (docs/contract.md, section 2).

Every message is one line: what, where, got, expected. `hint` says what to do next. Anything else that is raised is a
bug in qvlopt and ends a command with status 5 as well, never 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple


class QvloptError(Exception):
    """Ends a command: `message` is one clear line, `hint` says what to do, `exit_code` is the process's status."""

    exit_code = 5

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message


class UsageError(QvloptError):
    """The recipe, an option or an argument is wrong, or an output exists already with another digest."""

    exit_code = 2


class Problem(NamedTuple):
    """One thing that is wrong in a recipe: `where` is `file:line` or the option, `message` starts with the key."""

    where: str
    message: str


class RecipeProblems(UsageError):
    """Everything that is wrong in one recipe and its options, at once, in the order of the file."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        lines = [f"{where}: {message}" for where, message in problems]
        count = "1 problem" if len(lines) == 1 else f"{len(lines)} problems"
        super().__init__("\n".join([f"{count} in the recipe", *lines]))
        self.problems = list(problems)


class NotComparableError(QvloptError):
    """There is no baseline, or it was made under other conditions."""

    exit_code = 4


class RunError(QvloptError):
    """A model, shard, data set, package, engine, memory or disk is missing or broken."""

    exit_code = 5


class NotFetchedError(RunError):
    """A model or set of the hub is not in the cache, and this command was not to fetch it."""


class ItemError(Exception):
    """One sample cannot be used, for `reason`; the caller counts it, names it and goes on with the others."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


EXIT_ORDER = (130, 2, 5, 4, 1, 3, 0)
"""Which status wins when a command has several, the worst first."""


def worst_exit_code(codes: Iterable[int]) -> int:
    """The status of a command whose parts ended with `codes`; 0 when there are none. ValueError on an unknown one."""
    return min(codes, key=EXIT_ORDER.index, default=0)
