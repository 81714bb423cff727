"""Which artifacts can be asked questions: what evaluate and bench take by themselves."""

from __future__ import annotations

from qvlopt.artifact.manifest import Manifest

ANSWERING = ("awq", "export", "int8")
"""Kinds of artifact that can be asked questions."""
PARTS = frozenset(("vision", "decoder"))
"""What an export must have to answer."""


def answers(manifest: Manifest) -> bool:
    """Whether the artifact can be asked questions: its kind can, and an export is whole."""
    parts = manifest.recipe.get("export", {}).get("parts", PARTS)
    return manifest.kind in ANSWERING and (manifest.kind != "export" or set(parts) >= PARTS)
