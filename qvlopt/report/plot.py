"""Small SVG drawings of differences with their intervals, all of a table on one scale. Colours come from the page's style."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

WIDTH, HEIGHT, EDGE = 260, 24, 14
"""Pixels of a drawing, and what stays free at its left and right."""

STEPS = (0.001, 0.002, 0.003, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0)


def plot_reach(metrics: Iterable[Mapping[str, Any]]) -> float:
    """The difference at both ends of the scale: the first round number that holds every interval and margin."""
    values = [abs(metric[key]) for metric in metrics for key in ("ci_low", "ci_high", "margin", "delta") if metric.get(key) is not None]
    widest = max(values, default=0.0) * 1.1
    return next((step for step in STEPS if step >= widest), 1.0)


def axis(reach: float) -> str:
    """The scale's ends and its middle, in points."""
    marks = ((-reach, "start"), (0.0, "middle"), (reach, "end"))
    texts = [
        f'<text x="{_x(value, reach) if value == 0 else (0 if value < 0 else WIDTH)}" y="12" text-anchor="{anchor}">{_label(value)}</text>'
        for value, anchor in marks
    ]
    return f'<svg width="{WIDTH}" height="16" role="img" aria-label="scale in points">{"".join(texts)}</svg>'


def interval_plot(metric: Mapping[str, Any], reach: float) -> str:
    """The interval as a bar, the difference as a ring, the margin as a broken line, no change as a thin one."""
    low, high, delta, margin = (metric.get(key) for key in ("ci_low", "ci_high", "delta", "margin"))
    if low is None or high is None or delta is None:
        return ""
    state = f"is-{metric['verdict']}" if metric.get("verdict") in ("pass", "fail", "inconclusive") else ""
    middle = HEIGHT / 2
    parts = [f'<line class="zero" x1="{_x(0, reach)}" x2="{_x(0, reach)}" y1="1" y2="{HEIGHT - 1}"/>']
    if margin is not None:
        parts.append(f'<line class="margin" x1="{_x(-margin, reach)}" x2="{_x(-margin, reach)}" y1="1" y2="{HEIGHT - 1}"/>')
    parts.append(f'<line class="bar {state}" x1="{_x(low, reach)}" x2="{_x(high, reach)}" y1="{middle}" y2="{middle}"/>')
    parts.append(f'<circle class="dot {state}" cx="{_x(delta, reach)}" cy="{middle}" r="5"/>')
    label = f"difference {100 * delta:+.2f} points, interval {100 * low:+.2f} to {100 * high:+.2f}"
    return f'<svg width="{WIDTH}" height="{HEIGHT}" role="img" aria-label="{label}"><title>{label}</title>{"".join(parts)}</svg>'


def _x(value: float, reach: float) -> float:
    inside = max(-reach, min(reach, value))
    return round(EDGE + (WIDTH - 2 * EDGE) * (inside + reach) / (2 * reach), 1)


def _label(value: float) -> str:
    return "0" if value == 0 else f"{100 * value:+g}"
