"""Engines are asked every usable item once; what fails is counted where it failed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from qvlopt.data.preflight import check_pictures
from qvlopt.data.samples import ImageRef, Sample
from qvlopt.errors import RunError
from qvlopt.report.progress import SilentProgress
from qvlopt.runtime.engine import Answer, Prepared
from qvlopt.scoring.compare import Comparison, Rule, compare
from qvlopt.scoring.evaluate import EngineRun, EvalSet, Target, ask_engine
from qvlopt.scoring.tasks import TASKS
from tests.fakes import FakeEngine, right

SIZES = {"small.png": (32, 32), "wide.png": (96, 32), "tall.png": (32, 96)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pictures")
    for name, size in SIZES.items():
        Image.new("RGB", size).save(path / name)
    whole = (path / "wide.png").read_bytes()
    (path / "cut.png").write_bytes(whole[: len(whole) // 2 + 10])
    return path


def make_set(folder: Path, names: Sequence[str], *, task: str = "ocr", name: str = "ocr") -> EvalSet:
    samples = tuple(Sample(f"{i:03}", (ImageRef(file, folder),), "q", (f"TEXT{i}",), task, f"{i:03}", f"x:{i}") for i, file in enumerate(names))
    checked = check_pictures(samples)
    return EvalSet(name, task, samples, checked.skipped, checked.sizes, TASKS[task], 32, "digest")


def run(engine: FakeEngine, sets: Sequence[EvalSet], batch: int = 4) -> EngineRun:
    return ask_engine(engine, sets, batch=batch, progress=SilentProgress(), label="test")


def rule(**changes: object) -> Rule:
    values = {"margin": 0.02, "alpha": 0.05, "max_failed": 0, "floors": {}} | changes
    return Rule(**values)  # type: ignore[arg-type]


def compared(base: FakeEngine | None, candidate: FakeEngine, sets: Sequence[EvalSet], **changes: object) -> Comparison:
    target = Target("candidate", "path", "base" if base else None, "digest 1")
    return compare(target, (run(base, sets) if base else None, run(candidate, sets)), sets, rule(**changes))


def wrong_for(*ids: str) -> FakeEngine:
    return FakeEngine(lambda sample: "WRONG" if sample.id in ids else right(sample))


def test_every_item_is_answered_once_and_results_are_in_the_order_of_the_set(folder: Path) -> None:
    engine = FakeEngine()
    each = make_set(folder, ["wide.png", "small.png", "tall.png"] * 5)
    answered = run(engine, [each]).answered["ocr"]
    assert list(answered.answers) == [sample.id for sample in each.samples]
    assert sorted(id for batch in engine.batches for id in batch) == sorted(answered.answers)
    assert max(map(len, engine.batches)) == 4


def test_pictures_of_one_size_are_asked_together(folder: Path) -> None:
    engine = FakeEngine()
    run(engine, [make_set(folder, ["wide.png", "small.png"] * 4)])
    assert [[int(id) % 2 for id in batch] for batch in engine.batches] == [[1] * 4, [0] * 4]


@pytest.mark.parametrize("batch", [1, 3, 100])
def test_the_batch_does_not_change_what_is_kept(folder: Path, batch: int) -> None:
    sets = [make_set(folder, ["wide.png", "small.png", "cut.png", "tall.png"] * 3)]
    assert run(FakeEngine(), sets, batch) == run(FakeEngine(), sets, 4)


def test_a_picture_that_breaks_while_decoding_is_counted_and_leaves_the_pairs(folder: Path) -> None:
    each = make_set(folder, ["small.png", "cut.png", "wide.png", "gone.png"])
    assert [skipped.id for skipped in each.skipped] == ["003"]
    result = compared(FakeEngine(), FakeEngine(), [each], max_failed=2)
    assert result.sets[0].paired == ("000", "002")
    assert sorted(result.sets[0].failures) == ["001", "003"]
    assert "cut.png" in result.sets[0].failures["001"]
    assert "gone.png: is missing" in result.sets[0].failures["003"]
    assert [(metric.n, metric.n_failed) for metric in result.sets[0].metrics if metric.is_primary] == [(2, 2)]


def test_more_failed_items_than_allowed_are_an_error_and_fewer_are_not(folder: Path) -> None:
    each = make_set(folder, ["small.png"] * 200 + ["gone.png"])
    assert compared(FakeEngine(), FakeEngine(), [each], max_failed=1).verdict == "pass"
    strict = compared(FakeEngine(), FakeEngine(), [each])
    assert strict.verdict == "error"
    assert strict.reasons == ("1 items failed, gate.max_failed is 0",)
    assert strict.sets[0].metrics[0].verdict == "pass"


def test_an_engine_failure_scores_zero_on_its_side(folder: Path) -> None:
    each = make_set(folder, ["small.png"] * 4)
    broken = FakeEngine(lambda sample: None if sample.id == "002" else right(sample))
    result = compared(FakeEngine(), broken, [each], max_failed=1)
    primary = result.sets[0].metrics[0]
    assert (primary.n, primary.n_failed, primary.base, primary.candidate) == (4, 1, 1.0, 0.75)
    assert primary.figures is not None
    assert primary.figures.lost == 1
    assert result.sets[0].failures == {"002": "the candidate gave no answer: logits are not finite"}


def test_one_item_cannot_spoil_its_batch(folder: Path) -> None:
    each = make_set(folder, ["small.png"] * 5)

    class Fragile(FakeEngine):
        def generate(self, prepared: Sequence[Prepared], *, max_new_tokens: int) -> list[Answer]:
            if any(item.id == "001" for item in prepared):
                raise RuntimeError("kernel failed")
            return super().generate(prepared, max_new_tokens=max_new_tokens)

    answers = run(Fragile(), [each]).answered["ocr"].answers
    assert [id for id, answer in answers.items() if answer.error] == ["001"]
    assert answers["001"].error == "RuntimeError: kernel failed"
    assert answers["000"].text == "TEXT0"


def test_a_run_error_ends_the_run(folder: Path) -> None:
    def fail(_sample: Sample) -> str:
        raise RunError("the disk is gone")

    engine = FakeEngine(fail)
    with pytest.raises(RunError, match="the disk is gone"):
        run(engine, [make_set(folder, ["small.png"])])


def test_answers_in_another_order_are_a_bug_of_the_engine(folder: Path) -> None:
    class Shuffling(FakeEngine):
        def generate(self, prepared: Sequence[Prepared], *, max_new_tokens: int) -> list[Answer]:
            return super().generate(prepared, max_new_tokens=max_new_tokens)[::-1]

    with pytest.raises(RunError, match="bug of the engine"):
        run(Shuffling(), [make_set(folder, ["small.png"] * 2)])


def test_the_limit_of_new_tokens_is_the_sets(folder: Path) -> None:
    engine = FakeEngine(lambda _sample: "x" * 1000)
    result = compared(None, engine, [make_set(folder, ["small.png"] * 3)])
    assert result.sets[0].candidate.n_truncated == 3
    assert {len(answer.text) for answer in result.runs[1].answered["ocr"].answers.values()} == {32}


def test_a_demonstrated_loss_fails_and_a_gain_passes(folder: Path) -> None:
    each = make_set(folder, ["small.png"] * 200)
    worse = wrong_for(*(f"{i:03}" for i in range(20)))
    assert compared(FakeEngine(), worse, [each]).verdict == "fail"
    assert compared(wrong_for(*(f"{i:03}" for i in range(20))), FakeEngine(), [each]).verdict == "pass"
    assert compared(FakeEngine(), wrong_for("000"), [each]).verdict == "inconclusive"


def test_the_worst_set_decides(folder: Path) -> None:
    sets = [make_set(folder, ["small.png"] * 200, name=name) for name in ("a", "b")]
    engine = FakeEngine(lambda sample: "WRONG" if sample.id < "020" and len(engine.batches) > 50 else right(sample))
    result = compared(FakeEngine(), engine, sets)
    assert [each.metrics[0].verdict for each in result.sets] == ["pass", "fail"]
    assert result.verdict == "fail"


@pytest.mark.parametrize(
    ("changes", "is_comparable"),
    [
        ({"pixels": {"min": 1, "max": 2}}, False),
        ({"generation": {"sampling": "top_p", "eos_ids": [1]}}, False),
        ({"dtype": "bfloat16", "engine": "other", "threads": 3}, True),
    ],
)
def test_unlike_conditions_are_not_compared(folder: Path, changes: dict[str, Any], is_comparable: bool) -> None:
    result = compared(FakeEngine(), FakeEngine(**changes), [make_set(folder, ["small.png"] * 200)])
    assert result.verdict == ("pass" if is_comparable else "not_comparable")
    assert (result.sets[0].metrics[0].figures is not None) is is_comparable
    assert bool(result.reasons) is not is_comparable


@pytest.mark.parametrize(("digest", "verdict"), [("digest 1", "pass"), ("digest 2", "not_comparable"), (None, "pass")])
def test_a_base_with_other_content_is_not_the_base(folder: Path, digest: str | None, verdict: str) -> None:
    result = compared(FakeEngine(model_digest=digest), FakeEngine(), [make_set(folder, ["small.png"] * 200)])
    assert result.verdict == verdict


def test_without_a_base_the_candidate_is_scored_and_nothing_is_compared(folder: Path) -> None:
    result = compared(None, wrong_for("000"), [make_set(folder, ["small.png"] * 4)])
    primary = result.sets[0].metrics[0]
    assert (result.verdict, primary.candidate, primary.base, primary.delta, primary.figures) == ("pass", 0.75, None, None, None)


@pytest.mark.parametrize(
    ("floors", "verdict"), [({"ocr": 0.75}, "pass"), ({"ocr": 0.76}, "fail"), ({"ocr.anls": 0.99}, "fail"), ({"ocr.anls": 0.1}, "pass")]
)
def test_a_floor_is_a_plain_threshold(folder: Path, floors: dict[str, float], verdict: str) -> None:
    assert compared(None, wrong_for("000"), [make_set(folder, ["small.png"] * 4)], floors=floors).verdict == verdict


def test_no_answered_item_at_all_is_not_comparable(folder: Path) -> None:
    result = compared(FakeEngine(), FakeEngine(), [make_set(folder, ["cut.png", "gone.png"])], max_failed=5)
    assert result.verdict == "not_comparable"
    assert result.sets[0].metrics[0].n == 0


def test_scores_by_picture_size_add_up(folder: Path) -> None:
    each = make_set(folder, ["small.png", "wide.png", "tall.png"] * 4)
    result = compared(FakeEngine(), wrong_for("001", "004"), [each]).sets[0]
    assert [(size.size, size.n, size.base, size.candidate) for size in result.sizes] == [
        ("32x32", 4, 1.0, 1.0),
        ("32x96", 4, 1.0, 1.0),
        ("96x32", 4, 1.0, 0.5),
    ]
    assert sum(size.n * size.candidate for size in result.sizes) / 12 == result.metrics[0].candidate
