"""What evaluate keeps: answers across kills, baselines as files; and the base against itself."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from qvlopt.artifact.digest import sha256_bytes
from qvlopt.artifact.manifest import Manifest, SourceRecord, write_manifest
from qvlopt.commands.evaluate import EvaluateResult, evaluate, evaluate_with
from qvlopt.data.samples import Sample
from qvlopt.errors import NotComparableError, UsageError
from qvlopt.recipe.load import LoadedRecipe, load_recipe
from qvlopt.scoring.evaluate import Reuse
from tests.documents import check_document
from tests.fakes import FakeEngine, right
from tests.tiny import build_tiny

ITEMS = 200
SOURCE = sha256_bytes(b"source")


@pytest.fixture(autouse=True)
def no_ci(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CI", raising=False)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """`source`, an artifact `awq` made from it, and a set of ITEMS items about as many pictures."""
    (tmp_path / "source").mkdir()
    (tmp_path / "set").mkdir()
    for number in range(ITEMS):
        Image.new("RGB", (32, 32), (number, 0, 0)).save(tmp_path / "set" / f"{number}.png")
    rows = [{"id": f"i{n}", "images": [f"{n}.png"], "question": "q", "answers": [f"V{n}"], "task": "ocr"} for n in range(ITEMS)]
    (tmp_path / "set" / "manifest.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (tmp_path / "awq").mkdir()
    record = SourceRecord(path=str(tmp_path / "source"), digest=SOURCE)
    write_manifest(tmp_path / "awq", Manifest(kind="awq", digest="d", recipe={}, source=record))
    return tmp_path


def recipe(place: Path, *settings: str) -> LoadedRecipe:
    entry = {"name": "ocr", "path": str(place / "set"), "task": "ocr"}
    sections = {"model": {"path": str(place / "source")}, "output": str(place / "out"), "evaluate": {"data": [entry], "batch": 4}}
    return load_recipe(sections, overrides=settings)


class Engines:
    """Opens fakes that say what `says` has for the last part of the path, and keeps them."""

    def __init__(self, says: dict[str, Callable[[Sample], str | None]] | None = None, **fingerprint: Any) -> None:
        self.says = says or {}
        self.fingerprint = {"model_digest": SOURCE} | fingerprint
        self.engines: list[FakeEngine] = []

    def __call__(self, path: str) -> FakeEngine:
        name = Path(path).name
        fingerprint = self.fingerprint if name == "source" else self.fingerprint | {"model_digest": name}
        self.engines.append(FakeEngine(self.says.get(name, right), **fingerprint))
        return self.engines[-1]

    @property
    def asked(self) -> int:
        return sum(len(batch) for engine in self.engines for batch in engine.batches)


def report_of(result: EvaluateResult) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((result.report / "report.json").read_text(encoding="utf-8"))
    check_document(document)
    return document


def test_after_a_kill_only_what_is_left_is_asked(place: Path) -> None:
    seen: list[str] = []

    def killed(sample: Sample) -> str:
        if len(seen) == 30:
            raise KeyboardInterrupt
        seen.append(sample.id)
        return right(sample)

    reuse = Reuse(place / "cache")
    with pytest.raises(KeyboardInterrupt):
        evaluate_with(Engines({"source": killed}), recipe(place), ["model"], reuse=reuse)
    engines = Engines()
    result = evaluate_with(engines, recipe(place), ["model"], reuse=reuse)
    assert engines.asked == ITEMS - 28  # the seven batches of four that were finished
    assert report_of(result)["reused_answers"] == {str(place / "source"): 28}
    whole = evaluate_with(Engines(), recipe(place), ["model"])
    assert (result.report / "items.jsonl").read_bytes() == (whole.report / "items.jsonl").read_bytes()


def test_finished_answers_are_never_asked_again_and_other_conditions_are(place: Path) -> None:
    reuse = Reuse(place / "cache")
    for settings, changes, asked in (
        ((), {}, 2 * ITEMS),
        ((), {}, 0),
        (("evaluate.batch=5",), {}, 2 * ITEMS),
        (("evaluate.data.0.max_new_tokens=9",), {}, 2 * ITEMS),
        ((), {"dtype": "bfloat16"}, 2 * ITEMS),
        (("evaluate.limit=20",), {}, 0),
    ):
        engines = Engines(**changes)
        evaluate_with(engines, recipe(place, *settings), [str(place / "awq")], reuse=reuse)
        assert engines.asked == asked, settings


def test_an_engine_that_cannot_tell_its_weights_is_reused_on_request_only(place: Path) -> None:
    for reuse, asked in ((Reuse(place / "cache"), ITEMS), (Reuse(place / "cache", trusted=True), ITEMS), (Reuse(place / "cache", trusted=True), 0)):
        engines = Engines(model_digest=None)
        evaluate_with(engines, recipe(place), ["model"], reuse=reuse)
        assert engines.asked == asked


def saved(place: Path, *, says: dict[str, Callable[[Sample], str | None]] | None = None, settings: tuple[str, ...] = ()) -> Path:
    path = place / "base.json"
    evaluate_with(Engines(says), recipe(place, f"evaluate.save_baseline={path}", *settings), ["model"])
    return path


def test_a_saved_baseline_stands_for_the_base_without_asking_it(place: Path) -> None:
    def lossy(sample: Sample) -> str:
        return "WRONG" if int(sample.id[1:]) < 20 else right(sample)

    path = saved(place)
    engines = Engines({"awq": lossy})
    result = evaluate_with(engines, recipe(place, f"evaluate.baseline={path}"), [str(place / "awq")])
    assert engines.asked == ITEMS
    live = evaluate_with(Engines({"awq": lossy}), recipe(place), [str(place / "awq")])
    assert (result.verdict, live.verdict) == ("fail", "fail")
    metrics = [report_of(each)["results"][0]["metrics"] for each in (result, live)]
    assert metrics[0] == metrics[1]
    assert (result.report / "items.jsonl").read_bytes() == (live.report / "items.jsonl").read_bytes()
    assert report_of(result)["results"][0]["damage"] == {"kl_mean": None, "top1_agreement": None, "vision_cosine_min": None}


@pytest.mark.parametrize(
    ("settings", "changes"),
    [
        ((), {"pixels": {"min": 1, "max": 2}}),
        ((), {"generation": {"sampling": "top_p", "eos_ids": [1]}}),
        (("evaluate.batch=8",), {}),
        (("evaluate.limit=50",), {}),
        (("evaluate.data.0.prompt=Briefly, {question}",), {}),
        (("evaluate.data.0.max_new_tokens=9",), {}),
    ],
)
def test_a_baseline_made_under_other_conditions_is_not_compared(place: Path, settings: tuple[str, ...], changes: dict[str, Any]) -> None:
    path = saved(place)
    result = evaluate_with(Engines(**changes), recipe(place, f"evaluate.baseline={path}", *settings), [str(place / "awq")])
    assert (result.verdict, result.exit_code) == ("not_comparable", 4)
    assert report_of(result)["results"][0]["reasons"]


def test_a_baseline_is_written_on_request_only_and_the_same_every_time(place: Path) -> None:
    first = saved(place).read_bytes()
    with pytest.raises(UsageError, match=r"base\.json exists"):
        saved(place)
    loaded = recipe(place, f"evaluate.save_baseline={place / 'base.json'}")
    result = evaluate_with(Engines(), loaded, ["model"], overwrite=True)
    assert (place / "base.json").read_bytes() == first
    assert "0 of 200 answers change" in report_of(result)["warnings"][-1]
    assert [path.name for path in place.iterdir() if "base" in path.name] == ["base.json"]


def test_in_ci_a_baseline_is_not_written_by_chance(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI", "true")
    engines = Engines()
    loaded = recipe(place, f"evaluate.save_baseline={place / 'base.json'}")
    with pytest.raises(UsageError, match="not written in CI"):
        evaluate_with(engines, loaded, ["model"])
    assert engines.engines == []
    evaluate_with(engines, loaded, ["model"], overwrite=True)
    assert (place / "base.json").exists()


def test_answers_with_failed_items_are_no_baseline(place: Path) -> None:
    assert not saved(place, says={"source": lambda sample: None if sample.id == "i3" else right(sample)}).exists()


def test_one_candidate_is_saved(place: Path) -> None:
    loaded = recipe(place, f"evaluate.save_baseline={place / 'base.json'}")
    with pytest.raises(UsageError, match="one candidate is saved, not 2"):
        evaluate_with(Engines(), loaded, ["model", str(place / "awq")])


def test_a_missing_baseline_is_not_comparable(place: Path) -> None:
    with pytest.raises(NotComparableError, match="there is no file or folder"):
        evaluate_with(Engines(), recipe(place, f"evaluate.baseline={place / 'gone.json'}"), ["model"])


class Moody:
    """Says something wrong to every fourth item when it is asked for one at a time."""

    def __call__(self, path: str) -> FakeEngine:
        engine = FakeEngine(model_digest=SOURCE if Path(path).name == "source" else "awq")

        def say(sample: Sample) -> str:
            alone = len(engine.batches[-1]) == 1
            return "WRONG" if alone and int(sample.id[1:]) % 4 == 0 else right(sample)

        engine.say = say
        return engine


def test_a_base_that_contradicts_itself_keeps_a_candidate_from_passing(place: Path) -> None:
    plain = evaluate_with(Moody(), recipe(place), [str(place / "awq")])
    checked = evaluate_with(Moody(), recipe(place, "evaluate.gate.self_check=true"), [str(place / "awq")])
    assert (plain.verdict, checked.verdict) == ("pass", "inconclusive")
    assert report_of(checked)["results"][0]["noise"] == {"batches": [4, 1], "n": ITEMS, "flips": 50, "texts": 50, "verdict": "fail"}
    path = place / "base.json"
    evaluate_with(Moody(), recipe(place, f"evaluate.save_baseline={path}", "evaluate.gate.self_check=true"), ["model"])
    stored = evaluate_with(Moody(), recipe(place, f"evaluate.baseline={path}"), [str(place / "awq")])
    assert (stored.verdict, report_of(stored)["results"][0]["noise"]["flips"]) == ("inconclusive", 50)
    quiet = evaluate_with(Engines(), recipe(place, "evaluate.gate.self_check=true"), [str(place / "awq")])
    assert (quiet.verdict, report_of(quiet)["results"][0]["noise"]["flips"]) == ("pass", 0)


def test_two_real_checkpoints_show_their_damage_and_the_cache_changes_nothing(place: Path) -> None:
    (place / "source").rmdir()
    base = build_tiny(place / "source", dtype="float32")
    other = build_tiny(place / "other", dtype="float32", seed=1)
    flags = ("evaluate.limit=4", "evaluate.data.0.max_new_tokens=4", "hardware.threads=1", "hardware.device=cpu", "evaluate.damage.items=2")
    results = [evaluate(recipe(place, *flags), [str(candidate)]) for candidate in (other, other, base)]
    documents = [report_of(result) for result in results if isinstance(result, EvaluateResult)]
    damage = documents[0]["results"][0]["damage"]
    assert damage["kl_mean"] > 0
    assert damage["items"] == 2
    assert damage["vision_cosine_min"] < 0.9
    assert damage["blame"]["stage"] == damage["layers"][0]["stage"]
    assert len(damage["layers"]) > 5
    assert documents[1]["results"][0]["damage"] == damage
    assert set(documents[1]["reused_answers"].values()) == {4}
    assert documents[2]["results"][0]["baseline"] is None
