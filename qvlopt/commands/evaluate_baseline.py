"""Saves a candidate's answers as a baseline file: on request only, and in CI only when it is told twice."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from qvlopt.artifact.syncing import sync_path
from qvlopt.errors import NotComparableError, RunError, UsageError
from qvlopt.recipe.load import LoadedRecipe
from qvlopt.recipe.paths import user_path
from qvlopt.scoring.baseline import baseline_text, changes, read_baseline
from qvlopt.scoring.compare import Comparison
from qvlopt.scoring.evaluate import EngineRun, EvalSet, Target
from qvlopt.scoring.noise import Noise


@dataclass(frozen=True)
class Saving:
    """The place of `evaluate.save_baseline`, and what stood there before."""

    path: Path
    old: EngineRun | None

    @classmethod
    def asked(cls, loaded: LoadedRecipe, targets: Sequence[Target], *, overwrite: bool, environment: Mapping[str, str] = os.environ) -> Saving | None:
        """None where nothing is to be saved. Raises UsageError, before the work, where that is not allowed or not possible."""
        value = loaded.recipe.evaluate.save_baseline
        if value is None:
            return None
        path = user_path(value)
        if environment.get("CI") and not overwrite:
            raise UsageError(f"evaluate.save_baseline: {path} is not written in CI", "make baselines by hand and commit them, or add --overwrite")
        if len(targets) != 1:
            raise UsageError(f"evaluate.save_baseline: one candidate is saved, not {len(targets)}", "name one of them, or model for the source")
        if path.is_dir() or not path.absolute().parent.is_dir():
            raise UsageError(f"evaluate.save_baseline: {path} is not a file in a folder that exists", "give a path such as baselines/name.json")
        if path.exists() and not overwrite:
            raise UsageError(f"evaluate.save_baseline: {path} exists", "add --overwrite to replace it")
        return cls(path, _old(path) if path.exists() else None)

    def save(self, comparison: Comparison, sets: Sequence[EvalSet], noise: Noise | None) -> str:
        """Writes the file, complete or not at all; says in words what changed. Answers with failed items are no baseline."""
        run = comparison.runs[1]
        if comparison.verdict == "error":
            return f"{self.path} was not written: {'; '.join(comparison.reasons)}"
        try:
            _replace(self.path, baseline_text(comparison.candidate, run, sets, noise))
        except OSError as error:
            raise RunError(f"{self.path} cannot be written: {error.strerror}", "choose another evaluate.save_baseline") from error
        count = sum(len(side.answers) for side in run.answered.values())
        return f"{self.path} written, {count} answers" + (f": {changes(self.old, run)}" if self.old else "")


def _old(path: Path) -> EngineRun | None:
    """What is replaced, if it can be read."""
    try:
        return read_baseline(path).run
    except NotComparableError:
        return None


def _replace(path: Path, text: str) -> None:
    """Writes beside and renames, so that the file is never half there. Raises OSError."""
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    try:
        temporary.write_text(text, encoding="utf-8")
        sync_path(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
