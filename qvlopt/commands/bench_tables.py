"""Bench's findings as tables of words, the same for a terminal, Markdown and HTML."""

from __future__ import annotations

from collections.abc import Iterator

from qvlopt.report.tables import Column, Table
from qvlopt.timing.comparison import GATED, Ratio
from qvlopt.timing.result import COVERED, BenchFindings, CaseResult, EngineResult
from qvlopt.timing.samples import NOISY_SPREAD, Samples
from qvlopt.timing.waiting import BUSY_SHARE

MIB = 1 << 20
WORDS = {"ttft": "TTFT", "tpot": "time per token", "e2e": "end to end", "peak_rss": "peak memory", "artifact_bytes": "files with weights"}
SIDE_BY_SIDE = ("e2e", "peak_rss")
"""Ratios shown of engines that are only set side by side."""


def bench_tables(findings: BenchFindings) -> tuple[Table, ...]:
    """One table of times a case, one of memory, one of limits, one of ratios; those without rows are left out."""
    tables = [*_case_tables(findings), _memory_table(findings), _limit_table(findings), _ratio_table(findings)]
    return tuple(table for table in tables if table.rows)


def headline(findings: BenchFindings) -> str:
    """What the comparison found, in a sentence."""
    comparison = findings.comparison
    if comparison.base is None:
        return "nothing was compared: one engine, no earlier run"
    if comparison.verdict is None:
        return f"set beside {comparison.base}; no verdict, since unlike engines were not asked to be equally fast"
    words = {
        "pass": f"no slower than {comparison.base} by more than {100 * comparison.tolerance:.0f} %",
        "fail": f"slower or larger than {comparison.base} by more than {100 * comparison.tolerance:.0f} %",
        "inconclusive": f"cannot be told from {comparison.base}",
        "not_comparable": f"not comparable with {comparison.base}",
    }
    return f"{comparison.verdict.replace('_', ' ')}: {words[comparison.verdict]}"


def remarks(findings: BenchFindings) -> tuple[str, ...]:
    """What readers of the numbers should know: warm-up, noise, stages that explain too little, failures, why nothing compares."""
    workload, load = findings.workload, findings.environment.get("load_average")
    said = [
        f"{workload.repeats} measured calls a case in {workload.rounds} processes an engine, by turns; {workload.warmup} warm-up calls "
        "a case and process, of the same shape, left out; no two calls share a picture or a prompt; a request has one picture, "
        "so requests/s are pictures/s."
    ]
    if not workload.warmup:
        said.append("There was no warm-up: the first calls' extra costs are in the numbers.")
    threads = findings.environment.get("threads") or 1
    if load and load[0] > threads / 2:
        said.append(f"The machine was not idle: load average {load[0]:.2f} when it began, with {threads} threads to use.")
    for engine in findings.engines:
        said += [f"{engine.name}: {remark}" for remark in (*engine.errors, *_doubts(engine))]
    if any(limit.share > 1 for engine in findings.engines for case in engine.cases for limit in case.limits.values()):
        said.append("A stage was faster than its limit: the machine was busier while its limits were measured, so they are too low.")
    doubted = [ratio for ratio in findings.comparison.ratios if ratio.metric in GATED and ratio.verdict in ("fail", "inconclusive")]
    said += dict.fromkeys(f"{ratio.engine}, {ratio.case or WORDS[ratio.metric]}: {ratio.verdict}, {ratio.reason}" for ratio in doubted)
    return (*said, *findings.comparison.remarks)


def seconds(value: float | None) -> str:
    """Milliseconds with three digits that mean something; a dash for none."""
    if value is None:
        return "-"
    milliseconds = 1000 * value
    return f"{milliseconds:,.0f} ms" if milliseconds >= 100 else f"{milliseconds:.1f} ms" if milliseconds >= 10 else f"{milliseconds:.2f} ms"


def size(value: float | None) -> str:
    """Mebibytes; a dash for none."""
    return "-" if value is None else f"{value / MIB:,.1f} MiB" if value < 100 * MIB else f"{value / MIB:,.0f} MiB"


def _doubts(engine: EngineResult) -> Iterator[str]:
    """Noise, and time that no stage explains, the worst case of each."""
    spreads = [cv for case in engine.cases if (cv := Samples(case.series("e2e").values).cv) is not None]
    noisy = [cv for cv in spreads if cv > NOISY_SPREAD]
    if noisy:
        yield f"noisy, the times spread by up to {100 * max(noisy):.0f} % of their mean (more than 5 % in {len(noisy)} of {len(spreads)} cases)"
    waits = [case.waited for case in engine.cases if case.waited is not None]
    if waits and max(waits) > BUSY_SHARE:
        yield f"its threads waited for a processor up to {100 * max(waits):.0f} % of the time, all together: something else was running"
    shares = [case.coverage for case in engine.cases if case.coverage is not None]
    if shares and min(shares) < COVERED:
        yield f"the stages explain only {100 * min(shares):.0f} % of some call's time"


def _case_tables(findings: BenchFindings) -> Iterator[Table]:
    """One a case, with a row an engine and state."""
    heads = ("preprocess", "vision", "prefill", "decode/token", "TTFT", "end to end", "p90", "new tokens/s", "requests/s", "n")
    columns = (Column("engine"), *(Column(head, "right") for head in heads))
    for case in findings.workload.cases:
        results = [(engine, result) for engine in findings.engines for result in engine.cases if result.case == case]
        if results:
            yield Table(_case_title(results[0][1]), columns, tuple(_case_row(engine, result) for engine, result in results))


def _case_title(result: CaseResult) -> str:
    times = result.good[0].times if result.good else None
    real = f" ({times.prompt_tokens} in all with {times.picture_tokens} of the picture)" if times and times.picture_tokens is not None else ""
    return f"{result.case.name}{real}, {result.case.new_tokens} new: medians"


def _case_row(engine: EngineResult, case: CaseResult) -> tuple[str, ...]:
    name = engine.name if case.state == "cold" else f"{engine.name}, {case.state}"
    step = case.samples("decode").median
    # of a server only the time between its chunks is known
    of_token = case.samples("tpot").median if step is None else step
    stages = [*(seconds(case.samples(stage).median) for stage in ("preprocess", "vision", "prefill")), seconds(of_token)]
    e2e = case.samples("e2e")
    rates = [_rate(case.rate("tokens")), _rate(case.rate("requests"))]
    return (name, *stages, seconds(case.samples("ttft").median), seconds(e2e.median), seconds(e2e.p90), *rates, str(e2e.n))


def _memory_table(findings: BenchFindings) -> Table:
    columns = (Column("engine"), *(Column(head, "right") for head in ("load", "peak memory", "peak GPU memory", "files with weights", "first call")))
    rows = []
    for engine in findings.engines:
        cuda = max(engine.peak_cuda.values, default=None)
        peak = max(engine.peak_rss.values, default=None)
        first = engine.cases[0].first if engine.cases else None
        rows.append((engine.name, seconds(engine.load.median), size(peak), size(cuda), size(engine.artifact_bytes), seconds(first)))
    limit = findings.environment.get("memory_limit_bytes")
    return Table(f"loading and memory (limit here {size(limit)})", columns, tuple(rows))


def _limit_table(findings: BenchFindings) -> Table:
    columns = (Column("engine"), Column("stage"), *(Column(head, "right") for head in ("median", "least possible", "reached")), Column("bound by"))
    rows = []
    for engine in findings.engines:
        for case in engine.cases[:1]:
            for stage, limit in case.limits.items():
                took = seconds(case.samples(stage).median)
                rows.append((engine.name, stage, took, seconds(limit.seconds), f"{100 * limit.share:.0f} %", limit.bound))
    return Table(f"what is left to gain ({_limits_text(findings)})", columns, tuple(rows))


def _limits_text(findings: BenchFindings) -> str:
    limits = findings.limits or {}
    rates = [f"{dtype} products {rate / 1e9:,.0f} Gop/s" for dtype, rate in (limits.get("operations_per_s") or {}).items()]
    bandwidth = limits.get("bytes_per_s")
    return ", ".join([*rates, f"reading {bandwidth / 1e9:,.1f} GB/s"] if bandwidth else rates) or "limits not measured"


def _ratio_table(findings: BenchFindings) -> Table:
    """What the verdict is about, less where there is none; the stages' ratios are in report.json."""
    comparison = findings.comparison
    columns = (Column("engine"), Column("case"), Column("what"), *(Column(head, "right") for head in ("base", "here", "ratio", "90 % interval")))
    wanted = SIDE_BY_SIDE if comparison.verdict is None else (*GATED, "load", "artifact_bytes")
    rows = tuple(_ratio_row(ratio) for ratio in comparison.ratios if ratio.metric in wanted)
    return Table(f"against {comparison.base}: below 1 is better", (*columns, Column("verdict")), rows)


def _ratio_row(ratio: Ratio) -> tuple[str, ...]:
    show = size if ratio.unit == "bytes" else seconds
    interval = "-" if ratio.ci_low is None or ratio.ci_high is None else f"{ratio.ci_low:.2f} to {ratio.ci_high:.2f}"
    verdict = (ratio.verdict or "") if ratio.metric in GATED else ""
    return (
        ratio.engine,
        ratio.case,
        WORDS.get(ratio.metric, ratio.metric),
        show(ratio.base),
        show(ratio.candidate),
        f"{ratio.ratio:.2f}",
        interval,
        verdict,
    )


def _rate(value: float | None) -> str:
    return "-" if value is None else f"{value:,.1f}" if value >= 10 else f"{value:.2f}"
