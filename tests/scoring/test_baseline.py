"""A baseline that was written is the run that it was made of, and nothing else passes for one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image

from qvlopt.data.preflight import check_pictures
from qvlopt.data.samples import ImageRef, Sample
from qvlopt.errors import NotComparableError
from qvlopt.report.progress import SilentProgress
from qvlopt.scoring.baseline import baseline_text, changes, read_baseline
from qvlopt.scoring.conditions import conditions_of
from qvlopt.scoring.evaluate import EngineRun, EvalSet, ask_engine
from qvlopt.scoring.tasks import TASKS
from tests.fakes import FakeEngine, right


@pytest.fixture
def each(tmp_path: Path) -> EvalSet:
    for number in range(3):
        Image.new("RGB", (32, 32)).save(tmp_path / f"{number}.png")
    (tmp_path / "2.png").write_bytes((tmp_path / "2.png").read_bytes()[:60])
    samples = tuple(Sample(f"i{n}", (ImageRef(f"{n % 3}.png", tmp_path),), "q", (f"A{n}",), "ocr", f"c{n}", f"x:{n}") for n in range(6))
    checked = check_pictures(samples)
    return EvalSet("ocr", "ocr", samples, checked.skipped, checked.sizes, TASKS["ocr"], 32, "digest")


def answered(each: EvalSet, engine: FakeEngine | None = None) -> EngineRun:
    said = {"i1": "::error::\u202e\x1b[31m", "i3": None}
    engine = engine or FakeEngine(lambda sample: said.get(sample.id, right(sample)))
    return ask_engine(engine, [each], batch=2, progress=SilentProgress(), label="x")


def test_it_is_read_as_it_was_written(tmp_path: Path, each: EvalSet) -> None:
    run = answered(each)
    path = tmp_path / "base.json"
    path.write_text(baseline_text("model", run, [each]), encoding="utf-8")
    found, noise = read_baseline(path)
    assert noise is None
    assert found.answered["ocr"].answers == run.answered["ocr"].answers
    assert found.answered["ocr"].unreadable == run.answered["ocr"].unreadable
    assert sorted(found.answered["ocr"].unreadable) == ["i2", "i5"]
    assert found.fingerprint == run.fingerprint
    assert found.saved == conditions_of(run, [each])


def test_one_line_an_item_and_the_same_bytes_every_time(each: EvalSet) -> None:
    text = baseline_text("model", answered(each), [each])
    assert text == baseline_text("model", answered(each), [each])
    lines = [line for line in text.splitlines() if line.startswith('{"set"')]
    assert [json.loads(line.rstrip(","))["id"] for line in lines] == [sample.id for sample in each.chosen]
    document = json.loads(text)
    assert document["items"][0] == {"set": "ocr", "id": "i0", "score": 1.0, "text": "A0", "stop": "eos", "prompt_tokens": 3, "token_ids": [0, 1]}
    assert document["scores"]["ocr"]["exact_match"] == 0.5
    assert not {"\x1b", "\u202e"} & set(text)


def test_an_item_that_somebody_edited_is_found(tmp_path: Path, each: EvalSet) -> None:
    path = tmp_path / "base.json"
    path.write_text(baseline_text("model", answered(each), [each]).replace('"A0"', '"A9"'), encoding="utf-8")
    with pytest.raises(NotComparableError, match=r"not those that were written"):
        read_baseline(path)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"kind": "baseline"}', '{"kind": "baseline", "schema_version": 99}', "\xff"])
def test_another_file_is_no_baseline(tmp_path: Path, content: str) -> None:
    path = tmp_path / "base.json"
    path.write_bytes(content.encode("latin-1"))
    with pytest.raises(NotComparableError, match="no baseline that this version reads"):
        read_baseline(path)


def test_changes_are_counted(each: EvalSet) -> None:
    old, new = answered(each), answered(each, FakeEngine(lambda sample: "other" if sample.id == "i0" else right(sample)))
    assert changes(old, old) == "0 of 4 answers change, 0 are new, 0 gone"
    assert changes(old, new) == "3 of 4 answers change, 0 are new, 0 gone"
