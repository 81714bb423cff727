"""The command line that asks for what a recipe asks for, with what was set beside the file: for model cards."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from qvlopt.recipe.load import FLAG_NAMES, LoadedRecipe
from qvlopt.recipe.schema import PIPELINE
from qvlopt.recipe.shipped import shipped_recipe

GIVEN = "<recipe.yaml>"
"""Stands for a recipe that came as a mapping, from Python: the values under `recipe` in qvlopt.json are one."""
PLAIN = re.compile(r"(?!(?i:y|n|on|off|yes|no|true|false|null)$)[A-Za-z][\w./-]*(:[\w./-]+)?")
"""Text that YAML reads as itself, such as builtin:nano."""


def command_line(loaded: LoadedRecipe, command: str, *, sections: Collection[str]) -> str:
    """`qvlopt COMMAND --recipe ...` with the flags and `--set` values that the result depends on: all but the output.

    Of the pipeline's sections only `sections` count.
    """
    return shlex.join(["qvlopt", command, "--recipe", _recipe(loaded), *_options(loaded, sections)])


def _recipe(loaded: LoadedRecipe) -> str:
    """A shipped name, the file's own name, or GIVEN."""
    if "given" in loaded.origins.values():
        return GIVEN
    path = Path(loaded.source)
    return path.stem if loaded.source == path.name and shipped_recipe(path.stem) is not None else path.name


def _options(loaded: LoadedRecipe, sections: Collection[str]) -> Iterator[str]:
    for key, origin in loaded.origins.items():
        section = key.partition(".")[0]
        if key == "output" or (section in PIPELINE and section not in sections):
            continue
        text = _yaml(_value(loaded, key))
        if origin == FLAG_NAMES.get(key):
            yield from (origin, text)
        elif origin == "--set":
            yield from ("--set", f"{key}={text}")


def _value(loaded: LoadedRecipe, key: str) -> Any:
    value: Any = loaded.recipe
    for part in key.split("."):
        value = value[int(part)] if isinstance(value, tuple) else value[part] if isinstance(value, dict) else getattr(value, part)
    return value


def _yaml(value: Any) -> str:
    """As one YAML value; JSON is YAML."""
    return value if isinstance(value, str) and PLAIN.fullmatch(value) else json.dumps(value, ensure_ascii=False)
