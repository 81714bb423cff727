"""The numbers of one metric of evaluate's JSON as words, the same in every kind of report."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

VERDICTS = {
    "pass": ("Pass", "No drop beyond the margin."),
    "fail": ("Fail", "A regression was demonstrated, or a threshold was broken."),
    "inconclusive": ("Inconclusive", "There are too few items to tell; this is neither a pass nor a regression."),
    "not_comparable": ("Not comparable", "The two sides answered under unlike conditions, or there is no base."),
    "error": ("Error", "More items failed than the gate allows."),
}
"""What people read for a verdict of the JSON, and what it means."""


def reading(metric: Mapping[str, Any]) -> str:
    """One line on what the verdict of a metric rests on."""
    floor, candidate = metric.get("floor"), metric.get("candidate")
    if floor is not None and (candidate is None or candidate < floor):
        return f"{percent(candidate)} % is below the floor of {percent(floor)} %"
    if metric.get("delta") is None or metric.get("ci_low") is None:
        change = "" if metric.get("delta") is None else f", {points(metric['delta'])} points from the base"
        return f"{percent(candidate)} % over {metric['n']} items{change}"
    seen = f"{points(metric['delta'])} points, interval {interval(metric)}, n = {metric['n']}"
    margin = f"{100 * metric['margin']:.2f} points"
    if metric["verdict"] == "fail":
        return f"dropped by more than {margin}: {seen}"
    if metric["verdict"] == "inconclusive":
        return f"{_unsure(metric, margin)}: {seen}{_needed(metric)}"
    if metric.get("drop_within_margin"):
        return f"a drop is shown, but one of less than {margin}: {seen}"
    return f"no drop of {margin}: {seen}"


def _unsure(metric: Mapping[str, Any], margin: str) -> str:
    """A drop that is demonstrated alone, and not among several metrics, is said to be that."""
    corrected = metric.get("p_drop_holm")
    if metric["ci_high"] < -metric["margin"] and corrected is not None:
        return f"looks like a drop of more than {margin}, but among several metrics chance may do that (p = {corrected:.2g} after Holm's correction)"
    return f"cannot rule out a drop of more than {margin}"


def _needed(metric: Mapping[str, Any]) -> str:
    needed = metric.get("n_needed")
    if not needed or metric["ci_high"] < -metric["margin"]:
        return ""
    if needed <= metric["n"]:
        return "; what was seen is close to the margin, more items may not decide"
    return f"; about {needed:,} items would be needed (80 % power)"


def described(metric: Mapping[str, Any]) -> str:
    """Every figure of a metric, a line each, as the JSON names them."""
    return "\n".join(f"{key}: {value}" for key, value in metric.items() if value is not None)


def percent(value: float | None) -> str:
    """A share as a percentage without its sign; a dash for none."""
    return "-" if value is None else f"{100 * value:.2f}"


def points(value: float | None) -> str:
    """A difference of shares in points, with its sign; a dash for none."""
    return "-" if value is None else f"{100 * value:+.2f}"


def interval(metric: Mapping[str, Any]) -> str:
    """The metric's interval in points."""
    return f"[{points(metric.get('ci_low'))}, {points(metric.get('ci_high'))}]"
