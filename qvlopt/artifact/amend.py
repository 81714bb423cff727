"""Replaces one text file of a finished artifact, such as its card after an evaluation, and its digest in the manifest."""

from __future__ import annotations

import os
from pathlib import Path

from qvlopt.artifact.digest import sha256_bytes
from qvlopt.artifact.lock import locked
from qvlopt.artifact.manifest import MANIFEST, FileRecord, read_manifest


def amend_file(folder: Path, name: str, text: str) -> bool:
    """Writes `text` as the artifact's file `name`; False, and nothing changed, where it is not the file that was written.

    A file that somebody edited is theirs. Both files are written beside and renamed, so neither is ever half there.
    Raises RunError for a broken manifest and OSError for a folder that cannot be written.
    """
    folder = Path(os.path.realpath(folder))
    with locked(folder):
        manifest = read_manifest(folder)
        listed = manifest.files.get(name)
        path = folder / name
        if listed is None or path.is_symlink() or not path.is_file() or sha256_bytes(path.read_bytes()) != listed.sha256:
            return False
        data = text.encode()
        files = {**manifest.files, name: FileRecord(sha256=sha256_bytes(data), bytes=len(data))}
        renewed = manifest.model_copy(update={"files": files}).model_dump_json(indent=2) + "\n"
        replacements = [(path, data), (folder / MANIFEST, renewed.encode())]
        try:
            for target, content in replacements:
                _beside(target).write_bytes(content)
            for target, _ in replacements:
                os.replace(_beside(target), target)
        finally:
            for target, _ in replacements:
                _beside(target).unlink(missing_ok=True)
    return True


def _beside(path: Path) -> Path:
    return path.with_name(f".{path.name}.tmp")
