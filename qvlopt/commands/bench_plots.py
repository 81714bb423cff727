"""Bench's plots: where the time goes, how it grows with picture and prompt, what accuracy costs in memory.

Each is drawn once and written as SVG and PNG. Colours are Paul Tol's bright scheme, which people who do not see all colours
can tell apart; engines differ in their markers as well.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from qvlopt.report.plain import safe
from qvlopt.timing.result import BenchFindings, CaseResult, EngineResult
from qvlopt.timing.samples import Samples

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

STAGE_COLOURS = {"preprocess": "#BBBBBB", "vision": "#4477AA", "prefill": "#66CCEE", "decode": "#EE6677", "detokenise": "#AA3377"}
REST = "between stages"
UNSEEN = {"time to first token": "#99B6D2", "decode": "#EE6677"}
"""For a server, whose stages cannot be seen."""
ENGINE_COLOURS = ("#4477AA", "#EE6677", "#228833", "#AA3377", "#CCBB44", "#66CCEE", "#444444")
MARKERS = "osD^vPX"
MIB = 1 << 20
DPI = 120


class Plot(NamedTuple):
    """A drawing under its file name, with what it shows in words; `svg` and `png` are whole files."""

    name: str
    words: str
    svg: str
    png: bytes


class Point(NamedTuple):
    """An engine's memory in bytes and its score, a share."""

    name: str
    peak_bytes: float
    score: float


def draw_plots(findings: BenchFindings, scores: Mapping[str, float]) -> tuple[Plot, ...]:
    """Everything that there are numbers for. `scores` are shares by candidate, from an evaluation of the same artifacts."""
    plots = []
    rows = list(_rows(findings.engines))
    if rows:
        case = findings.workload.cases[0].name
        plots.append(_plot("stages", f"Median time of one request by stage, for each engine: {case}", _stages(rows, case)))
        plots.append(_plot("latency", "Time to first token against picture size and against prompt length, for each engine", _latency(findings)))
    points = [
        Point(engine.name, max(engine.peak_rss.values), scores[engine.candidate])
        for engine in findings.engines
        if engine.candidate in scores and engine.peak_rss.values
    ]
    if len(points) > 1:
        plots.append(_plot("memory-accuracy", "Score against peak memory, for each engine: up and to the left is better", _pareto(points)))
    return tuple(plots)


def stage_parts(case: CaseResult) -> dict[str, float]:
    """Median seconds of each part of a request, in order; of a server only what can be told from outside."""
    parts: dict[str, float] = {}
    whole = case.samples("e2e").median
    for stage in STAGE_COLOURS:
        sums = Samples(tuple(sum(each.times.stages[stage]) for each in case.good if stage in each.times.stages))
        if sums.median is not None:
            parts[stage] = sums.median
    if parts:
        return parts | {REST: max(0.0, (whole or 0.0) - sum(parts.values()))}
    first = case.samples("ttft").median
    return {"time to first token": first, "decode": whole - first} if first is not None and whole is not None else {}


def _rows(engines: Sequence[EngineResult]) -> Iterator[tuple[str, dict[str, float]]]:
    """The bars: every engine in the first case, in each state that it was measured in."""
    for engine in engines:
        for case in engine.cases:
            if case.case == engine.cases[0].case and (parts := stage_parts(case)):
                yield engine.name if case.state == "cold" else f"{engine.name}, {case.state}", parts


def _figure(width: float, height: float) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained", facecolor="white")


def _stages(rows: Sequence[tuple[str, dict[str, float]]], case: str) -> Figure:
    figure = _figure(9, 1.6 + 0.45 * len(rows))
    axes = figure.add_subplot()
    colours = {**UNSEEN, **STAGE_COLOURS, REST: "#444444"}
    shown: set[str] = set()
    for place, (_, parts) in enumerate(rows):
        left = 0.0
        for stage, seconds in parts.items():
            axes.barh(place, 1000 * seconds, left=1000 * left, color=colours[stage], height=0.62, label=None if stage in shown else stage)
            shown.add(stage)
            left += seconds
        axes.text(1000 * left, place, f"  {1000 * left:,.0f} ms", va="center", fontsize=9)
    axes.set_yticks(range(len(rows)), [_plain(name) for name, _ in rows])
    axes.invert_yaxis()
    axes.set_xlim(right=1150 * max(sum(parts.values()) for _, parts in rows))  # room for the sums
    axes.set_xlabel("milliseconds a request (medians of each stage)")
    axes.set_title(f"Where the time goes: {case}", loc="left", fontweight="bold")
    figure.legend(loc="outside lower center", ncols=6, frameon=False, fontsize=9)
    _tidy(axes)
    axes.grid(visible=False, axis="y")
    return figure


def _latency(findings: BenchFindings) -> Figure:
    figure = _figure(10, 4.2)
    left, right = figure.subplots(1, 2, sharey=True)
    base = findings.workload.cases[0]
    for number, engine in enumerate(findings.engines):
        lone = [case for case in engine.cases if case.state == "cold" and case.case.concurrency == base.concurrency]
        sizes = [(case.case.width * case.case.height / 1e6, case) for case in lone if case.case.prompt_tokens == base.prompt_tokens]
        lengths = [(case.case.prompt_tokens, case) for case in lone if (case.case.width, case.case.height) == (base.width, base.height)]
        for axes, points in ((left, sizes), (right, lengths)):
            _line(axes, sorted(points, key=lambda point: point[0]), engine.name, number)
    left.set_xlabel(f"picture, megapixels (prompt of {base.prompt_tokens} tokens)")
    right.set_xlabel(f"prompt, tokens beside the picture's ({base.width}x{base.height})")
    left.set_ylabel("time to first token, ms")
    left.set_title("Growth with the picture", loc="left", fontweight="bold")
    right.set_title("Growth with the prompt", loc="left", fontweight="bold")
    for axes in (left, right):
        axes.set_ylim(bottom=0)
        axes.set_xlim(left=0)
        axes.margins(x=0.08)
        _tidy(axes)
    handles, labels = left.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    return figure


def _line(axes: Axes, points: Sequence[tuple[float, CaseResult]], name: str, number: int) -> None:
    """Medians, with the middle 80 % of the values as bars."""
    known = [(x, samples) for x, case in points if (samples := case.samples("ttft")).values]
    if not known:
        return
    middles = [1000 * (samples.median or 0.0) for _, samples in known]
    below = [middle - 1000 * (samples.percentile(10) or 0.0) for middle, (_, samples) in zip(middles, known, strict=True)]
    above = [1000 * (samples.p90 or 0.0) - middle for middle, (_, samples) in zip(middles, known, strict=True)]
    style: dict[str, Any] = {
        "color": ENGINE_COLOURS[number % len(ENGINE_COLOURS)],
        "marker": MARKERS[number % len(MARKERS)],
        "markersize": 5,
        "capsize": 3,
    }
    axes.errorbar([x for x, _ in known], middles, yerr=[below, above], label=_plain(name), linewidth=1.4, **style)


def _pareto(points: Sequence[Point]) -> Figure:
    figure = _figure(7, 4.4)
    axes = figure.add_subplot()
    for number, point in enumerate(points):
        colour = ENGINE_COLOURS[number % len(ENGINE_COLOURS)]
        place = (point.peak_bytes / MIB, 100 * point.score)
        axes.plot(*place, MARKERS[number % len(MARKERS)], color=colour, markersize=9, alpha=0.85, label=_plain(point.name))
    axes.margins(x=0.25, y=0.25)
    axes.set_xlabel("peak memory, MiB")
    axes.set_ylabel("mean of the primary scores, %")
    axes.set_title("What accuracy costs", loc="left", fontweight="bold")
    figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    _tidy(axes)
    return figure


def _plain(name: str) -> str:
    """A name as it is: controls spelled out, and dollar signs that begin no formula."""
    return safe(name).replace("$", r"\$")


def _tidy(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="both", color="#DDDDDD", linewidth=0.6)
    axes.set_axisbelow(True)


def _plot(name: str, words: str, figure: Figure) -> Plot:
    """Both files; the same numbers give the same SVG, whenever it is drawn."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    FigureCanvasAgg(figure)
    settings: dict[str, Any] = {"svg.hashsalt": name}
    with rc_context(settings), io.StringIO() as svg, io.BytesIO() as png:
        figure.savefig(svg, format="svg", metadata={"Date": None})
        figure.savefig(png, format="png", dpi=DPI)
        return Plot(name, words, svg.getvalue(), png.getvalue())
