"""What `--dry-run` returns: the resolved recipe with the origin of every value, and what would be done. Writes nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic import BaseModel

from qvlopt.errors import NotFetchedError
from qvlopt.recipe.load import LoadedRecipe
from qvlopt.report.plain import safe

if TYPE_CHECKING:
    from rich.console import Console


class PlanRow(NamedTuple):
    """One line of a plan, such as ("reads", "builtin:nano-eval: /.../calib/nano-eval, 300 items")."""

    item: str
    value: str


class ResolvedValue(NamedTuple):
    """A value of the recipe and where it came from: `demo.yaml:12`, `--set`, a flag, or `default`."""

    key: str
    value: Any
    origin: str


@dataclass(frozen=True)
class Plan:
    """A result like any other, of a command that was only asked what it would do."""

    loaded: LoadedRecipe
    rows: tuple[PlanRow, ...]
    exit_code: int = 0

    def to_json(self) -> dict[str, Any]:
        recipe = {key: {"value": value, "origin": origin} for key, value, origin in resolved_values(self.loaded)}
        return {"dry_run": True, "output": None, "recipe": recipe, "plan": [row._asdict() for row in self.rows]}

    def render(self, console: Console) -> None:
        from rich.table import Table

        values = Table("key", "value", "origin", title=safe(f"recipe {self.loaded.source}"), title_justify="left")
        for key, value, origin in resolved_values(self.loaded):
            values.add_row(key, safe(_shown(value)), safe(origin))
        plan = Table("plan", "", title="dry run: nothing is written", title_justify="left")
        for item, text in self.rows:
            plan.add_row(item, safe(text))
        console.print(values)
        console.print(plan)


def planned(loaded: LoadedRecipe, rows: Callable[[], Iterator[PlanRow]]) -> Plan:
    """The plan with its `rows`, which raise NotFetchedError for what is not in the cache: then the plan is to fetch that first."""
    try:
        return Plan(loaded, tuple(rows()))
    except NotFetchedError as error:
        return Plan(loaded, (PlanRow("fetches", f"{error.message}; a run fetches it first, and what it takes is told once it is there"),))


def resolved_values(loaded: LoadedRecipe) -> Iterator[ResolvedValue]:
    """Every value of the recipe in the schema's order, in types that JSON knows."""
    for key, origin in loaded.origins.items():
        value: Any = loaded.recipe
        for part in key.split("."):
            value = value[int(part)] if isinstance(value, tuple) else getattr(value, part)
        yield ResolvedValue(key, _plain(value), origin)


def _plain(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    return list(value) if isinstance(value, tuple) else value


def _shown(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    return "[" + ", ".join(map(str, value)) + "]" if isinstance(value, list) else str(value)
