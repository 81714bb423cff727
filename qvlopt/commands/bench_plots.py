"""Bench's plots: where the time goes, how it grows with picture and prompt, what accuracy costs in memory.

Each is drawn once and written as SVG and PNG. Colours are Paul Tol's bright scheme, which people who do not see all colours
can tell apart; engines differ in their markers as well.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from qvlopt.report.plain import safe
from qvlopt.timing.plan import Case, Workload
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


class Panel(NamedTuple):
    """Cases that differ in one thing: what it is called, and where each of them is on its scale."""

    title: str
    label: str
    places: Mapping[Case, float]


class Point(NamedTuple):
    """An engine's memory in bytes and its score, a share."""

    name: str
    peak_bytes: float
    score: float


def draw_plots(findings: BenchFindings, scores: Mapping[str, float]) -> tuple[Plot, ...]:
    """Everything that there are numbers for. `scores` are shares by the engine's name, from an evaluation of the same weights."""
    plots = []
    rows = list(_rows(findings.engines))
    if rows:
        case = findings.workload.cases[0].name
        plots.append(_plot("stages", f"Median time of one request by stage, for each engine: {case}", _stages(rows, case)))
    if rows and (panels := _panels(findings.workload)):
        grows = " and ".join(panel.title.removeprefix("Growth with ") for panel in panels)
        plots.append(_plot("latency", f"How the time to first token grows with {grows}, for each engine", _latency(findings.engines, panels)))
    points = [
        Point(engine.name, max(engine.peak_rss.values), scores[engine.name])
        for engine in findings.engines
        if engine.name in scores and engine.peak_rss.values
    ]
    if len(points) > 1:
        plots.append(_plot("memory-accuracy", "Score against peak memory, for each engine: up and to the left is better", _pareto(points)))
    return tuple(plots)


def stage_parts(case: CaseResult) -> dict[str, float]:
    """Median seconds of each part of a request, in order; of a server only what can be told from outside."""
    parts: dict[str, float] = {}
    for stage in STAGE_COLOURS:
        sums = Samples(tuple(sum(each.times.stages[stage]) for each in case.good if stage in each.times.stages))
        if sums.median is not None:
            parts[stage] = sums.median
    if parts:
        # of each call by itself: the median of sums is not the sum of medians, and the difference would look like work
        rests = Samples(tuple(each.times.wall - sum(map(sum, each.times.stages.values())) for each in case.good))
        return parts | {REST: max(0.0, rests.median or 0.0)}
    first, whole = case.samples("ttft").median, case.samples("e2e").median
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
        axes.text(1000 * left, place, f"  {1000 * left:,.0f} ms" if left >= 0.01 else f"  {1000 * left:.1f} ms", va="center", fontsize=9)
    axes.set_yticks(range(len(rows)), [_plain(name) for name, _ in rows])
    axes.invert_yaxis()
    axes.set_xlim(right=1150 * max(sum(parts.values()) for _, parts in rows))  # room for the sums
    axes.set_xlabel("milliseconds a request (medians of each stage)")
    axes.set_title(f"Where the time goes: {case}", loc="left", fontweight="bold")
    figure.legend(loc="outside lower center", ncols=7, frameon=False, fontsize=9)
    _tidy(axes)
    axes.grid(visible=False, axis="y")
    return figure


def _panels(workload: Workload) -> tuple[Panel, ...]:
    """What grows in this workload: the picture, the prompt, both or nothing."""
    base = workload.cases[0]
    alike = [case for case in workload.cases if case.concurrency == base.concurrency]
    sizes = {case: case.width * case.height / 1e6 for case in alike if case.prompt_tokens == base.prompt_tokens}
    lengths = {case: float(case.prompt_tokens) for case in alike if (case.width, case.height) == (base.width, base.height)}
    panels = (
        Panel("Growth with the picture", f"picture, megapixels (prompt of {base.prompt_tokens} tokens)", sizes),
        Panel("Growth with the prompt", f"prompt, tokens beside the picture's ({base.width}x{base.height})", lengths),
    )
    return tuple(panel for panel in panels if len(set(panel.places.values())) > 1)


def _latency(engines: Sequence[EngineResult], panels: Sequence[Panel]) -> Figure:
    figure = _figure(5 * max(1.4, len(panels)), 4.2)
    drawings = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axes, panel in zip(drawings, panels, strict=True):
        for number, engine in enumerate(engines):
            points = [(panel.places[case.case], case) for case in engine.cases if case.state == "cold" and case.case in panel.places]
            _line(axes, sorted(points, key=lambda point: point[0]), engine.name, number)
        axes.set_xlabel(panel.label)
        axes.set_title(panel.title, loc="left", fontweight="bold")
        axes.margins(x=0.08)
        axes.set_ylim(bottom=0)
        axes.set_xlim(left=0)
        _tidy(axes)
    drawings[0].set_ylabel("time to first token, ms")
    handles, labels = drawings[0].get_legend_handles_labels()
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
