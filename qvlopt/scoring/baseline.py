"""A baseline as a file: the answers of one model with their scores and conditions, to be committed and compared with later.

One JSON document with one line an item, in the order of the sets, so that a change shows as a few lines. Answers are kept
and scored again, so that a mended metric changes both sides. Nothing in it depends on when or where it was made.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import qvlopt
from qvlopt.artifact.digest import digest_of
from qvlopt.errors import NotComparableError
from qvlopt.report.plain import json_text
from qvlopt.runtime.engine import Answer
from qvlopt.scoring.conditions import conditions_of
from qvlopt.scoring.evaluate import Answered, EngineRun, EvalSet
from qvlopt.scoring.noise import Noise
from qvlopt.scoring.score import score_answers

KIND = "baseline"
SCHEMA_VERSION = 1
MAKE_AGAIN = "make it again: qvlopt evaluate CANDIDATE --set evaluate.save_baseline=FILE --overwrite"


def baseline_text(name: str, run: EngineRun, sets: Sequence[EvalSet], noise: Noise | None = None) -> str:
    """The file for what `run` answered. `noise` goes along where the A/A check was made."""
    items = [item for each in sets for item in _items(each, run.answered[each.name])]
    head = {
        "schema_version": SCHEMA_VERSION,
        "tool": "qvlopt",
        "kind": KIND,
        "version": qvlopt.__version__,
        "model": name,
        "fingerprint": dict(run.fingerprint),
        "conditions": conditions_of(run, sets),
        "noise": asdict(noise) if noise else None,
        "scores": {each.name: _scores(each, run.answered[each.name]) for each in sets},
        "items_sha256": digest_of(items),
    }
    lines = ",\n".join(json_text(item, indent=None) for item in items)
    return json_text(head)[: -len("\n}")] + ',\n  "items": [\n' + lines + "\n]}\n"


class Baseline(NamedTuple):
    """A run that was saved, and what the A/A check of that time found, where it was made."""

    run: EngineRun
    noise: Noise | None


def read_baseline(path: Path) -> Baseline:
    """The run that a baseline file holds. Raises NotComparableError for a file that is none, or whose items somebody edited."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        if document.get("kind") != KIND or document["schema_version"] > SCHEMA_VERSION:
            raise ValueError(f"kind {document.get('kind')!r}, schema version {document.get('schema_version')!r}")
        if digest_of(document["items"]) != document["items_sha256"]:
            raise NotComparableError(f"baseline {path}: its items are not those that were written (by digest)", MAKE_AGAIN)
        answered = {name: _answered([item for item in document["items"] if item["set"] == name]) for name in document["conditions"]["data"]}
        noise = document["noise"]
        found = Noise(**(noise | {"batches": tuple(noise["batches"])})) if noise else None
        return Baseline(EngineRun(answered, document["fingerprint"], document["conditions"]["batch"], saved=document["conditions"]), found)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise NotComparableError(f"baseline {path}: is no baseline that this version reads ({error})", MAKE_AGAIN) from error


def changes(old: EngineRun, new: EngineRun) -> str:
    """How many answers of a baseline would change, in words."""
    answers = [{(name, id): answer.text for name, side in run.answered.items() for id, answer in side.answers.items()} for run in (old, new)]
    shared = answers[0].keys() & answers[1].keys()
    other = sum(answers[0][key] != answers[1][key] for key in shared)
    return f"{other} of {len(shared)} answers change, {len(answers[1]) - len(shared)} are new, {len(answers[0]) - len(shared)} gone"


def _items(each: EvalSet, side: Answered) -> Iterator[dict[str, Any]]:
    metric = each.metrics.primary
    for sample in each.chosen:
        if sample.id in side.unreadable:
            yield {"set": each.name, "id": sample.id, "unreadable": side.unreadable[sample.id]}
        if sample.id not in side.answers:
            continue
        answer = side.answers[sample.id]
        score = score_answers([sample], [answer], [metric]).values(metric.name, [sample.id]).get(sample.id)
        yield {"set": each.name, "id": sample.id, "score": score, **_said(answer)}


def _said(answer: Answer) -> dict[str, Any]:
    row: dict[str, Any] = {"text": answer.text, "stop": answer.stop, "prompt_tokens": answer.prompt_tokens, "token_ids": list(answer.token_ids)}
    return row | {key: value for key, value in (("error", answer.error), ("new_tokens", answer.new_tokens)) if value is not None}


def _scores(each: EvalSet, side: Answered) -> dict[str, float | None]:
    samples = [sample for sample in each.samples if sample.id in side.answers]
    table = score_answers(samples, [side.answers[sample.id] for sample in samples], each.metrics.all)
    return {metric.name: table.mean(metric.name, [sample.id for sample in samples]) for metric in each.metrics.all}


def _answered(items: Sequence[Mapping[str, Any]]) -> Answered:
    answers = {item["id"]: _answer(item) for item in items if "unreadable" not in item}
    return Answered(answers, {item["id"]: item["unreadable"] for item in items if "unreadable" in item}, {})


def _answer(item: Mapping[str, Any]) -> Answer:
    said = (tuple(item["token_ids"]), item["text"], item["stop"], item["prompt_tokens"])
    return Answer(item["id"], *said, error=item.get("error"), new_tokens=item.get("new_tokens"))
