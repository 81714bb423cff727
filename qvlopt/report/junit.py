"""An evaluation as JUnit XML, in the subset that GitLab, Jenkins and others read: one test case a metric and candidate.

A regression is a failure, what could not be judged an error, and too few items a failure or a skip as the recipe's
`on_inconclusive` says. Figures without a gate are skipped cases, so that they are seen and count for nothing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any
from xml.etree.ElementTree import Element, SubElement, indent, tostring

from qvlopt.report.figures import described, reading
from qvlopt.report.plain import safe, short

ILLEGAL = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""What XML 1.0 cannot hold, not even as an entity (Extensible Markup Language 1.0, production 2)."""

KINDS = ("failure", "error", "skipped")


def junit_xml(document: Mapping[str, Any], *, on_inconclusive: str) -> str:
    """`document` is evaluate's JSON; `on_inconclusive` is the gate's policy: fail, warn or pass."""
    root = Element("testsuites", name="qvlopt evaluate")
    for result in document["results"]:
        _suite(root, document, result, on_inconclusive)
    _count(root, list(root.iter("testcase")))
    indent(root)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + tostring(root, encoding="unicode") + "\n"


def _suite(root: Element, document: Mapping[str, Any], result: Mapping[str, Any], policy: str) -> None:
    name = _legal(f"qvlopt.evaluate.{result['candidate']}")
    place = _legal(f"qvlopt.evaluate.{str(result['candidate']).replace('.', '_')}")  # readers take a class's dots for packages
    suite = SubElement(root, "testsuite", name=name, time=f"{float(document.get('seconds', 0)):.3f}")
    if document.get("started"):
        suite.set("timestamp", str(document["started"]).removesuffix("Z"))
    properties = SubElement(suite, "properties")
    for key in ("candidate", "baseline", "verdict"):
        SubElement(properties, "property", name=key, value=_legal(str(result.get(key))))
    cases = [_metric_case(suite, place, metric, policy) for metric in result["metrics"]]
    cases.append(_whole_case(suite, place, result, policy))
    _count(suite, cases)


def _metric_case(suite: Element, place: str, metric: Mapping[str, Any], policy: str) -> Element:
    case = SubElement(suite, "testcase", name=_legal(f"{metric['name']} {metric['metric']}"), classname=place, time="0")
    text = reading(metric)
    if metric["verdict"] is None:
        SubElement(case, "skipped", message=_legal(f"for information, no gate: {text}"))
    else:
        _outcome(case, metric["verdict"], text, policy)
    SubElement(case, "system-out").text = _legal(described(metric))
    return case


def _whole_case(suite: Element, place: str, result: Mapping[str, Any], policy: str) -> Element:
    """What no single metric says: failed items, unlike conditions and gates that other figures have."""
    case = SubElement(suite, "testcase", name="evaluation as a whole", classname=place, time="0")
    reasons = "; ".join(result.get("reasons", ())) or f"verdict {result['verdict']}"
    own = {metric["verdict"] for metric in result["metrics"]}
    if result["verdict"] not in own:  # otherwise a metric's own case has said it
        _outcome(case, result["verdict"], reasons, policy)
    lines = [f"failed: {each['name']} {item['id']}: {item['reason']}" for each in result.get("sets", ()) for item in each["failures"]]
    SubElement(case, "system-out").text = _legal("\n".join([reasons, *map(short, lines[:200])]))
    return case


def _outcome(case: Element, verdict: str, text: str, policy: str) -> None:
    if verdict == "fail":
        SubElement(case, "failure", type="Regression", message=_legal(text)).text = _legal(text)
    elif verdict == "inconclusive" and policy == "fail":
        SubElement(case, "failure", type="Inconclusive", message=_legal(text)).text = _legal(text)
    elif verdict == "inconclusive":
        SubElement(case, "skipped", message=_legal(f"inconclusive: {text}"))
    elif verdict != "pass":
        SubElement(case, "error", type={"not_comparable": "NotComparable"}.get(verdict, "Error"), message=_legal(text)).text = _legal(text)


def _count(suite: Element, cases: Sequence[Element]) -> None:
    suite.set("tests", str(len(cases)))
    for kind, key in zip(KINDS, ("failures", "errors", "skipped"), strict=True):
        suite.set(key, str(sum(case.find(kind) is not None for case in cases)))


def _legal(text: str) -> str:
    """Text for an attribute or an element: controls are spelled out, and what is left over that XML cannot hold is `?`."""
    return ILLEGAL.sub("?", safe(text, keep_lines=True))
