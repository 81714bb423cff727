"""docs/contract.md against the code: recipe keys and defaults, exit statuses, JSON keys."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from qvlopt.errors import EXIT_ORDER, QvloptError
from qvlopt.recipe.load import load_recipe
from tests.documents import SCHEMAS

CONTRACT = (Path(__file__).parents[1] / "docs" / "contract.md").read_text(encoding="utf-8")
EXAMPLE = re.search(r"```yaml\n(.*?)```", CONTRACT, re.DOTALL)
OPTIONAL_OF_DATA = ("split", "limit", "columns", "prompt", "max_new_tokens")
"""Listed in a comment of the example."""
UNLIKE_DEFAULTS = {"name", "model.path", "output"}
"""Where the contract's example shows a value that is no default."""


def flat(value: Any, path: str = "") -> dict[str, Any]:
    if isinstance(value, dict) and value:
        return {key: item for name, inner in value.items() for key, item in flat(inner, f"{path}.{name}".lstrip(".")).items()}
    if isinstance(value, list) and any(isinstance(item, dict) for item in value):
        return {key: item for index, inner in enumerate(value) for key, item in flat(inner, f"{path}.{index}").items()}
    return {path: value}


def example() -> dict[str, Any]:
    assert EXAMPLE is not None
    return flat(YAML(typ="safe", pure=True).load(EXAMPLE.group(1)))


def test_the_contracts_recipe_is_valid(tmp_path: Path) -> None:
    assert EXAMPLE is not None
    path = tmp_path / "contract.yaml"
    path.write_text(EXAMPLE.group(1), encoding="utf-8")
    loaded = load_recipe(path)
    assert loaded.sections == ("calibrate", "quantize_awq", "export", "quantize_int8", "evaluate", "bench")
    # Every key that the contract writes out is read, and every key that we read is written out there.
    unset = {re.sub(r"\d+\.", "", key) for key, origin in loaded.origins.items() if origin == "default"}
    assert unset <= {f"evaluate.data.{key}" for key in OPTIONAL_OF_DATA}


@pytest.mark.parametrize("key", sorted(set(example()) - UNLIKE_DEFAULTS))
def test_the_defaults_are_the_contracts(key: str) -> None:
    defaults = flat(json.loads(load_recipe({"model": {"path": "x"}}).recipe.model_dump_json()))
    assert defaults[key] == example()[key]


def test_the_statuses_are_the_contracts() -> None:
    section = CONTRACT.split("## 2 Exit status")[1].split("## 3")[0]
    assert {int(code) for code in re.findall(r"^\| (\d+) \|", section, re.MULTILINE)} == set(EXIT_ORDER)
    assert QvloptError.exit_code == 5


def test_several_statuses_are_ordered_as_the_contract_orders_them() -> None:
    order = re.search(r"Several at once: ([\d, ]+)\.", CONTRACT)
    assert order is not None
    assert [code for code in EXIT_ORDER if code not in (130, 2)] == [int(code) for code in order.group(1).split(",")]


def rows() -> dict[str, set[str]]:
    """The table of section 7: the top-level keys of every command's document."""
    section = CONTRACT.split("## 7 JSON")[1].split("## 8")[0]
    table = {}
    for commands, keys in re.findall(r"^\| ([a-z0-9, /-]+) \| (.*) \|$", section, re.MULTILINE):
        while "{" in keys:
            keys = re.sub(r"\{[^{}]*\}", "", keys)
        names = {re.sub(r"\[\]", "", key).strip() for key in re.sub(r"` / `", ", ", keys).strip("`").split(",")}
        table.update(dict.fromkeys(re.split(r", | / ", commands), names))
    return table


SHARED = {"inspect": {"modules", "totals"}, "doctor": {"checks", "stages"}}
"""Commands that share a row."""
OF_FILES = {"evaluate-report", "evaluate-item"}
"""Schemas of files in a report folder, which no command prints."""


@pytest.mark.parametrize("command", sorted(set(SCHEMAS) - {"common"} - OF_FILES))
def test_the_schema_of_a_command_asks_for_the_contracts_keys(command: str) -> None:
    schema = SCHEMAS[command]
    if command in SHARED:
        assert set(schema["then"]["required"]) == SHARED[command]
        assert rows()[command] == set().union(*SHARED.values())
    else:
        assert set(schema["then"]["required"]) == rows()[command]
    assert set(schema["then"]["required"]) <= set(schema["properties"])


def test_the_common_keys_are_the_contracts() -> None:
    assert set(SCHEMAS["common"]["required"]) == rows()["all"]
