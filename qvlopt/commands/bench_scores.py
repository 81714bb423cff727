"""What the engines that bench measured scored in the newest evaluation under the same output: the other half of the Pareto picture."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from qvlopt.commands.candidates import MODEL
from qvlopt.commands.output import output_root
from qvlopt.recipe.load import LoadedRecipe
from qvlopt.timing.result import EngineResult

SAME = ("engine", "dtype", "model_digest")
"""What of their fingerprints makes two engines answer alike. A score in float32 is none of the same weights in bfloat16."""


def scores_of(loaded: LoadedRecipe, engines: Sequence[EngineResult]) -> dict[str, float]:
    """Mean of the primary scores, a share, by the engine's name; an engine that was not evaluated has none."""
    try:
        document = json.loads((output_root(loaded) / "evaluate" / "latest" / "report.json").read_text(encoding="utf-8"))
        known = _evaluated(document, loaded.recipe.model.path)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}
    return {engine.name: known[key] for engine in engines if (key := _key(engine.fingerprint)) in known}


def _evaluated(document: Mapping[str, Any], model: str) -> dict[tuple[Any, ...], float]:
    """Scores by what an engine's fingerprint says; both sides of every comparison."""
    asked = document["fingerprint"]["engines"]
    found: dict[tuple[Any, ...], float] = {}
    for result in document["results"]:
        primary = [metric for metric in result["metrics"] if metric["primary"]]
        for name, side in ((result["candidate"], "candidate"), (result["baseline"], "base")):
            fingerprint = asked.get(model if name == MODEL else name) or asked.get(str(Path(str(name)).absolute()))
            values = [metric[side] for metric in primary if isinstance(metric.get(side), int | float)]
            if fingerprint and _key(fingerprint)[-1] and values and len(values) == len(primary):
                found.setdefault(_key(fingerprint), sum(values) / len(values))
    return found


def _key(fingerprint: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(fingerprint.get(name) for name in SAME)
