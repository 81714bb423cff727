"""Results of evaluate as plain values, for what is made of them: documents, rows of items.jsonl and their pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from PIL import Image

from tests.documents import document_of

HOSTILE = (
    "::error file=x::owned",
    "::stop-commands::x",
    "##[command]x",
    "##vso[task.setvariable]x",
    "\x1b[31mred",
    "a\r\n::set-output name=x::y",
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "\u202eevil",
    "half \ud800 pair",
    "]]>&amp;\x00\x0b\ufffe",
    "| a | [x](http://y) @someone |",
)
"""Texts that a model or a file may hold and that must be shown, never obeyed."""


def metric(name: str = "ocr", **values: Any) -> dict[str, Any]:
    """One gated metric that passes; `values` replace its figures."""
    usual = {
        "name": name,
        "task": name,
        "metric": "exact_match",
        "primary": True,
        "n": 200,
        "n_failed": 0,
        "base": 0.9,
        "candidate": 0.895,
        "delta": -0.005,
        "ci_low": -0.0181,
        "ci_high": 0.0079,
        "ci_method": "tango",
        "margin": 0.02,
        "lost": 2,
        "gained": 1,
        "mde": 0.02,
        "n_needed": 232,
        "drop_within_margin": False,
        "floor": None,
        "verdict": "pass",
    }
    return usual | values


def informing(name: str = "ocr", **values: Any) -> dict[str, Any]:
    """One metric without a gate."""
    none = dict.fromkeys(("ci_low", "ci_high", "ci_method", "margin", "lost", "gained", "mde", "n_needed", "drop_within_margin"))
    return metric(name, metric="cer", primary=False, base=0.02, candidate=0.03, delta=0.01, verdict=None, **none) | values


def result(*metrics: Mapping[str, Any], verdict: str = "pass", **values: Any) -> dict[str, Any]:
    """One entry of `results`."""
    names = dict.fromkeys(each["name"] for each in metrics)
    counts = {"n": 200, "n_failed": 0, "n_empty": 0, "n_truncated": 1}
    usual = {
        "candidate": "out/awq",
        "baseline": "builtin:nano",
        "verdict": verdict,
        "reasons": [],
        "metrics": [dict(each) for each in metrics],
        "damage": {"kl_mean": None, "top1_agreement": None, "vision_cosine_min": None},
        "sets": [
            {"name": name, "task": name, "items": 200, "compared": 200, "failures": [], "n_empty_ref": 0, "base": counts, "candidate": counts}
            for name in names
        ],
        "by_size": [
            {"name": name, "metric": "exact_match", "size": "96x64", "n": 200, "base": 0.9, "candidate": 0.895, "delta": -0.005} for name in names
        ],
    }
    return usual | values


def evaluation(*results: Mapping[str, Any], verdict: str = "pass", exit_code: int = 0, **values: Any) -> dict[str, Any]:
    """The whole document of evaluate."""
    body = {"verdict": verdict, "results": [dict(each) for each in results], "report": "out/evaluate/20261130T120000Z/report.md"}
    fingerprint = {"batch": 8, "seed": 0, "gate": {"on_inconclusive": "fail"}}
    more = {"output": "out/evaluate/20261130T120000Z", "started": "2026-11-30T12:00:00Z", "fingerprint": fingerprint}
    return document_of("evaluate", body | more | values, exit_code=exit_code)


def row(id: str, base: str | None, said: str, /, **values: Any) -> dict[str, Any]:
    """One row of items.jsonl; an answer equal to the expected one scores 1."""
    expected = values.get("answers", ["A 17"])

    def answer(text: str) -> dict[str, Any]:
        score = float(text in expected)
        return {"text": text, "stop": "eos", "error": None, "prompt_tokens": 30, "new_tokens": len(text), "scores": {"exact_match": score}}

    usual = {
        "candidate": "out/awq",
        "set": "ocr",
        "id": id,
        "task": "ocr",
        "cluster": id,
        "size": [[96, 64]],
        "question": "What does the sign say?",
        "answers": list(expected),
        "base_answer": None if base is None else answer(base),
        "candidate_answer": answer(said),
        "failed": None,
    }
    return usual | values


def pictures(_set: str, _id: str) -> Sequence[Image.Image]:
    """The same small picture for every item."""
    return [Image.new("RGB", (96, 64), (200, 80, 40))]
