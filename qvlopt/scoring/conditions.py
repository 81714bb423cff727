"""Under which conditions answers were made, and whether two runs can be compared.

Equal must be: the items and their right answers, the longest answer, how tokens are chosen, the pixel limits, the batch. What engine,
dtype, device and versions gave them is recorded, not required: that is what an evaluation is for. One exception: where a
saved baseline was made by other versions *and* its prompts or pixels differ from the candidate's, nobody can tell whose
doing that is.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy
import PIL

import qvlopt
from qvlopt.artifact.digest import digest_of
from qvlopt.runtime.engine import SERVERS_OWN
from qvlopt.scoring.evaluate import EngineRun, EvalSet

BY_ENGINE = ("pixels", "generation")
"""Keys of an engine's fingerprint that must be equal."""

SHOWN = 16
"""Characters of a value, such as a digest, that a reason shows."""


def conditions_of(run: EngineRun, sets: Sequence[EvalSet]) -> dict[str, Any]:
    """JSON values: what a later comparison with this run has to keep to."""
    data = {
        each.name: {
            "digest": each.digest,
            "items": len(each.chosen),
            "task": each.task,
            "metric": each.metrics.primary.name,
            "prompts": digest_of([[sample.id, sample.question] for sample in each.chosen]),
            "max_new_tokens": each.max_new_tokens,
            "inputs": _inputs(run, each.name),
        }
        for each in sets
        if each.name in run.answered
    }
    return {**{key: run.fingerprint.get(key) for key in BY_ENGINE}, "batch": run.batch, "data": data, "versions": versions()}


def _inputs(run: EngineRun, name: str) -> str | None:
    """One digest of what the engine was given in a set; None where a server makes it of pictures and text."""
    inputs = run.answered[name].inputs
    return digest_of(dict(inputs)) if inputs and run.fingerprint.get("pixels") != SERVERS_OWN else None


def versions() -> dict[str, str]:
    """Of what prepares items besides the engine."""
    return {"python": platform.python_version(), "numpy": numpy.__version__, "pillow": PIL.__version__, "qvlopt": qvlopt.__version__}


def differences(base: Mapping[str, Any], candidate: Mapping[str, Any]) -> Iterator[str]:
    """Why two runs cannot be compared, in words; nothing where they can. Both are of `conditions_of`."""
    for key in BY_ENGINE:
        if not _is_alike(base.get(key), candidate.get(key)):
            yield f"{key} is {base.get(key)} for the base and {candidate.get(key)} for the candidate"
    if None not in (base.get("batch"), candidate.get("batch")) and base["batch"] != candidate["batch"]:
        yield f"the base was asked in batches of {base['batch']}, the candidate of {candidate['batch']}"
    ours, theirs = base.get("data") or {}, candidate.get("data") or {}
    yield from _data_differences(ours, theirs)
    changed = [name for name in theirs if _inputs_changed(ours.get(name), theirs[name])]
    if changed and base.get("versions") != candidate.get("versions"):
        made = ", ".join(f"{name} {version}" for name, version in sorted((base.get("versions") or {}).items()))
        yield f"the prompts or pixels of {', '.join(changed)} are not those of the base, which other versions made ({made or 'unknown'})"


def _data_differences(base: Mapping[str, Any], candidate: Mapping[str, Any]) -> Iterator[str]:
    for name, theirs in candidate.items():
        ours = base.get(name)
        if ours is None:
            yield f"the base has no set {name}; it has {', '.join(base) or 'none'}"
            continue
        words = {
            "digest": "other items",
            "prompts": "other prompts",
            "task": "another task",
            "metric": "another metric",
            "max_new_tokens": "another max_new_tokens",
        }
        unlike = [key for key in words if ours.get(key) != theirs[key]]
        found = [f"{words[key]} ({str(ours.get(key))[:SHOWN]}, now {str(theirs[key])[:SHOWN]})" for key in unlike]
        if found:
            yield f"set {name} of the base has {', '.join(found)}"


def _is_alike(base: Any, candidate: Any) -> bool:
    """Equal, or not known because a server decides it."""
    if isinstance(base, Mapping) and isinstance(candidate, Mapping):
        return all(_is_alike(base.get(key), candidate.get(key)) for key in base.keys() | candidate.keys())
    return base == candidate or SERVERS_OWN in (base, candidate)


def _inputs_changed(base: Mapping[str, Any] | None, candidate: Mapping[str, Any]) -> bool:
    return base is not None and None not in (base.get("inputs"), candidate.get("inputs")) and base["inputs"] != candidate["inputs"]
