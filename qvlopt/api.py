"""The commands as functions: a recipe in, a result out. The command line calls nothing else.

    from qvlopt import api
    result = api.quantize_awq("demo", output="out/nano-awq", quantize_awq={"group_size": 64})

A recipe is a path, a shipped name or a dict. Keywords override it (`Overrides`) and beat its values; a mapping replaces
only the keys that it has. Errors are `qvlopt.errors`; nothing is printed. Importing this module loads no torch: each
command is imported when it is called, and after its recipe is found to be right.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypedDict, Unpack

from qvlopt.errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from qvlopt.recipe.load import LoadedRecipe
    from qvlopt.report.progress import Progress

RecipeSource = str | Path | Mapping[str, Any]
SHORT = {"model": "model.path", "threads": "hardware.threads"}
"""Overrides that stand for one value inside a section."""


class Result(Protocol):
    """What every command returns: its JSON keys (docs/contract.md, section 7), its exit status and its table."""

    @property
    def exit_code(self) -> int: ...

    def to_json(self) -> dict[str, Any]: ...

    def render(self, console: Console) -> None: ...


class Way(TypedDict, total=False):
    """How a command goes about it: what to do with an output that exists, only plan it, and whom to tell of the work."""

    overwrite: bool
    resume: bool
    dry_run: bool
    progress: Progress | None


class Overrides(Way, total=False):
    """`settings` are `key.path=value` as after --set; the others are keys of the recipe."""

    settings: Sequence[str]
    name: str | None
    model: str | Path | Mapping[str, Any] | None
    output: str | Path | None
    seed: int | None
    threads: int | None
    hardware: Mapping[str, Any]
    pixels: Mapping[str, int] | None
    calibrate: Mapping[str, Any]
    quantize_awq: Mapping[str, Any]
    export: Mapping[str, Any]
    quantize_int8: Mapping[str, Any]
    evaluate: Mapping[str, Any]
    bench: Mapping[str, Any]


def run(recipe: RecipeSource = "demo", **overrides: Unpack[Overrides]) -> Result:
    """Works through the sections present in the recipe, skipping what is done already."""
    loaded = _load(recipe, overrides)
    from qvlopt.commands.run import run as command

    return command(loaded, **_way(overrides))


def calibrate(recipe: RecipeSource = "demo", **overrides: Unpack[Overrides]) -> Result:
    """Collects the statistics of every layer in scope over the calibration set."""
    loaded = _load(recipe, overrides)
    from qvlopt.commands.calibrate import calibrate as command

    return command(loaded, **_way(overrides))


def quantize_awq(recipe: RecipeSource = "demo", **overrides: Unpack[Overrides]) -> Result:
    """Quantises the weights in scope, checks the artifact and writes it."""
    loaded = _load(recipe, overrides)
    from qvlopt.commands.quantize_awq import quantize_awq as command

    return command(loaded, **_way(overrides))


def evaluate(recipe: RecipeSource = "demo", candidates: Sequence[str] = (), **overrides: Unpack[Overrides]) -> Result:
    """Scores candidates (artifact folders, `model`, or `URL#model` for a server) against the baseline and judges the difference."""
    loaded = _load(recipe, overrides)
    from qvlopt.commands.evaluate import evaluate as command

    return command(loaded, candidates, **_way(overrides))


def inspect(path: str | Path) -> Result:
    """Every module of a checkpoint or artifact folder with its dtype and bytes."""
    from qvlopt.commands.inspect import inspect as command
    from qvlopt.recipe.paths import resolve_path

    folder = resolve_path(str(path), Path.cwd(), kind="assets")
    if folder is None:
        raise UsageError(f"there is no file or folder {path or 'with an empty name'}", "give a checkpoint or artifact folder, or builtin:nano")
    return command(folder)


def export(recipe: RecipeSource = "demo", **overrides: Unpack[Overrides]) -> Result:
    """Writes the checkpoint as float32 ONNX graphs, checked against torch."""
    loaded = _load(recipe, overrides)
    from qvlopt.commands.export import export as command

    return command(loaded, **_way(overrides))


def quantize_int8(recipe: RecipeSource = "demo", **overrides: Unpack[Overrides]) -> Result:
    """Writes the checkpoint as ONNX graphs in integers, each layer's error measured, checked on held-out pictures."""
    loaded = _load(recipe, overrides)
    from qvlopt.commands.quantize_int8 import quantize_int8 as command

    return command(loaded, **_way(overrides))


def bench(recipe: RecipeSource = "demo", candidates: Sequence[str] = (), **overrides: Unpack[Overrides]) -> Result:
    """Measures speed and memory of candidates (artifact folders, `model`, or `URL#model` for a server) by stage."""
    loaded = _load(recipe, overrides)
    from qvlopt.commands.bench import bench as command

    return command(loaded, candidates, **_way(overrides))


def doctor(recipe: RecipeSource = "demo", **overrides: Unpack[Overrides]) -> Result:
    """Tells whether a recipe fits and runs on this machine, and what each stage will take: memory, disk, time."""
    loaded = _load(recipe, overrides)
    from qvlopt.commands.doctor import doctor as command

    return command(loaded, **_way(overrides))


def _load(recipe: RecipeSource, overrides: Overrides) -> LoadedRecipe:
    from qvlopt.recipe.load import load_recipe

    # Read by huggingface_hub when it is imported, which is later than this: nothing is told to anyone.
    os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
    way = _way(overrides)
    if way["overwrite"] and way["resume"]:
        raise UsageError("overwrite and resume exclude each other", "resume keeps finished work, overwrite removes it")
    flags: dict[str, object] = {}
    for key, value in overrides.items():
        if isinstance(value, Mapping):
            flags.update({f"{key}.{inner}": item for inner, item in value.items()})
        elif key not in way and key != "settings" and value is not None:  # None: a flag that was not given
            flags[SHORT.get(key, key)] = value
    return load_recipe(recipe, overrides=overrides.get("settings", ()), flags=flags)


def _way(overrides: Overrides) -> Way:
    return Way(
        overwrite=overrides.get("overwrite", False),
        resume=overrides.get("resume", False),
        dry_run=overrides.get("dry_run", False),
        progress=overrides.get("progress"),
    )
