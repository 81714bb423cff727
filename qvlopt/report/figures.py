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
        needed = f"; about {metric['n_needed']:,} items would be needed (80 % power)" if metric.get("n_needed") else ""
        return f"cannot rule out a drop of more than {margin}: {seen}{needed}"
    if metric.get("drop_within_margin"):
        return f"a drop is shown, but one of less than {margin}: {seen}"
    return f"no drop of {margin}: {seen}"


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
