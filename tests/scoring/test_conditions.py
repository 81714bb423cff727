"""What must be equal for a comparison, and what need not."""

from __future__ import annotations

from typing import Any

import pytest

from qvlopt.runtime.engine import SERVERS_OWN
from qvlopt.scoring.conditions import differences

DATA = {"digest": "d" * 64, "items": 3, "prompts": "p", "task": "ocr", "metric": "exact_match", "max_new_tokens": 32, "inputs": "i"}
BASE: dict[str, Any] = {
    "pixels": {"min": 1, "max": 9},
    "generation": {"sampling": "greedy", "eos_ids": [1]},
    "batch": 8,
    "data": {"ocr": DATA},
    "versions": {"qvlopt": "1", "pillow": "12"},
}


def changed(**values: Any) -> dict[str, Any]:
    return BASE | values


def test_equal_conditions_are_comparable() -> None:
    assert list(differences(BASE, changed())) == []


@pytest.mark.parametrize(
    ("candidate", "words"),
    [
        (changed(pixels={"min": 1, "max": 8}), "pixels is"),
        (changed(generation={"sampling": "top_p", "eos_ids": [1]}), "generation is"),
        (changed(batch=16), "in batches of 8, the candidate of 16"),
        (changed(data={"ocr": DATA | {"digest": "e" * 64}}), "set ocr of the base has other items"),
        (changed(data={"ocr": DATA | {"prompts": "q"}}), "other prompts (p, now q)"),
        (changed(data={"ocr": DATA | {"max_new_tokens": 64}}), "another max_new_tokens (32, now 64)"),
        (changed(data={"ocr": DATA | {"metric": "anls"}}), "another metric (exact_match, now anls)"),
        (changed(data={"ocr": DATA, "vqa": DATA}), "the base has no set vqa; it has ocr"),
        (changed(data={"ocr": DATA | {"inputs": "j"}}, versions={"qvlopt": "1", "pillow": "13"}), "which other versions made (pillow 12, qvlopt 1)"),
    ],
)
def test_other_conditions_are_not(candidate: dict[str, Any], words: str) -> None:
    (reason,) = differences(BASE, candidate)
    assert words in reason


@pytest.mark.parametrize(
    "candidate",
    [
        changed(versions={"qvlopt": "2", "pillow": "13"}),  # other versions that give the same pixels and prompts
        changed(data={"ocr": DATA | {"inputs": "j"}}),  # a candidate that prepares items otherwise is to be judged by its answers
        changed(data={"ocr": DATA | {"inputs": None}}, versions={"qvlopt": "2"}),
        changed(pixels=SERVERS_OWN, generation={"sampling": "greedy", "eos_ids": SERVERS_OWN}),
        changed(batch=None),
    ],
)
def test_what_is_recorded_only_does_not_keep_from_comparing(candidate: dict[str, Any]) -> None:
    assert list(differences(BASE, candidate)) == []


def test_a_base_may_have_more_sets() -> None:
    assert list(differences(changed(data={"ocr": DATA, "vqa": DATA}), BASE)) == []
