"""What the plots are drawn from: parts of a request that sum to the whole, and words that cannot act."""

from __future__ import annotations

from dataclasses import replace

import pytest

from qvlopt.commands.bench_plots import REST, draw_plots, stage_parts
from qvlopt.timing.comparison import Comparison
from qvlopt.timing.plan import Case, Workload
from qvlopt.timing.result import BenchFindings, CaseResult, EngineResult, Iteration
from qvlopt.timing.samples import Samples
from qvlopt.timing.stages import CallTimes

CASE = Case(64, 64, 30, 3)
STAGES = {"preprocess": (0.1,), "vision": (0.4,), "prefill": (0.2,), "decode": (0.1, 0.1)}


def case_of(*times: CallTimes) -> CaseResult:
    return CaseResult(CASE, "cold", tuple(Iteration(0, index, each) for index, each in enumerate(times)))


def test_what_no_stage_explains_is_a_part_of_its_own() -> None:
    parts = stage_parts(case_of(CallTimes(1.0, 1, 3, (0.7,), (1.0,), (0.15,), STAGES)))
    assert parts == {"preprocess": 0.1, "vision": 0.4, "prefill": 0.2, "decode": 0.2, REST: pytest.approx(0.1)}
    assert sum(parts.values()) == pytest.approx(1.0)


def test_of_a_server_the_first_token_parts_the_time() -> None:
    parts = stage_parts(case_of(CallTimes(1.1, 1, 3, (0.7,), (1.0,), (0.15,))))
    assert parts == {"time to first token": 0.7, "decode": pytest.approx(0.3)}


def test_a_noisy_machine_makes_no_time_between_stages() -> None:
    def call(vision: float, prefill: float) -> CallTimes:
        return CallTimes(vision + prefill, 1, 3, (), (), (), {"vision": (vision,), "prefill": (prefill,)})

    assert stage_parts(case_of(call(1.0, 9.0), call(9.0, 1.0), call(1.0, 1.0))) == {"vision": 1.0, "prefill": 1.0, REST: 0.0}


@pytest.mark.parametrize(
    ("cases", "words"),
    [
        ((CASE,), None),
        ((CASE, replace(CASE, concurrency=4)), None),
        ((CASE, replace(CASE, width=128)), "the picture"),
        ((CASE, replace(CASE, prompt_tokens=60)), "the prompt"),
        ((CASE, replace(CASE, width=128), replace(CASE, prompt_tokens=60)), "the picture and the prompt"),
    ],
)
def test_growth_is_drawn_of_what_grows(cases: tuple[Case, ...], words: str | None) -> None:
    times = CallTimes(1.0, 1, 3, (0.7,), (1.0,), (0.15,), STAGES)
    engine = EngineResult("x", "x", tuple(CaseResult(case, "cold", (Iteration(0, 0, times),)) for case in cases))
    plots = draw_plots(replace(findings(engine), workload=Workload(cases, 1, 0, 0)), {})
    shown = [plot.words for plot in plots if plot.name == "latency"]
    assert shown == ([f"How the time to first token grows with {words}, for each engine"] if words else [])


def test_calls_that_failed_have_no_part() -> None:
    assert stage_parts(case_of(CallTimes(1.0, 1, 0, (), (), error="an answer without a single token"))) == {}


def findings(*engines: EngineResult) -> BenchFindings:
    return BenchFindings(Workload((CASE,), 1, 0, 0), engines, Comparison(None, None, (), 0.1), {}, None)


def test_nothing_measured_draws_nothing() -> None:
    assert draw_plots(findings(EngineResult("x", "x", error="gone")), {"x": 0.5}) == ()


def test_names_from_outside_are_spelled_out_in_the_drawing() -> None:
    engine = EngineResult(
        "a\x1b[31m<b>$\\nosuch{$", "x", (case_of(CallTimes(1.0, 1, 3, (0.7,), (1.0,), (0.15,), STAGES)),), peak_rss=Samples((1e9,), "bytes")
    )
    plots = draw_plots(findings(engine), {})
    assert [plot.name for plot in plots] == ["stages"]
    assert all("\x1b" not in plot.svg and "<b>" not in plot.svg for plot in plots)
    assert all(plot.png.startswith(b"\x89PNG") for plot in plots)
