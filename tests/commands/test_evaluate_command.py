"""evaluate from recipe to report folder, with engines that say what a test wants."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from rich.console import Console

from qvlopt.artifact.digest import sha256_bytes
from qvlopt.artifact.lock import locked
from qvlopt.artifact.manifest import Manifest, SourceRecord, read_manifest, verify_files, write_manifest
from qvlopt.commands import evaluate as module
from qvlopt.commands.evaluate import EvaluateResult, evaluate, evaluate_with
from qvlopt.commands.plan import Plan
from qvlopt.data.samples import Sample
from qvlopt.errors import NotComparableError, QvloptError, RunError, UsageError
from qvlopt.recipe.load import LoadedRecipe, load_recipe
from qvlopt.report.write import write_report
from tests.documents import check_document, document_of
from tests.fakes import FakeEngine, right
from tests.tiny import build_tiny

ITEMS = 40


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with an empty `source`, and `set`: three tasks of ITEMS items each, two questions a picture."""
    (tmp_path / "source").mkdir()
    folder = tmp_path / "set"
    folder.mkdir()
    for number in range(ITEMS // 2):
        Image.new("RGB", (32 + 32 * (number % 3), 32), (number, 0, 0)).save(folder / f"{number}.png")
    rows = [
        {"id": f"{task}-{i}", "images": [f"{i // 2}.png"], "question": f"{task}?", "answers": [f"V{i}"], "task": task}
        for task in ("ocr", "vqa", "doc")
        for i in range(ITEMS)
    ]
    (folder / "manifest.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return tmp_path


def recipe(place: Path, *settings: str, tasks: tuple[str, ...] = ("ocr", "vqa", "doc")) -> LoadedRecipe:
    entries = [{"name": task, "path": str(place / "set"), "task": task} for task in tasks]
    sections = {
        "model": {"path": str(place / "source")},
        "output": str(place / "out"),
        "evaluate": {"data": entries, "gate": {"margin": 0.2}},
    }
    return load_recipe(sections, overrides=settings)


def artifact(folder: Path, *, kind: str = "awq", source: Path | None = None) -> Path:
    folder.mkdir(parents=True)
    record = SourceRecord(path=str(source), digest=sha256_bytes(b"source")) if source else None
    write_manifest(folder, Manifest(kind=kind, digest="d", recipe={}, source=record))
    return folder


class Engines:
    """Opens fakes by the last part of the path, and keeps what was opened."""

    def __init__(self, **says: Callable[[Sample], str | None]) -> None:
        self.says = says
        self.opened: list[str] = []
        self.engines: list[FakeEngine] = []

    def __call__(self, path: str) -> FakeEngine:
        assert all(engine.is_closed for engine in self.engines), "two models in memory at once"
        self.opened.append(path)
        self.engines.append(FakeEngine(self.says.get(Path(path).name, right), model_digest=sha256_bytes(b"source")))
        return self.engines[-1]


def wrong(*ids: str) -> Callable[[Sample], str]:
    return lambda sample: "WRONG" if sample.id in ids else right(sample)


def report_of(result: EvaluateResult) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((result.report / "report.json").read_text(encoding="utf-8"))
    return document


def items_of(result: EvaluateResult) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (result.report / "items.jsonl").read_text(encoding="utf-8").splitlines()]


def shown(result: EvaluateResult) -> str:
    console = Console(file=io.StringIO(), width=160, markup=False, emoji=False, highlight=False)
    result.render(console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_candidate_is_compared_with_the_source_of_its_manifest(place: Path) -> None:
    path = artifact(place / "awq", source=place / "source")
    engines = Engines()
    result = evaluate_with(engines, recipe(place), [str(path)])
    assert engines.opened == [str(place / "source"), str(path)]
    assert (result.verdict, result.exit_code) == ("pass", 0)
    assert result.comparisons[0].baseline == str(place / "source")


def test_the_json_is_what_the_contract_promises(place: Path) -> None:
    result = evaluate_with(Engines(awq=wrong("ocr-3")), recipe(place), [str(artifact(place / "awq", source=place / "source"))])
    check_document(document_of("evaluate", result.to_json(), exit_code=result.exit_code))
    document = report_of(result)
    check_document(document)
    primary = [metric for metric in document["results"][0]["metrics"] if metric["primary"]]
    assert [(metric["name"], metric["metric"], metric["n"]) for metric in primary] == [
        ("ocr", "exact_match", 40),
        ("vqa", "vqa_exact", 40),
        ("doc", "anls", 40),
    ]
    assert (primary[0]["base"], primary[0]["candidate"], primary[0]["lost"], primary[0]["gained"]) == (1.0, 0.975, 1, 0)
    assert primary[0]["ci_low"] < -0.025 < primary[0]["ci_high"]
    assert document["results"][0]["damage"] == {"kl_mean": None, "top1_agreement": None, "vision_cosine_min": None}
    others = [metric for metric in document["results"][0]["metrics"] if not metric["primary"]]
    assert {metric["verdict"] for metric in others} == {None}
    assert "cer" in [metric["metric"] for metric in others]


def test_the_fingerprint_says_what_the_numbers_depend_on(place: Path) -> None:
    result = evaluate_with(Engines(), recipe(place, "evaluate.batch=3"), ["model"])
    fingerprint = report_of(result)["fingerprint"]
    assert [(entry["name"], entry["items"], len(entry["digest"])) for entry in fingerprint["data"]] == [
        ("ocr", 40, 64),
        ("vqa", 40, 64),
        ("doc", 40, 64),
    ]
    assert fingerprint["batch"] == 3
    assert fingerprint["engines"][str(place / "source")]["pixels"] == {"min": 1024, "max": 65536}
    assert {"python", "pillow", "qvlopt"} <= set(fingerprint["versions"])


def test_every_chosen_item_has_one_row_with_raw_texts(place: Path) -> None:
    (place / "set" / "0.png").unlink()
    says = {"awq": lambda sample: f" {right(sample)}\n"}
    settings = ("evaluate.gate.max_failed=6", "evaluate.gate.margin=0.3")
    result = evaluate_with(Engines(**says), recipe(place, *settings), [str(artifact(place / "awq", source=place / "source"))])
    rows = items_of(result)
    assert [row["id"] for row in rows] == [f"{task}-{i}" for task in ("ocr", "vqa", "doc") for i in range(ITEMS)]
    assert rows[2]["candidate_answer"]["text"] == " V2\n"
    assert rows[2]["base_answer"] == {
        "text": "V2",
        "stop": "eos",
        "error": None,
        "prompt_tokens": 3,
        "new_tokens": 2,
        "scores": {"exact_match": 1.0, "cer": 0.0, "wer": 0.0, "anls": 1.0},
    }
    assert rows[2]["size"] == [[64, 32]]
    assert "0.png: is missing" in rows[0]["failed"]
    assert rows[0]["candidate_answer"] is None
    assert result.verdict == "pass"
    assert report_of(result)["results"][0]["sets"][0]["compared"] == 38


def test_failed_items_beyond_the_limit_give_status_5_and_still_a_report(place: Path) -> None:
    (place / "set" / "0.png").write_bytes(b"")
    result = evaluate_with(Engines(), recipe(place), ["model"])
    assert (result.verdict, result.exit_code) == ("error", 5)
    assert "6 items failed, gate.max_failed is 0" in shown(result)
    assert "0.png: is empty" in (result.report / "report.md").read_text(encoding="utf-8")


def test_a_loss_gives_status_1(place: Path) -> None:
    bad = artifact(place / "bad", source=place / "source")
    lossy = wrong(*(f"ocr-{i}" for i in range(ITEMS)))
    result = evaluate_with(Engines(bad=lossy), recipe(place), [str(bad)])
    assert (result.verdict, result.exit_code) == ("fail", 1)
    text = shown(result)
    assert "ocr exact_match: dropped by more than 20.00 points: difference -100.00 points" in text
    assert "verdict: fail" in text


@pytest.mark.parametrize(("policy", "status"), [("fail", 3), ("warn", 0), ("pass", 0)])
def test_too_few_items_are_inconclusive_and_the_policy_decides(place: Path, policy: str, status: int) -> None:
    settings = ("evaluate.gate.margin=0.01", f"evaluate.gate.on_inconclusive={policy}")
    result = evaluate_with(Engines(), recipe(place, *settings), [str(artifact(place / "awq", source=place / "source"))])
    assert (result.verdict, result.exit_code) == ("inconclusive", status)
    assert "cannot rule out a drop of more than 1.00 points" in shown(result)
    assert "items would be needed" in shown(result)


def test_answers_that_are_none_are_said_for_both_sides(place: Path) -> None:
    says = {"awq": lambda sample: "x" * 999 if sample.id < "ocr-2" else "", "source": lambda sample: "" if sample.id == "ocr-0" else right(sample)}
    text = shown(evaluate_with(Engines(**says), recipe(place, tasks=("ocr",)), [str(artifact(place / "awq", source=place / "source"))]))
    assert "ocr: 12 answers stopped by the limit of new tokens, 0 of the base" in text
    assert "ocr: 28 empty answers, 1 of the base" in text


def test_the_worst_candidate_decides_and_the_base_is_asked_once(place: Path) -> None:
    good, bad = (artifact(place / name, source=place / "source") for name in ("good", "bad"))
    engines = Engines(bad=wrong(*(f"vqa-{i}" for i in range(ITEMS))))
    result = evaluate_with(engines, recipe(place), [str(good), str(bad), str(good)])
    assert [comparison.verdict for comparison in result.comparisons] == ["pass", "fail"]
    assert engines.opened == [str(place / "source"), str(good), str(bad)]
    assert result.exit_code == 1


def test_the_source_alone_is_scored_and_not_compared(place: Path) -> None:
    engines = Engines()
    result = evaluate_with(engines, recipe(place), ["model"])
    assert engines.opened == [str(place / "source")]
    assert (result.verdict, result.exit_code) == ("pass", 0)
    metrics = result.to_json()["results"][0]["metrics"]
    assert {(metric["base"], metric["delta"], metric["ci_low"]) for metric in metrics} == {(None, None, None)}
    assert "model: pass (scored only, nothing was compared)" in shown(result)


def test_without_candidates_finished_artifacts_under_the_output_are_taken(place: Path) -> None:
    for name, kind in {"awq": "awq", "calibrate": "statistics", ".awq.tmp-1": "awq"}.items():
        artifact(place / "out" / name, kind=kind, source=place / "source")
    engines = Engines()
    evaluate_with(engines, recipe(place))
    assert engines.opened == [str(place / "source"), str(place / "out" / "awq")]


def test_an_export_of_one_part_is_not_taken_and_refused_by_name(place: Path) -> None:
    folder = artifact(place / "out" / "export", kind="export", source=place / "source")
    write_manifest(folder, read_manifest(folder).model_copy(update={"recipe": {"export": {"parts": ["vision"]}}}))
    engines = Engines()
    assert evaluate_with(engines, recipe(place)).comparisons[0].candidate == "model"
    with pytest.raises(UsageError, match="kind export of one part, which answers nothing"):
        evaluate_with(engines, recipe(place), [str(folder)])


@pytest.mark.parametrize(("engine", "taken"), [("torch", "awq"), ("onnx", "export")])
def test_the_recipes_engine_is_about_candidates_and_not_their_base(place: Path, engine: str, taken: str) -> None:
    folders = {kind: artifact(place / "out" / kind, kind=kind, source=place / "source") for kind in ("awq", "export")}
    engines = Engines()
    evaluate_with(engines, recipe(place, f"evaluate.engine={engine}"))
    assert engines.opened == [str(place / "source"), str(folders[taken])]
    other = next(folder for kind, folder in folders.items() if kind != taken)
    with pytest.raises(UsageError, match=rf"{engine} does not answer for .*{other.name}, which is an artifact of kind {other.name}"):
        evaluate_with(Engines(), recipe(place, f"evaluate.engine={engine}"), [str(other)])


def test_without_artifacts_the_source_is_taken(place: Path) -> None:
    engines = Engines()
    assert evaluate_with(engines, recipe(place)).comparisons[0].candidate == "model"


def test_a_folder_that_qvlopt_did_not_write_is_compared_with_the_recipes_model(place: Path) -> None:
    (place / "foreign").mkdir()
    assert evaluate_with(Engines(), recipe(place), [str(place / "foreign")]).comparisons[0].baseline == str(place / "source")


def test_a_baseline_folder_takes_the_sources_place(place: Path) -> None:
    old, new = (artifact(place / name, source=place / "source") for name in ("old", "new"))
    engines = Engines(old=wrong("ocr-1"))
    result = evaluate_with(engines, recipe(place, f"evaluate.baseline={old}"), [str(new)])
    assert engines.opened == [str(old), str(new)]
    assert result.comparisons[0].sets[0].metrics[0].delta == pytest.approx(1 / ITEMS)


def test_a_candidate_found_from_the_working_directory(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    artifact(place / "here" / "awq", source=place / "source")
    monkeypatch.chdir(place / "here")
    engines = Engines()
    evaluate_with(engines, recipe(place), ["awq"])
    assert engines.opened[1] == str(place / "here" / "awq")


@pytest.mark.parametrize(
    ("candidate", "message"),
    [("http://user@localhost:8000/v1#m", "no user, password or query"), ("nowhere", "there is no such folder"), ("statistics", "answers nothing")],
)
def test_candidates_that_cannot_answer_are_refused(place: Path, monkeypatch: pytest.MonkeyPatch, candidate: str, message: str) -> None:
    artifact(place / "statistics", kind="statistics", source=place / "source")
    monkeypatch.chdir(place)
    with pytest.raises(UsageError, match=message):
        evaluate_with(Engines(), recipe(place), [candidate])
    assert not (place / "out").exists()


@pytest.mark.parametrize(
    ("setting", "error", "message"),
    [
        ("evaluate.baseline=gone", NotComparableError, "there is no file or folder gone"),
        ("evaluate.baseline=set/manifest.jsonl", NotComparableError, "is no baseline that this version reads"),
        ("evaluate.save_baseline=gone/base.json", UsageError, "not a file in a folder that exists"),
        ("evaluate.data.0.path=gone", RunError, "evaluate.data ocr: there is no set gone"),
        ("evaluate.data.0.prompt=Answer!", UsageError, "prompt has no {question}"),
        ("evaluate.data.0.columns={bild: x}", UsageError, "unknown key 'bild'"),
        ("evaluate.gate.floors={ocr.bleu: 0.5}", UsageError, "ocr.bleu is no metric"),
        ("evaluate.gate.floors={ocr.cer: 0.5}", UsageError, "ocr.cer is an error rate"),
    ],
)
def test_what_cannot_work_is_refused_before_an_engine_is_opened(
    place: Path, monkeypatch: pytest.MonkeyPatch, setting: str, error: type[Exception], message: str
) -> None:
    artifact(place / "awq", source=place / "source")
    monkeypatch.chdir(place)
    engines = Engines()
    with pytest.raises(error, match=message):
        evaluate_with(engines, recipe(place, setting), ["awq"])
    assert engines.opened == []


def test_an_artifact_whose_source_is_gone_has_no_baseline(place: Path) -> None:
    path = artifact(place / "awq", source=place / "removed")
    with pytest.raises(NotComparableError, match=r"was made from .*removed, which is not there"):
        evaluate_with(Engines(), recipe(place), [str(path)])


def test_items_without_answers_cannot_be_scored(place: Path) -> None:
    with (place / "set" / "manifest.jsonl").open("a", encoding="utf-8") as handle:
        handle.write('{"id": "bare", "images": ["1.png"], "question": "q", "task": "ocr"}\n')
    with pytest.raises(RunError, match=r"manifest\.jsonl:121: item bare has no answers"):
        evaluate_with(Engines(), recipe(place), ["model"])


def test_prompt_limits_and_lengths_are_the_entries(place: Path) -> None:
    engines = Engines(source=lambda _sample: "x" * 99)
    settings = (
        "evaluate.data.0.prompt=<image>{question} Short {please}.",
        "evaluate.data.0.max_new_tokens=5",
        "evaluate.data.0.limit=7",
        "evaluate.limit=9",
    )
    result = evaluate_with(engines, recipe(place, *settings), ["model"])
    rows = items_of(result)
    assert [sum(row["set"] == name for row in rows) for name in ("ocr", "vqa", "doc")] == [7, 9, 9]
    assert rows[0]["question"] == "<image>ocr? Short {please}."
    assert rows[0]["candidate_answer"]["new_tokens"] == 5
    assert {row["candidate_answer"]["stop"] for row in rows} == {"length"}


def test_rows_of_two_files_with_the_same_ids_are_kept_apart(place: Path) -> None:
    lines = [json.dumps({"id": 0, "images": ["1.png"], "question": "q", "answers": name}) + "\n" for name in ("first", "second")]
    for number, line in enumerate(lines):
        (place / "set" / f"{number}.jsonl").write_text(line, encoding="utf-8")
    settings = tuple(f"evaluate.data.{number}.path={place / 'set' / f'{number}.jsonl'}" for number in range(2))
    result = evaluate_with(Engines(), recipe(place, *settings, tasks=("ocr", "vqa")), ["model"])
    assert [(row["set"], row["id"], row["candidate_answer"]["text"]) for row in items_of(result)] == [("ocr", "0", "first"), ("vqa", "0", "second")]


def test_reports_stay_and_latest_is_the_newest(place: Path) -> None:
    first, second = (evaluate_with(Engines(), recipe(place), ["model"]).report for _ in range(2))
    assert first != second
    assert (place / "out" / "evaluate" / "latest").resolve() == second.resolve()
    assert sorted(path.name for path in second.iterdir()) == ["items.jsonl", "junit.xml", "report.html", "report.json", "report.md"]


def test_two_evaluations_differ_in_times_only(place: Path) -> None:
    path = str(artifact(place / "awq", source=place / "source"))
    first, second = (evaluate_with(Engines(awq=wrong("doc-1")), recipe(place), [path]) for _ in range(2))
    assert (first.report / "items.jsonl").read_bytes() == (second.report / "items.jsonl").read_bytes()
    changing = {"started", "seconds", "peak_rss_bytes", "output", "report"}
    documents = [{key: value for key, value in report_of(result).items() if key not in changing} for result in (first, second)]
    assert documents[0] == documents[1]


HOSTILE = "::error file=x::gone\n\x1b[31m|<script>alert(1)</script> @everyone \u202e ##[error]x"


def test_what_a_model_says_never_acts_in_a_report_or_on_a_terminal(place: Path) -> None:
    path = artifact(place / "awq", source=place / "source")
    result = evaluate_with(Engines(awq=lambda _sample: HOSTILE), recipe(place), [str(path)])
    page = (result.report / "report.md").read_text(encoding="utf-8")
    assert not {"\x1b", "\u202e", "<", "@"} & set(page)
    assert "::" not in page
    assert "##[" not in page
    assert "gone" in page
    assert not {"\x1b", "\u202e"} & set(shown(result))
    assert items_of(result)[0]["candidate_answer"]["text"] == HOSTILE


def test_an_interrupt_leaves_no_report(place: Path) -> None:
    def interrupt(_sample: Sample) -> str:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        evaluate_with(Engines(source=interrupt), recipe(place), ["model"])
    assert not (place / "out").exists()


def test_animations_are_warned_of_once(place: Path, caplog: pytest.LogCaptureFixture) -> None:
    frames = [Image.new("RGB", (32, 32), colour) for colour in ("red", "lime")]
    frames[0].save(place / "set" / "0.png", save_all=True, append_images=frames[1:])
    with caplog.at_level(logging.WARNING):
        result = evaluate_with(Engines(), recipe(place, tasks=("ocr",)), ["model"])
    remark = "ocr: 1 picture has more than one frame; the first frame is used (such as 0.png: 2 frames)"
    assert [record.getMessage() for record in caplog.records] == [remark]
    assert report_of(result)["warnings"] == [remark]


def test_a_dry_run_says_what_can_be_told_and_writes_nothing(place: Path) -> None:
    path = artifact(place / "awq", source=place / "source")
    plan = evaluate(recipe(place), [str(path)], dry_run=True)
    assert isinstance(plan, Plan)
    rows = [f"{row.item}: {row.value}" for row in plan.rows]
    assert f"candidate: {path} against {place / 'source'}" in rows
    assert "set ocr: 40 items about 20 pictures, 0 unusable" in rows
    assert "can tell: drops of 11.92 points and more at best, margin 20.00" in rows
    assert not (place / "out").exists()


def test_a_torch_engine_answers_through_the_command(place: Path) -> None:
    """Two tiny checkpoints of other weights: real answers, and the same ones when asked again in other batches."""
    (place / "source").rmdir()
    build_tiny(place / "source")
    other = build_tiny(place / "other", seed=1)
    settings = ("evaluate.limit=4", "evaluate.data.0.max_new_tokens=6", "hardware.threads=1", "hardware.device=cpu")
    results = [evaluate(recipe(place, *settings, f"evaluate.batch={batch}", tasks=("ocr",)), [str(other)]) for batch in (1, 4)]
    rows = []
    for result in results:
        assert isinstance(result, EvaluateResult)
        rows.append(items_of(result))
    assert rows[0] == rows[1]
    assert rows[0][0]["base_answer"]["text"] != rows[0][0]["candidate_answer"]["text"]
    assert {row["candidate_answer"]["prompt_tokens"] > 3 for row in rows[0]} == {True}


CARD_FRAME = "# Card\n<!-- scores -->\n<!-- end of scores -->\n"


def with_card(folder: Path) -> Path:
    (folder / "README.md").write_text(CARD_FRAME, encoding="utf-8")
    write_manifest(folder, read_manifest(folder))
    return folder


def test_an_empty_name_is_no_candidate(place: Path) -> None:
    with pytest.raises(UsageError, match="empty name"):
        evaluate_with(Engines(), recipe(place), [""])


def test_the_scores_go_on_the_candidates_card(place: Path) -> None:
    path = with_card(artifact(place / "awq", source=place / "source"))
    evaluate_with(Engines(), recipe(place), [str(path)])
    assert "exact_match" in (path / "README.md").read_text(encoding="utf-8")
    assert verify_files(path) == []


def test_a_card_that_cannot_be_renewed_is_a_warning_and_the_report_is_there(place: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = with_card(artifact(place / "awq", source=place / "source"))
    with locked(path):
        result = evaluate_with(Engines(), recipe(place), [str(path)])
    assert (result.exit_code, (result.report / "report.md").is_file()) == (0, True)
    assert "README.md: the scores could not be put on the card" in caplog.text
    assert (path / "README.md").read_text(encoding="utf-8") == CARD_FRAME


def test_a_card_that_somebody_edited_stays_theirs_whatever_its_encoding(place: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = with_card(artifact(place / "awq", source=place / "source"))
    (path / "README.md").write_bytes("été".encode("latin-1"))
    assert evaluate_with(Engines(), recipe(place), [str(path)]).exit_code == 0
    assert "was edited" in caplog.text
    assert (path / "README.md").read_bytes() == "été".encode("latin-1")


@pytest.mark.parametrize("role", ["candidate", "baseline"])
def test_an_artifact_whose_weights_changed_is_not_asked(place: Path, role: str) -> None:
    path = artifact(place / "awq", source=place / "source")
    (path / "model.safetensors").write_bytes(b"weights")
    write_manifest(path, read_manifest(path))
    (path / "model.safetensors").write_bytes(b"wEights")
    candidates, settings = ([str(path)], ()) if role == "candidate" else (["model"], (f"evaluate.baseline={path}",))
    engines = Engines()
    with pytest.raises(RunError, match=r"awq is damaged: model\.safetensors"):
        evaluate_with(engines, recipe(place, *settings), candidates)
    assert engines.opened == []


@pytest.mark.parametrize("output", ["file", "file/below"])
def test_a_place_where_no_report_can_be_written_is_refused_before_the_work(place: Path, output: str) -> None:
    (place / "file").write_text("mine")
    engines = Engines()
    with pytest.raises(QvloptError, match=r"file") as refused:
        evaluate_with(engines, recipe(place, f"output={place / output}"), ["model"])
    assert refused.value.hint is not None
    assert engines.opened == []
    assert (place / "file").read_text() == "mine"


def test_two_runs_of_the_same_second_both_leave_their_report(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other run's report appears after this one chose its name."""
    choose = module.new_folder
    theirs: list[Path] = []

    def overtaken(parent: Path, stamp: str) -> Path:
        path = choose(parent, stamp)
        if not theirs:
            theirs.append(path)
            write_report(path, {"report.md": "theirs"})
        return path

    monkeypatch.setattr(module, "new_folder", overtaken)
    result = evaluate_with(Engines(), recipe(place), ["model"])
    assert result.report.name == f"{theirs[0].name}-2"
    assert report_of(result)["output"] == str(result.report)
    assert (theirs[0] / "report.md").read_text(encoding="utf-8") == "theirs"
