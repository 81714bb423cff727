"""The report files of an evaluation, and what a CI job is told, from fakes that say what a test wants."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree.ElementTree import fromstring

import jsonschema
import pytest
from PIL import Image

from qvlopt.artifact.digest import sha256_bytes
from qvlopt.artifact.manifest import Manifest, SourceRecord, write_manifest
from qvlopt.commands.evaluate import EvaluateResult, evaluate, evaluate_with
from qvlopt.commands.plan import Plan
from qvlopt.data.samples import Sample
from qvlopt.errors import NotComparableError, RunError
from qvlopt.recipe.load import LoadedRecipe, load_recipe
from tests.documents import check_shape
from tests.fakes import FakeEngine, right
from tests.servers import Handler, completion, refuse, send, serving

ITEMS = 24
HOSTILE = "::error file=x::owned\n##[command]x\x1b[31m<script>alert(1)</script> @everyone \u202e \ud800"


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """`set`: ITEMS questions about as many pictures; `source` and `awq`, an artifact that was made from it."""
    (tmp_path / "source").mkdir()
    (tmp_path / "set").mkdir()
    rows = []
    for i in range(ITEMS):
        Image.new("RGB", (64, 32 + 32 * (i % 2)), (i, 90, 0)).save(tmp_path / "set" / f"{i}.png")
        rows.append({"id": f"q{i}", "images": [f"{i}.png"], "question": f"number {i}?", "answers": [f"V{i}"], "task": "ocr"})
    (tmp_path / "set" / "manifest.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (tmp_path / "awq").mkdir()
    record = SourceRecord(path=str(tmp_path / "source"), digest=sha256_bytes(b"source"))
    write_manifest(tmp_path / "awq", Manifest(kind="awq", digest="d", recipe={}, source=record))
    return tmp_path


def recipe(place: Path, *settings: str) -> LoadedRecipe:
    sections = {
        "model": {"path": str(place / "source")},
        "output": str(place / "out"),
        "evaluate": {"data": [{"name": "ocr", "path": str(place / "set"), "task": "ocr"}], "gate": {"margin": 0.3}},
    }
    return load_recipe(sections, overrides=settings)


def judged(place: Path, *settings: str, said: str = "WRONG") -> EvaluateResult:
    """The artifact answers the first half of the items with `said`."""

    def worse(sample: Sample) -> str:
        return said if int(sample.id[1:]) < ITEMS // 2 else right(sample)

    def opened(path: str) -> FakeEngine:
        return FakeEngine(worse if path.endswith("awq") else right, model_digest=sha256_bytes(b"source"))

    return evaluate_with(opened, recipe(place, *settings), [str(place / "awq")])


def text_of(result: EvaluateResult, name: str) -> str:
    return (result.report / name).read_text(encoding="utf-8")


def test_all_kinds_are_written_and_say_the_same(place: Path) -> None:
    result = judged(place)
    assert sorted(path.name for path in result.report.iterdir()) == ["items.jsonl", "junit.xml", "report.html", "report.json", "report.md"]
    document = json.loads(text_of(result, "report.json"))
    assert (document["verdict"], document["exit_code"]) == ("fail", 1)
    html = text_of(result, "report.html")
    assert html.count("<article") == ITEMS // 2
    assert "<strong>Fail</strong>" in html
    assert html.count("data:image/png") == ITEMS // 2
    suite = fromstring(text_of(result, "junit.xml"))
    assert suite.get("failures") == "1"
    assert "number 3?" in html


@pytest.mark.parametrize(
    ("kinds", "files", "first"),
    [
        ("[json]", ["items.jsonl", "report.json"], "report.json"),
        ("[html]", ["items.jsonl", "report.html", "report.json"], "report.html"),
        ("[junit, md]", ["items.jsonl", "junit.xml", "report.json", "report.md"], "report.md"),
    ],
)
def test_the_recipe_chooses_the_kinds(place: Path, kinds: str, files: list[str], first: str) -> None:
    result = judged(place, f"evaluate.reports={kinds}")
    assert sorted(path.name for path in result.report.iterdir()) == files
    assert result.to_json()["report"] == str(result.report / first)


def test_a_github_job_gets_summary_and_outputs(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "summary"))
    monkeypatch.setenv("GITHUB_OUTPUT", str(tmp_path / "output"))
    result = judged(place)
    assert (tmp_path / "summary").read_text(encoding="utf-8") == text_of(result, "report.md")
    assert (tmp_path / "output").read_text(encoding="utf-8") == f"verdict=fail\nexit_code=1\nreport={result.report}\n"


def test_what_a_model_says_is_obeyed_nowhere(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "summary"))
    result = judged(place, said=HOSTILE)
    assert "<script>alert" not in text_of(result, "report.html")
    fromstring(text_of(result, "junit.xml"))
    for name in ("report.md", "report.json", "items.jsonl", "junit.xml"):
        lines = text_of(result, name).splitlines()
        assert not [line for line in lines if line.lstrip().startswith("::")]
        assert not [line for line in lines if "##[" in line or "\x1b" in line or "\u202e" in line]
    summary = (tmp_path / "summary").read_text(encoding="utf-8")
    assert "<script>" not in summary
    assert "@everyone" not in summary


def test_a_picture_that_is_lost_meanwhile_does_not_cost_the_report(place: Path) -> None:
    def opened(path: str) -> FakeEngine:
        engine = FakeEngine(lambda _: "WRONG" if path.endswith("awq") else "V0", model_digest=sha256_bytes(b"source"))
        if path.endswith("awq"):
            engine.close = lambda: (place / "set" / "0.png").unlink()  # type: ignore[method-assign]
        return engine

    result = evaluate_with(opened, recipe(place), [str(place / "awq")])
    assert "0.png: is missing" in text_of(result, "report.html")


def number(handler: Handler) -> None:
    """A server that reads the number in the question."""
    text = handler.body["messages"][0]["content"][-1]["text"]
    send(handler, completion("V" + text.removeprefix("number ").removesuffix("?")))


def test_a_server_is_a_candidate_against_the_source(place: Path) -> None:
    with serving(usual=number) as server:
        loaded = recipe(place, "evaluate.gate.margin=0.3")
        source = FakeEngine(right)

        def opened(path: str) -> object:
            from qvlopt.runtime import open_engine

            return source if path == str(place / "source") else open_engine(path, loaded=loaded)

        result = evaluate_with(opened, loaded, [f"{server.url}#nano"])  # type: ignore[arg-type]
        assert len(server.posts()) == ITEMS
    assert (result.verdict, result.exit_code) == ("pass", 0)
    row = json.loads(text_of(result, "items.jsonl").splitlines()[0])
    assert row["candidate_answer"]["new_tokens"] == 3
    assert row["size"] == [[64, 32]]
    assert json.loads(text_of(result, "report.json"))["fingerprint"]["engines"][f"{server.url}#nano"]["engine"] == "openai"


def test_the_recipes_server_is_the_candidate_when_none_is_named(place: Path) -> None:
    with serving(usual=number) as server:
        loaded = recipe(place, "evaluate.engine=openai", f"evaluate.server.url={server.url}", "evaluate.server.model=nano")
        plan = evaluate(loaded, dry_run=True)
    assert isinstance(plan, Plan)
    rows = [f"{row.item}: {row.value}" for row in plan.rows]
    assert f"candidate: {server.url}#nano against {place / 'source'}" in rows
    assert f"server: {server.url} is asked: on this machine" in rows


def test_a_server_that_is_not_there_is_found_before_the_base_works(place: Path) -> None:
    with serving() as server:
        url = server.url
    loaded = recipe(place, "evaluate.server.retries=0")

    def opened(path: str) -> object:
        from qvlopt.runtime import open_engine

        assert "://" in path, "the base was asked first"
        return open_engine(path, loaded=loaded)

    with pytest.raises(RunError, match="no model can be asked"):
        evaluate_with(opened, loaded, [f"{url}#nano"])  # type: ignore[arg-type]


def test_the_plan_says_that_pictures_leave_the_machine(place: Path) -> None:
    plan = evaluate(recipe(place), ["https://gpu.example/v1#m"], dry_run=True)
    assert isinstance(plan, Plan)
    assert "server: https://gpu.example:443/v1 is asked: pictures and questions leave this machine" in [f"{r.item}: {r.value}" for r in plan.rows]


def test_failed_items_of_a_server_are_counted_and_named(place: Path) -> None:
    def lame(handler: Handler) -> None:
        refuse(400, "too long")(handler) if "number 3?" in str(handler.body["messages"][0]["content"][-1]) else number(handler)

    with serving(usual=lame) as server:
        loaded = recipe(place, f"evaluate.baseline={place / 'source'}")

        def opened(path: str) -> object:
            from qvlopt.runtime import open_engine

            return FakeEngine(right) if "://" not in path else open_engine(path, loaded=loaded)

        result = evaluate_with(opened, loaded, [f"{server.url}#nano"])  # type: ignore[arg-type]
    assert (result.verdict, result.exit_code) == ("error", 5)
    assert "the candidate gave no answer: status 400: too long" in text_of(result, "report.html")


def test_a_server_can_be_the_baseline_too(place: Path) -> None:
    plan = evaluate(recipe(place, "evaluate.baseline=http://localhost:1/v1#base"), [str(place / "awq")], dry_run=True)
    assert isinstance(plan, Plan)
    assert f"candidate: {place / 'awq'} against http://localhost:1/v1#base" in [f"{row.item}: {row.value}" for row in plan.rows]
    with pytest.raises(NotComparableError):
        evaluate(recipe(place, "evaluate.baseline=nowhere"), [str(place / "awq")], dry_run=True)


def test_the_files_are_what_the_shipped_schemas_say(place: Path) -> None:
    (place / "set" / "3.png").write_bytes(b"")
    result = judged(place, "evaluate.gate.max_failed=1", said=HOSTILE)
    check_shape("evaluate-report", json.loads(text_of(result, "report.json")))
    rows = [json.loads(line) for line in text_of(result, "items.jsonl").splitlines()]
    for row in rows:
        check_shape("evaluate-item", row)
    assert len(rows) == ITEMS
    with pytest.raises(jsonschema.ValidationError):
        check_shape("evaluate-item", rows[0] | {"size": [[64]]})
