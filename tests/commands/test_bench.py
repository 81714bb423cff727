"""bench from recipe to report and status, over processes whose times a test sets; one real process at the end."""

from __future__ import annotations

import io
import json
import os
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from PIL import Image
from rich.console import Console

from qvlopt.commands import bench as module
from qvlopt.commands.bench import BenchResult, bench, bench_with
from qvlopt.commands.bench_process import engine_process
from qvlopt.commands.bench_scores import scores_of
from qvlopt.commands.export import export
from qvlopt.commands.plan import Plan
from qvlopt.errors import NotComparableError, QvloptError, RunError, UsageError
from qvlopt.recipe.load import LoadedRecipe, load_recipe
from tests.bench_doubles import MIB, Machine
from tests.documents import check_document, document_of
from tests.servers import MODEL, Chunked, delta, serving
from tests.tiny import build_tiny
from tests.tiny_onnx import build_onnx

SMALL = {"images": ["64x32"], "prompt_tokens": 30, "new_tokens": 4, "repeats": 10, "warmup": 1}


plots = pytest.mark.usefixtures("drawn")


@pytest.fixture
def drawn() -> None:
    """Asks for the plots to be drawn."""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny(tmp_path_factory.mktemp("tiny") / "one")


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny(tmp_path_factory.mktemp("tiny") / "two", seed=1)


@pytest.fixture(autouse=True)
def _no_plots(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing takes longer than all the rest; the tests that look at plots ask for it."""
    if "drawn" not in request.fixturenames:
        monkeypatch.setattr(module, "draw_plots", lambda *_: ())


def recipe(tiny: Path, output: Path, **changes: Any) -> LoadedRecipe:
    flags = {"output": str(output)} if changes.pop("very_folder", False) else None
    base = {"name": "mine", "model": {"path": str(tiny)}, "output": str(output), "hardware": {"device": "cpu", "threads": 1}}
    return load_recipe({**base, "bench": {**SMALL, **changes}}, flags=flags)


def measured(machine: Machine, loaded: LoadedRecipe, *candidates: str) -> BenchResult:
    return bench_with(machine.start, loaded, candidates)


def printed(result: BenchResult) -> dict[str, Any]:
    return document_of("bench", result.to_json(), exit_code=result.exit_code)


def shown(result: BenchResult) -> str:
    console = Console(file=io.StringIO(), width=160)
    result.render(console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_without_candidates_the_source_is_measured_in_two_dtypes(tiny: Path, tmp_path: Path) -> None:
    machine = Machine()
    result = measured(machine, recipe(tiny, tmp_path / "out"))
    assert [engine.name for engine in result.findings.engines] == ["model (torch fp32)", "model (torch bf16)"]
    assert (result.findings.comparison.verdict, result.exit_code) == (None, 0)
    assert {ratio.engine for ratio in result.findings.comparison.ratios} == {"model (torch bf16)"}
    assert all(ratio.verdict is None for ratio in result.findings.comparison.ratios)


def test_finished_artifacts_and_the_recipes_server_are_measured_beside_the_source(tiny: Path, tmp_path: Path) -> None:
    build_onnx(tiny, tmp_path / "out" / "export")
    server = {"server": {"url": "http://localhost:9/v1", "model": "/models/m"}}
    loaded = load_recipe({"model": {"path": str(tiny)}, "output": str(tmp_path / "out"), "bench": SMALL, "evaluate": server})
    names = [engine.name for engine in measured(Machine(), loaded).findings.engines]
    assert names == ["model (torch fp32)", "model (torch bf16)", "export (onnx fp32)", "m (server)"]


def test_a_server_whose_url_names_its_model_and_an_export_of_one_part_that_cannot_answer(tiny: Path, tmp_path: Path) -> None:
    section = {"check": False, "parts": ["vision"]}
    server = {"server": {"url": "http://localhost:9/v1#m"}, "dtype": "float32"}
    recipe = {"model": {"path": str(tiny)}, "output": str(tmp_path / "out"), "bench": SMALL, "evaluate": server, "export": section}
    export(load_recipe(recipe))
    names = [engine.name for engine in measured(Machine(), load_recipe(recipe)).findings.engines]
    assert names == ["model (torch fp32)", "m (server)"]


def test_a_dtype_that_the_recipe_asks_for_is_the_only_one(tiny: Path, tmp_path: Path) -> None:
    loaded = load_recipe({"model": {"path": str(tiny)}, "output": str(tmp_path / "out"), "bench": SMALL, "evaluate": {"dtype": "float32"}})
    assert [engine.name for engine in measured(Machine(), loaded).findings.engines] == ["model (torch fp32)"]


def test_torch_is_measured_with_each_attention_and_compiled_where_the_recipe_asks_and_onnx_once(tiny: Path, tmp_path: Path) -> None:
    build_onnx(tiny, tmp_path / "out" / "export")
    loaded = recipe(tiny, tmp_path / "out", attention=["sdpa", "eager"], compile=True)
    machine = Machine()
    result = measured(machine, loaded, "model", str(tmp_path / "out" / "export"))
    assert [engine.name for engine in result.findings.engines] == [
        "model (torch)", "model (torch compiled)", "model (torch eager)", "model (torch eager compiled)", "export (onnx fp32)",
    ]  # fmt: skip
    asked = [(message["attention"], message["compiled"]) for message in machine.messages[:5]]
    assert asked == [("sdpa", False), ("sdpa", True), ("eager", False), ("eager", True), ("sdpa", False)]
    assert result.findings.comparison.verdict is None  # two names, but not two engines of which one could be the slower


def test_one_process_is_alive_at_a_time_and_engines_take_turns(tiny: Path, other: Path, tmp_path: Path) -> None:
    machine = Machine()
    measured(machine, recipe(tiny, tmp_path / "out"), str(tiny), str(other))
    assert machine.most_alive == 1
    assert machine.opened == [str(tiny), str(other), str(other), str(tiny)]


def test_every_process_has_the_threads_that_the_affinity_leaves(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As under `taskset -c 0`, whatever the recipe asks for."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {0})
    machine = Machine()
    section = {"model": {"path": str(tiny)}, "output": str(tmp_path / "out"), "hardware": {"device": "cpu", "threads": 64}, "bench": SMALL}
    result = measured(machine, load_recipe(section), "model")
    assert machine.threads == [1, 1, 1]  # the machine's probe and two rounds
    assert result.findings.environment["threads"] == 1


def test_no_two_calls_of_an_engine_share_a_picture_or_a_prompt_and_all_engines_get_the_same(tiny: Path, other: Path, tmp_path: Path) -> None:
    machine = Machine()
    measured(machine, recipe(tiny, tmp_path / "out", images=["64x32", "32x64"]), str(tiny), str(other))
    by_path = {path: [request for called, requests in machine.calls if called == path for request in requests] for path in machine.opened}
    for requests in by_path.values():
        assert len(requests) == 2 * (10 + 2 * 1)
        assert len({request["picture"] for request in requests}) == len(requests)
        assert len({tuple(request["prompt_seed"]) for request in requests}) == len(requests)
    one, two = (sorted(map(str, requests)) for requests in by_path.values())
    assert one == two


def test_warm_ups_are_made_and_not_counted(tiny: Path, tmp_path: Path) -> None:
    machine = Machine()
    result = measured(machine, recipe(tiny, tmp_path / "out", warmup=3), "model")
    case = result.findings.engines[0].cases[0]
    assert len(machine.calls) == 10 + 2 * 3
    assert (len(case.iterations), case.samples("e2e").n) == (10, 10)
    assert sorted(each.index for each in case.iterations) == list(range(10))
    assert "3 warm-up calls" in shown(result)


def test_an_engine_that_keeps_things_is_measured_cold_and_warm(tiny: Path, tmp_path: Path) -> None:
    machine = Machine(keeps=True)
    result = measured(machine, recipe(tiny, tmp_path / "out", repeats=2, warmup=0), "model")
    assert [case.state for case in result.findings.engines[0].cases] == ["cold", "warm picture", "warm prompt"]
    cold, picture, prompt = (requests[0] for _, requests in machine.calls[:3])
    assert cold["picture"] == picture["picture"] == prompt["picture"]
    assert [request["picture_last"] for request in (cold, picture, prompt)] == [False, True, False]
    assert len({tuple(request["prompt_seed"]) for request in (cold, picture, prompt)}) == 3


def test_requests_at_once_come_in_one_call(tiny: Path, tmp_path: Path) -> None:
    machine = Machine()
    result = measured(machine, recipe(tiny, tmp_path / "out", concurrency=[1, 3], repeats=2, warmup=0), "model")
    assert sorted(len(requests) for _, requests in machine.calls) == [1, 1, 3, 3]
    assert result.findings.engines[0].cases[1].name.endswith("3 at once")
    assert all(len({request["picture"] for request in requests}) == len(requests) for _, requests in machine.calls)


@pytest.mark.parametrize(("factor", "verdict", "status"), [(1.0, "pass", 0), (0.5, "pass", 0), (1.5, "fail", 1)])
def test_a_slowed_engine_fails_the_gate_and_an_equal_one_does_not(
    tiny: Path, other: Path, tmp_path: Path, factor: float, verdict: str, status: int
) -> None:
    machine = Machine(lambda path: factor if path == str(other) else 1.0)
    result = measured(machine, recipe(tiny, tmp_path / "out", gate=0.1), str(tiny), str(other))
    assert (result.findings.comparison.verdict, result.exit_code) == (verdict, status)
    ratio = next(ratio for ratio in result.findings.comparison.ratios if ratio.metric == "e2e")
    assert ratio.ratio == pytest.approx(factor, rel=0.02)


def test_without_a_gate_the_verdict_is_shown_and_the_status_is_0(tiny: Path, other: Path, tmp_path: Path) -> None:
    machine = Machine(lambda path: 1.5 if path == str(other) else 1.0)
    result = measured(machine, recipe(tiny, tmp_path / "out"), str(tiny), str(other))
    assert (result.findings.comparison.verdict, result.exit_code) == ("fail", 0)
    assert "only advice" in shown(result)


def test_a_gate_with_nothing_to_compare_is_status_4(tiny: Path, tmp_path: Path) -> None:
    alone = measured(Machine(), recipe(tiny, tmp_path / "out", gate=0.1), "model")
    assert (alone.findings.comparison.verdict, alone.exit_code) == (None, 4)


def test_too_few_repeats_are_inconclusive_with_status_3(tiny: Path, other: Path, tmp_path: Path) -> None:
    machine = Machine(lambda path: 1.05 if path == str(other) else 1.0)
    result = measured(machine, recipe(tiny, tmp_path / "out", repeats=8, gate=0.1), str(tiny), str(other))
    assert (result.findings.comparison.verdict, result.exit_code) == ("inconclusive", 3)
    assert "64x32, 30 tokens: inconclusive, 8 samples, 9 are needed" in shown(result)


@pytest.mark.parametrize("how", ["folder", "report", "printed"])
def test_a_run_is_compared_with_an_earlier_one(tiny: Path, tmp_path: Path, how: str) -> None:
    first = measured(Machine(), recipe(tiny, tmp_path / "out"), "model")
    saved = {"folder": first.report, "report": first.report / "report.json", "printed": tmp_path / "printed.json"}[how]
    if how == "printed":
        saved.write_text(json.dumps(printed(first)))
    same = measured(Machine(), recipe(tiny, tmp_path / "out", compare=str(saved), gate=0.1), "model")
    assert (same.findings.comparison.verdict, same.exit_code) == ("pass", 0)
    slower = measured(Machine(lambda _path: 1.5), recipe(tiny, tmp_path / "out", compare=str(saved), gate=0.1), "model")
    assert (slower.findings.comparison.verdict, slower.exit_code) == ("fail", 1)


def test_the_machines_pace_is_taken_beside_every_turn_and_kept(tiny: Path, other: Path, tmp_path: Path) -> None:
    machine = Machine()
    machine.paces = [{"float32": float(number)} for number in range(1, 6)]
    result = measured(machine, recipe(tiny, tmp_path / "out", repeats=2), str(tiny), str(other))
    one, two = (engine["paces"] for engine in printed(result)["engines"])
    assert [pace["float32"] for pace in one] == [1, 2, 4, 5]  # the first turn and the last
    assert [pace["float32"] for pace in two] == [2, 3, 3, 4]


@pytest.mark.parametrize(("paces", "verdict"), [([1.0], "fail"), ([1.0, 0.9, 1.0], "fail"), ([1.0, 1.0, 0.6], "inconclusive")])
def test_a_slow_run_on_a_machine_that_was_slow_for_a_while_is_inconclusive(tiny: Path, tmp_path: Path, paces: list[float], verdict: str) -> None:
    first = measured(Machine(), recipe(tiny, tmp_path / "out"), "model")
    machine = Machine(lambda _path: 1.5)
    machine.paces = [{"float32": pace * 1e10} for pace in paces]
    again = measured(machine, recipe(tiny, tmp_path / "out", compare=str(first.report)), "model")
    assert again.findings.comparison.verdict == verdict
    assert ("up to 1.67 times as slow as then" in shown(again)) is (verdict == "inconclusive")


def test_a_report_without_paces_is_compared_as_it_is(tiny: Path, tmp_path: Path) -> None:
    first = measured(Machine(), recipe(tiny, tmp_path / "out"), "model").report / "report.json"
    document = json.loads(first.read_text())
    del document["engines"][0]["paces"]
    first.write_text(json.dumps(document))
    machine = Machine(lambda _path: 1.5)
    machine.paces = [{"float32": 1.0}]
    assert measured(machine, recipe(tiny, tmp_path / "out", compare=str(first)), "model").findings.comparison.verdict == "fail"


def test_a_machine_whose_speed_cannot_be_measured_is_said_once_and_benched(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_pace(*_: Any) -> dict[str, Any]:
        raise RunError("no memory for the matrix")

    monkeypatch.setattr("tests.bench_doubles.Double._pace", no_pace)
    result = measured(Machine(), recipe(tiny, tmp_path / "out"), "model")
    assert (result.exit_code, result.findings.engines[0].paces) == (0, ({}, {}, {}, {}))
    assert result.findings.limits is not None
    assert [record.message for record in caplog.records] == ["the machine's speed could not be measured: no memory for the matrix"]


def test_another_machine_or_workload_is_not_comparable(tiny: Path, tmp_path: Path) -> None:
    report = measured(Machine(), recipe(tiny, tmp_path / "out"), "model").report / "report.json"
    document = json.loads(report.read_text())
    document["environment"]["cpu_model"] = "Another CPU"
    elsewhere = tmp_path / "elsewhere.json"
    elsewhere.write_text(json.dumps(document))
    result = measured(Machine(), recipe(tiny, tmp_path / "out", compare=str(elsewhere), gate=0.1), "model")
    assert (result.findings.comparison.verdict, result.exit_code) == ("not_comparable", 4)
    assert any("cpu_model was Another CPU" in remark for remark in result.findings.comparison.remarks)
    longer = measured(Machine(), recipe(tiny, tmp_path / "out", compare=str(report), gate=0.1, new_tokens=8), "model")
    assert longer.exit_code == 4
    assert measured(Machine(), recipe(tiny, tmp_path / "out", compare=str(report), new_tokens=8), "model").exit_code == 0


def test_a_saved_run_that_is_not_there_is_status_4_and_one_that_is_none_status_2(tiny: Path, tmp_path: Path) -> None:
    machine = Machine()
    with pytest.raises(NotComparableError, match=r"there is no gone\.json"):
        measured(machine, recipe(tiny, tmp_path / "out", compare="gone.json"), "model")
    (tmp_path / "other.json").write_text('{"engines": 3}')
    with pytest.raises(UsageError, match="is no report of bench"):
        measured(machine, recipe(tiny, tmp_path / "out", compare=str(tmp_path / "other.json")), "model")
    assert machine.opened == []
    assert not (tmp_path / "out").exists()


def test_an_engine_that_cannot_be_opened_is_reported_and_the_others_go_on(tiny: Path, other: Path, tmp_path: Path) -> None:
    machine = Machine()
    machine.fails[str(other)] = "the file is damaged"
    result = measured(machine, recipe(tiny, tmp_path / "out"), str(tiny), str(other))
    assert result.exit_code == 5
    assert machine.opened == [str(tiny), str(other), str(tiny)]
    assert [engine.error for engine in result.findings.engines] == [None, "the file is damaged"]
    assert "the file is damaged" in shown(result)
    assert json.loads((result.report / "report.json").read_text())["exit_code"] == 5
    check_document(printed(result))


def test_answers_without_a_token_are_failures_that_are_listed(tiny: Path, tmp_path: Path) -> None:
    machine = Machine()
    machine.broken[str(tiny)] = "an answer without a single token"
    result = measured(machine, recipe(tiny, tmp_path / "out"), "model")
    assert result.exit_code == 5
    case = printed(result)["engines"][0]["cases"][0]
    assert (case["n"], len(case["failed"]), case["tokens_per_s"]) == (0, 10, None)
    assert case["failed"][0].endswith("an answer without a single token")


def test_the_document_is_what_the_schema_says_with_every_raw_value(tiny: Path, tmp_path: Path) -> None:
    result = measured(Machine(), recipe(tiny, tmp_path / "out", concurrency=[1, 2]), "model")
    document = printed(result)
    check_document(document)
    engine = document["engines"][0]
    assert engine["stages"]["decode"]["n"] == 10 * 3
    assert engine["stages"]["e2e"] == engine["cases"][0]["stages"]["e2e"]
    assert len(engine["cases"][0]["samples"]) == 10
    assert (engine["peak_rss_bytes"], engine["anonymous_bytes"]) == (300 * MIB, 150 * MIB)
    assert engine["artifact_bytes"] == (tiny / "model.safetensors").stat().st_size
    assert engine["stages"]["e2e"]["p99"] is None
    stored = json.loads((result.report / "report.json").read_text())
    check_document(stored)
    assert stored["engines"] == document["engines"]


def test_limits_are_given_for_the_stages_that_a_model_has(tiny: Path, tmp_path: Path) -> None:
    limits = measured(Machine(), recipe(tiny, tmp_path / "out"), "model").findings.engines[0].cases[0].limits
    assert set(limits) == {"vision", "prefill", "decode"}
    assert all(0 < limit.share < 1 for limit in limits.values())


@plots
def test_the_report_holds_tables_and_plots_for_people(tiny: Path, tmp_path: Path) -> None:
    result = measured(Machine(), recipe(tiny, tmp_path / "out", images=["64x32", "64x64"], prompt_tokens=[30, 60]))
    assert {path.name for path in result.report.iterdir()} == {
        "report.json", "report.md", "report.html", "stages.svg", "stages.png", "latency.svg", "latency.png",
    }  # fmt: skip
    for name in ("stages", "latency"):
        assert ElementTree.parse(result.report / f"{name}.svg").getroot().tag.endswith("svg")
        with Image.open(result.report / f"{name}.png") as picture:
            assert picture.width > 500
    assert (tmp_path / "out" / "bench" / "latest" / "report.md").read_text().startswith("## Bench: ")


@plots
def test_the_page_stands_alone_and_nothing_in_it_can_act(tiny: Path, tmp_path: Path) -> None:
    odd = build_tiny(tmp_path / "<script>alert(1)<b>")
    loaded = recipe(tiny, tmp_path / "out", images=["64x32", "64x64"])
    page = (measured(Machine(), loaded, str(odd), "model").report / "report.html").read_text()
    assert "default-src 'none'" in page
    assert "<script>alert" not in page
    assert "&lt;script&gt;" in page
    assert re.findall(r'(?:src|href)="(?!data:)', page) == []
    assert page.count("data:image/svg+xml;base64,") == 2


@plots
def test_the_same_numbers_draw_the_same_plots(tiny: Path, tmp_path: Path) -> None:
    one, two = (measured(Machine(spread=0.0), recipe(tiny, tmp_path / name), "model").report for name in ("a", "b"))
    assert (one / "stages.svg").read_bytes() == (two / "stages.svg").read_bytes()


@plots
def test_memory_is_set_against_accuracy_where_there_is_an_evaluation(tiny: Path, other: Path, tmp_path: Path) -> None:
    place = tmp_path / "out" / "evaluate" / "latest"
    place.mkdir(parents=True)
    metrics = [{"primary": True, "base": 0.9, "candidate": 0.8}, {"primary": False, "base": 0.0, "candidate": 0.0}]
    engines = {str(path): {"engine": "fake", "dtype": "float32", "model_digest": f"sha256:{path.name}"} for path in (tiny, other)}
    results = [{"candidate": str(other), "baseline": str(tiny), "metrics": metrics}]
    (place / "report.json").write_text(json.dumps({"results": results, "fingerprint": {"engines": engines}}))
    result = measured(Machine(), recipe(tiny, tmp_path / "out"), "model", str(other))
    assert (result.report / "memory-accuracy.svg").is_file()
    # the same weights in bfloat16 were never evaluated
    names = scores_of(recipe(tiny, tmp_path / "out"), measured(Machine(), recipe(tiny, tmp_path / "out")).findings.engines)
    assert names == {"model (torch fp32)": 0.9}


def test_a_dry_run_plans_and_writes_nothing(tiny: Path, tmp_path: Path) -> None:
    plan = bench(recipe(tiny, tmp_path / "out", gate=0.2), ("model", "http://localhost:8000/v1#name"), dry_run=True)
    assert isinstance(plan, Plan)
    rows = {row.item: row.value for row in plan.rows}
    assert rows["calls"].startswith("24 in 2 processes")
    assert rows["gate"] == "slower by more than 20 % fails"
    assert "are sent to the servers" in rows["network"]
    assert not (tmp_path / "out").exists()
    check_document(document_of("bench", plan.to_json()))


@pytest.mark.parametrize(
    ("candidate", "error", "message"),
    [
        ("", UsageError, "an empty name"),
        ("nowhere", UsageError, "there is no such folder"),
        ("ftp://localhost/#m", UsageError, "is no server's URL"),
    ],
)
def test_candidates_that_cannot_be_run_are_refused_before_anything_starts(
    tiny: Path, tmp_path: Path, candidate: str, error: type[QvloptError], message: str
) -> None:
    machine = Machine()
    with pytest.raises(error, match=message):
        measured(machine, recipe(tiny, tmp_path / "out"), candidate)
    assert machine.opened == []


def test_a_place_that_cannot_be_written_is_found_before_the_work(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    machine = Machine()
    with pytest.raises(UsageError, match="is not a folder"):
        measured(machine, recipe(tiny, tmp_path / "file", very_folder=True), "model")
    assert machine.opened == []


def test_a_password_in_a_servers_url_is_refused_and_never_shown(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no user, password") as error:
        measured(Machine(), recipe(tiny, tmp_path / "out"), "http://user:secret@localhost:8000/v1#m")
    assert "secret" not in str(error.value)


def open_message(folder: Path, **changes: Any) -> dict[str, Any]:
    spec = {"kind": "torch", "path": str(folder), "dtype": "float32", "folder": str(folder.parent), "attention": "sdpa", "compiled": False}
    return {"do": "open", **spec, "recipe": recipe(folder, folder / "out").recipe.model_dump(mode="json"), **changes}


@pytest.mark.slow
def test_a_real_process_opens_answers_and_tells_its_memory(tiny: Path, tmp_path: Path) -> None:
    from qvlopt.timing.workload import write_picture

    request = {"id": "0", "picture": str(write_picture(tmp_path, 64, 64, (0,))), "prompt_seed": [0], "prompt_tokens": 30, "new_tokens": 3}
    with engine_process(1) as process:
        with pytest.raises(RunError, match="nowhere"):
            process.ask(open_message(tiny, path=str(tmp_path / "nowhere")))
        opened = process.ask(open_message(tiny))
        assert opened["fingerprint"]["threads"] == 1
        assert opened["load_s"] > 0
        times = process.ask({"do": "call", "requests": [request]})
        assert (times["tokens"], times["error"], set(times["stages"])) == (3, None, {"preprocess", "vision", "prefill", "decode", "detokenise"})
        closed = process.ask({"do": "close"})
        assert closed["peak_rss_bytes"] > 50 * MIB
        with pytest.raises(RunError, match="the engine's process ended with status 0"):
            process.ask({"do": "close"})
    assert process.peak_tree_bytes > 0


@pytest.mark.slow
def test_a_server_is_measured_through_a_real_process_and_its_empty_stream_is_a_failure(tiny: Path, tmp_path: Path) -> None:
    usage: dict[str, Any] = {"choices": [], "usage": {"prompt_tokens": 40, "completion_tokens": 4}}
    nothing = Chunked([delta(finish="stop"), {"choices": [], "usage": {"prompt_tokens": 40, "completion_tokens": 0}}])
    well = Chunked([delta("a"), delta("b"), delta(" "), delta(" ", finish="length"), usage])
    loaded = recipe(tiny, tmp_path / "out", repeats=2, warmup=1)
    with serving(well, nothing, usual=well) as server:
        result = bench_with(engine_process, loaded, (f"{server.url}#{MODEL}",))
        assert len(server.posts()) == 2 * (1 + 1)
        assert all(body["ignore_eos"] and body["stream"] and body["max_tokens"] == 4 for body in server.posts())
        texts = [body["messages"][0]["content"][-1]["text"] for body in server.posts()]
        assert len(set(texts)) == len(texts)
    engine = result.findings.engines[0]
    case = engine.cases[0]
    assert (engine.name, engine.error) == ("nano (server)", None)
    assert [each.times.error for each in case.iterations] == ["an answer without a single token", None]
    assert [each.times.tokens for each in case.good] == [4]
    assert (engine.load.n, engine.peak_rss.n, engine.artifact_bytes, result.exit_code) == (0, 0, None, 5)
    check_document(printed(result))
