"""What evaluate and bench are given to work on: the source, artifact folders, servers, and what stands for them when nobody names one."""

from __future__ import annotations

import logging
from pathlib import Path

from qvlopt.artifact.manifest import MANIFEST, Manifest, read_manifest
from qvlopt.commands.output import is_very_folder, output_root
from qvlopt.errors import UsageError
from qvlopt.recipe.load import LoadedRecipe
from qvlopt.recipe.paths import is_there, resolve_path, user_path

log = logging.getLogger(__name__)

MODEL = "model"
"""The candidate that stands for the recipe's source."""
ANSWERING = ("awq", "export", "int8")
"""Kinds of artifact that can be asked questions."""
PARTS = frozenset(("vision", "decoder"))
"""What an export must have to answer."""


def answers(manifest: Manifest) -> bool:
    """Whether the artifact can be asked questions: its kind can, and an export is whole."""
    parts = manifest.recipe.get("export", {}).get("parts", PARTS)
    return manifest.kind in ANSWERING and (manifest.kind != "export" or set(parts) >= PARTS)


def check_answers(candidate: str, manifest: Manifest) -> None:
    """Raises UsageError for an artifact that cannot be asked anything."""
    if answers(manifest):
        return
    kind = f"{manifest.kind} of one part" if manifest.kind in ANSWERING else manifest.kind
    raise UsageError(f"candidate {candidate}: is an artifact of kind {kind}, which answers nothing", f"kinds that do: {', '.join(ANSWERING)}")


def check_named(candidate: str) -> None:
    """Raises UsageError for an empty name, which a shell makes of a variable that is not set."""
    if not candidate:
        raise UsageError("a candidate is an empty name", "give an artifact folder, or model for the source; is a variable not set?")


def candidate_folder(loaded: LoadedRecipe, candidate: str) -> Path:
    """The folder of a candidate that is neither MODEL nor a server; the working directory goes first, as everywhere on a command line.

    Raises UsageError where there is none.
    """
    here = user_path(candidate)
    folder = here.absolute() if is_there(here) else resolve_path(candidate, loaded.folder, kind="assets")
    if folder is None or not folder.is_dir():
        raise UsageError(f"candidate {candidate}: there is no such folder", "give an artifact folder, model for the source, or URL#model")
    return folder


def served_model(loaded: LoadedRecipe) -> str | None:
    """`URL#model` of evaluate.server; None where the recipe names no server."""
    server = loaded.recipe.evaluate.server
    if server.url is None:
        return None
    return server.url + (f"#{server.model}" if server.model and "#" not in server.url else "")


def artifacts_beside(loaded: LoadedRecipe) -> dict[Path, Manifest]:
    """Finished artifacts under the recipe's output that can be asked questions, by name; none where the output is a report folder itself."""
    if is_very_folder(loaded):
        return {}
    folders = [path.parent for path in sorted(output_root(loaded).glob(f"*/{MANIFEST}")) if not path.parent.name.startswith(".")]
    return {folder: manifest for folder in folders if answers(manifest := read_manifest(folder))}


def finished_artifacts(loaded: LoadedRecipe) -> dict[Path, Manifest]:
    """`artifacts_beside`, as candidates that nobody named; says so where there was no place to look."""
    if is_very_folder(loaded):
        log.warning("--output names the folder of the reports, so no artifacts were looked for; name them as candidates")
    return artifacts_beside(loaded)
