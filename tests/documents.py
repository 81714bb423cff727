"""Checks JSON documents of commands against the schemas that ship with the package."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
from referencing import Registry, Resource

import qvlopt
from qvlopt.recipe.shipped import PACKAGE

SCHEMAS = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in (PACKAGE / "schemas").glob("*.json")}
REGISTRY: Registry[Any] = Registry().with_resources((schema["$id"], Resource.from_contents(schema)) for schema in SCHEMAS.values())


def check_document(document: dict[str, Any]) -> None:
    """Raises jsonschema.ValidationError unless `document` is what its command promises (docs/contract.md, section 7)."""
    check_shape(document["command"] if document["command"] in SCHEMAS else "common", document)


def check_shape(name: str, document: dict[str, Any]) -> None:
    """Raises jsonschema.ValidationError unless `document` is what the schema of that name says."""
    jsonschema.Draft202012Validator(SCHEMAS[name], registry=REGISTRY).validate(document)


def document_of(command: str, result: dict[str, Any], *, exit_code: int = 0) -> dict[str, Any]:
    """The document that the command line would print for a result's `to_json()`."""
    common = {
        "schema_version": 1,
        "tool": "qvlopt",
        "version": qvlopt.__version__,
        "command": command,
        "exit_code": exit_code,
        "seconds": 0.0,
        "peak_rss_bytes": 1,
        "output": None,
        "warnings": [],
    }
    return json.loads(json.dumps(common | result))  # type: ignore[no-any-return]
