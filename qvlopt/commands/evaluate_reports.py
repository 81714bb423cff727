"""The report files of an evaluation beyond JSON and items: what the recipe asks for, from the same plain values."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from PIL.Image import Image

from qvlopt.report.github import tell_github
from qvlopt.report.html import html_page
from qvlopt.report.junit import junit_xml
from qvlopt.scoring.compare import Comparison
from qvlopt.scoring.predictions import prediction_files

log = logging.getLogger(__name__)

NAMES = {"html": "report.html", "md": "report.md", "junit": "junit.xml"}
"""Files by the kinds of `evaluate.reports`, what a person opens first at the front. report.json and items.jsonl are always
there: the others are made of them."""

PREDICTIONS = "predictions"
"""The kind that writes every answer for lmms-eval and VLMEvalKit, two files a set."""


def report_files(
    document: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], comparisons: Sequence[Comparison], kinds: Iterable[str], *, markdown: str
) -> dict[str, str]:
    """Text by file name for the `kinds` of report. `document` is report.json, `rows` are those of items.jsonl."""
    samples = {(result.each.name, sample.id): sample for comparison in comparisons for result in comparison.sets for sample in result.each.chosen}

    def pictures(name: str, id: str) -> Iterable[Image]:
        return (image.load() for image in samples[name, id].images)

    policy = document["fingerprint"]["gate"]["on_inconclusive"]
    make = {
        "md": lambda: markdown,
        "html": lambda: html_page(document, rows, pictures),
        "junit": lambda: junit_xml(document, on_inconclusive=policy),
    }
    asked = set(kinds)
    predictions = prediction_files(comparisons) if PREDICTIONS in asked else {}
    return {NAMES[kind]: make[kind]() for kind in NAMES if kind in asked} | predictions


def tell_ci(document: Mapping[str, Any], markdown: str) -> None:
    """In a GitHub job: the step's summary and outputs. What cannot be written is a warning, for the report is there."""
    for problem in tell_github(document, markdown):
        log.warning("%s", problem)
