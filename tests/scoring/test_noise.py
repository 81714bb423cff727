"""The base against itself."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from qvlopt.data.preflight import check_pictures
from qvlopt.data.samples import ImageRef, Sample
from qvlopt.report.progress import SilentProgress
from qvlopt.scoring.evaluate import EngineRun, EvalSet, ask_engine
from qvlopt.scoring.noise import Noise, measure_noise
from qvlopt.scoring.tasks import TASKS
from tests.fakes import FakeEngine, right


@pytest.fixture
def each(tmp_path: Path) -> EvalSet:
    Image.new("RGB", (32, 32)).save(tmp_path / "p.png")
    samples = tuple(Sample(f"{n:03}", (ImageRef("p.png", tmp_path),), "q", (f"A{n}",), "ocr", f"{n}", f"x:{n}") for n in range(200))
    checked = check_pictures(samples)
    return EvalSet("ocr", "ocr", samples, checked.skipped, checked.sizes, TASKS["ocr"], 32, "digest")


def noise(each: EvalSet, flipped: int, *, margin: float = 0.02) -> Noise:
    def run(engine: FakeEngine, batch: int) -> EngineRun:
        return ask_engine(engine, [each], batch=batch, progress=SilentProgress(), label="x")

    other = FakeEngine(lambda sample: "WRONG" if int(sample.id) < flipped else right(sample))
    return measure_noise((run(FakeEngine(), 8), run(other, 1)), [each], margin=margin, alpha=0.05)


def test_a_base_that_repeats_itself_passes(each: EvalSet) -> None:
    assert noise(each, 0) == Noise((8, 1), 200, 0, 0, "pass")
    assert noise(each, 0, margin=0.001).verdict == "pass"


def test_flips_are_counted_and_judged_by_the_gates_own_rule(each: EvalSet) -> None:
    few, many = noise(each, 4), noise(each, 40)
    assert (few.flips, few.texts, few.verdict) == (4, 4, "inconclusive")
    assert (many.flips, many.verdict) == (40, "fail")
    assert "batches of 8 and 1 is fail: 40 of 200 items flip" in many.reason
