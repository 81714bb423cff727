"""A closer look at few items: which ones, what is joined, and what is said of it."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from qvlopt.damage.tally import StageDamage
from qvlopt.data.samples import Sample
from qvlopt.report.progress import SilentProgress
from qvlopt.runtime.engine import Answer
from qvlopt.scoring import damage as module
from qvlopt.scoring.damage import Key, Look, blame_stages, choose_items, look, measure
from qvlopt.scoring.evaluate import Answered, EngineRun, EvalSet
from qvlopt.scoring.tasks import TASKS
from tests.damage.forced import build, configured, engine_of, faulty, noisy, samples

ANSWER = (5, 9, 3)


def a_set(*clusters: str) -> EvalSet:
    rows = tuple(Sample(f"i{n}", (), "q", ("x",), "ocr", cluster, f"x:{n}") for n, cluster in enumerate(clusters))
    return EvalSet("ocr", "ocr", rows, (), {sample.id: () for sample in rows}, TASKS["ocr"], 8, "d")


def run(each: EvalSet, *, failed: str = "", tokens: tuple[int, ...] = ANSWER) -> EngineRun:
    answers = {sample.id: Answer(sample.id, tokens, "t", "eos", 3) for sample in each.samples}
    if failed:
        answers[failed] = Answer(failed, (), "", "error", 3, "broken")
    return EngineRun({each.name: Answered(answers, {}, {})}, {})


def test_no_two_items_about_one_picture_and_none_without_an_answer() -> None:
    each = a_set("a", "a", "b", "b", "c", "d")
    chosen = choose_items([each], run(each, failed="i5"), 10, seed=0)
    assert sorted(sample.cluster for sample, _ in chosen.values()) == ["a", "b", "c"]
    assert {answer for _, answer in chosen.values()} == {ANSWER}


def test_the_same_items_in_every_run_and_others_for_another_seed() -> None:
    each = a_set(*(f"c{n}" for n in range(40)))
    first, again, other = (list(choose_items([each], run(each), 5, seed=seed)) for seed in (0, 0, 1))
    assert first == again
    assert len(first) == 5
    assert set(first) != set(other)


def test_the_sets_take_turns() -> None:
    sets = [a_set("a", "b", "c"), replace(a_set("d"), name="vqa")]
    base = EngineRun({**run(sets[0]).answered, "vqa": run(sets[1]).answered["vqa"]}, {})
    assert [key.set for key in choose_items(sets, base, 5, seed=0)] == ["ocr", "vqa", "ocr", "ocr"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("damage")
    build(place / "base")
    (place / "pictures").mkdir()
    return place


def looked(folder: Path, place: Path) -> Look:
    chosen = {Key("ocr", sample.id): (sample, ANSWER) for sample in samples(place / "pictures")}
    return look(engine_of(folder), chosen, SilentProgress())


NO_RUNS = (EngineRun({}, {}), EngineRun({}, {}))


def test_a_checkpoint_has_no_damage_against_itself(place: Path) -> None:
    found = measure(looked(place / "base", place), looked(place / "base", place), NO_RUNS)
    assert (found.items, found.tokens, found.kl_mean, found.kl_max, found.top1_agreement) == (3, 9, 0.0, 0.0, 1.0)
    assert found.vision_cosine_min == 1.0
    assert [output.output for output in found.outputs] == ["image_embeds", "deepstack.0", "deepstack.1"]
    assert {output.sqnr_db for output in found.outputs} == {math.inf}
    assert found.is_none


def test_a_faulty_tap_shows_in_that_output_alone(place: Path, tmp_path: Path) -> None:
    bad = faulty(place / "base", tmp_path / "bad", "deepstack_merger_list.0.", noisy)
    found = measure(looked(place / "base", place), looked(bad, place), NO_RUNS)
    assert [output.relative_error > 0 for output in found.outputs] == [False, True, False]
    assert found.vision_cosine_min is not None
    assert found.vision_cosine_min < 1
    assert found.kl_mean is not None
    assert 0 < found.kl_mean < (found.kl_max or 0)
    assert not found.is_none
    assert not found.is_rounding


def test_other_pixels_are_told_apart_from_a_damaged_tower(place: Path, tmp_path: Path) -> None:
    other = configured(place / "base", tmp_path / "other", "preprocessor_config.json", image_std=[0.3, 0.3, 0.3])
    found = measure(looked(place / "base", place), looked(other, place), NO_RUNS)
    assert found.inputs_changed == 2  # the third item has no picture
    assert found.outputs == ()
    assert not found.is_none


def test_items_beyond_the_memory_are_left_out(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_BYTES", 1)
    assert list(looked(place / "base", place).items) == [Key("ocr", "i0")]


def test_a_larger_vocabulary_is_noted_and_not_compared(place: Path) -> None:
    base = looked(place / "base", place)
    wider = replace(base, logits={key: torch.cat((logits, logits[:, :1]), dim=1) for key, logits in base.logits.items()})
    found = measure(base, wider, NO_RUNS)
    assert (found.kl_mean, found.top1_agreement) == (None, None)
    assert len(found.notes) == 1
    assert "other sizes" in found.notes[0]


def test_where_answers_part() -> None:
    each = a_set("a", "b", "c", "d")
    runs = run(each), run(each)
    answers = dict(runs[1].answered["ocr"].answers)
    answers["i0"] = replace(answers["i0"], token_ids=(5, 8, 3), text="u")
    answers["i1"] = replace(answers["i1"], token_ids=(4, 9, 3), text="v")
    other = EngineRun({"ocr": Answered(answers, {}, {})}, {})
    found = measure(Look({}, {}, {}), Look({}, {}, {}), (runs[0], other))
    assert (found.answers_equal, found.first_divergence) == (0.5, 0.5)


def stage(name: str, kl: float, share: float) -> StageDamage:
    return StageDamage(name, 0.1, 0.9, 20.0, kl, share)


def test_the_blame_and_its_share() -> None:
    assert blame_stages([]) is None
    alone = blame_stages([stage("merger", 0.2, 1.0)])
    assert alone is not None
    assert (alone.stage, alone.share) == ("merger", 1.0)
    assert "no other stage differs" in alone.detail
    several = blame_stages([stage("merger", 0.3, 0.75), stage("tower block 0", 0.1, 0.25)])
    assert several is not None
    assert (several.stage, several.share) == ("merger", 0.75)
    assert "75% of what the 2 stages that differ do" in several.detail
