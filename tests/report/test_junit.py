"""JUnit XML parses, its counts agree with its cases, and hostile text is text."""

from __future__ import annotations

from xml.etree.ElementTree import Element, fromstring

import pytest

from qvlopt.report.junit import junit_xml
from tests.evaluations import HOSTILE, evaluation, informing, metric, result

KINDS = {"failures": "failure", "errors": "error", "skipped": "skipped"}


def parsed(document: dict, policy: str = "fail") -> Element:  # type: ignore[type-arg]
    return fromstring(junit_xml(document, on_inconclusive=policy))


def case(root: Element, name: str) -> Element:
    found = [element for element in root.iter("testcase") if element.get("name") == name]
    assert len(found) == 1
    return found[0]


def check_counts(root: Element) -> None:
    """Readers trust the attributes, so they must be what is there, of the root and of every suite."""
    for suite in [root, *root.iter("testsuite")]:
        cases = list(suite.iter("testcase"))
        assert suite.get("tests") == str(len(cases))
        for attribute, tag in KINDS.items():
            assert suite.get(attribute) == str(sum(each.find(tag) is not None for each in cases))


def test_every_metric_of_every_candidate_is_a_case() -> None:
    second = result(metric("ocr"), candidate="out/other")
    root = parsed(evaluation(result(metric("ocr"), informing("ocr"), metric("vqa")), second, seconds=12.5))
    assert [suite.get("name") for suite in root.iter("testsuite")] == ["qvlopt.evaluate.out/awq", "qvlopt.evaluate.out/other"]
    names = [each.get("name") for each in next(root.iter("testsuite")).iter("testcase")]
    assert names == ["ocr exact_match", "ocr cer", "vqa exact_match", "evaluation as a whole"]
    assert next(root.iter("testcase")).get("classname") == "qvlopt.evaluate.out/awq"
    assert next(root.iter("testsuite")).get("timestamp") == "2026-11-30T12:00:00"
    check_counts(root)


@pytest.mark.parametrize(
    ("verdict", "policy", "tag", "kind"),
    [
        ("fail", "fail", "failure", "Regression"),
        ("inconclusive", "fail", "failure", "Inconclusive"),
        ("inconclusive", "warn", "skipped", None),
        ("inconclusive", "pass", "skipped", None),
        ("not_comparable", "fail", "error", "NotComparable"),
        ("error", "pass", "error", "Error"),
    ],
)
def test_what_is_no_pass_has_its_own_mark(verdict: str, policy: str, tag: str, kind: str | None) -> None:
    root = parsed(evaluation(result(metric("ocr", verdict=verdict), metric("vqa"), verdict=verdict), verdict=verdict), policy)
    marked = case(root, "ocr exact_match")
    assert [child.tag for child in marked if child.tag != "system-out"] == [tag]
    assert marked.find(tag).get("type") == kind  # type: ignore[union-attr]
    assert [child.tag for child in case(root, "vqa exact_match")] == ["system-out"]
    check_counts(root)


def test_figures_without_a_gate_are_seen_and_count_for_nothing() -> None:
    root = parsed(evaluation(result(metric("ocr"), informing("ocr"))))
    skipped = case(root, "ocr cer").find("skipped")
    assert skipped is not None
    assert "no gate" in (skipped.get("message") or "")
    assert root.get("failures") == root.get("errors") == "0"


def test_a_verdict_that_no_metric_has_is_the_whole_evaluations() -> None:
    broken = result(metric("ocr"), verdict="error", reasons=["6 items failed, gate.max_failed is 0"])
    broken["sets"][0]["failures"] = [{"id": "ocr-1", "reason": "0.png: is empty"}]
    root = parsed(evaluation(broken, verdict="error", exit_code=5))
    whole = case(root, "evaluation as a whole")
    assert whole.find("error").get("message") == "6 items failed, gate.max_failed is 0"  # type: ignore[union-attr]
    assert "ocr-1: 0.png: is empty" in (whole.findtext("system-out") or "")
    check_counts(root)


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_text_leaves_the_file_readable_and_obeys_nothing(text: str) -> None:
    broken = result(metric("ocr", verdict="fail"), verdict="error", candidate=text, reasons=[text])
    broken["sets"][0]["failures"] = [{"id": text, "reason": text}]
    xml = junit_xml(evaluation(broken, verdict="error"), on_inconclusive="fail")
    root = fromstring(xml)
    check_counts(root)
    xml.encode("utf-8")
    assert not [line for line in xml.splitlines() if line.lstrip().startswith("::")]
    assert "##[" not in xml
    assert "##vso[" not in xml
    assert "\x1b" not in xml
    assert "\u202e" not in xml


def test_dots_of_a_candidate_are_no_packages() -> None:
    root = parsed(evaluation(result(metric(), candidate="out/v1.2/awq")))
    assert next(root.iter("testcase")).get("classname") == "qvlopt.evaluate.out/v1_2/awq"
    assert next(root.iter("testsuite")).get("name") == "qvlopt.evaluate.out/v1.2/awq"
