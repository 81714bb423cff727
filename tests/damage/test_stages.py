"""A fault in one place is found there and nowhere else, and its effect is the one that the engine sees."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from qvlopt.damage.logits import kl_divergence
from qvlopt.damage.stages import compare_stages, same_inputs
from qvlopt.damage.tally import StageDamage, shares
from tests.damage.forced import build, configured, engine_of, faulty, forced, noisy, samples, source_of

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("stages")
    build(place / "base")
    (place / "pictures").mkdir()
    return place


def compared(place: Path, candidate: Path) -> list[StageDamage]:
    engines = [engine_of(folder) for folder in (place / "base", candidate)]
    items = [(forced(engines[0], sample), forced(engines[1], sample)) for sample in samples(place / "pictures")]
    vocabulary = engines[0].prompter.vocabulary_size
    return compare_stages(source_of(place / "base"), source_of(candidate), items, dtype=torch.float32, device=CPU, vocabulary=vocabulary)


def effect(place: Path, candidate: Path, *, pictures: bool) -> float:
    """The mean KL divergence of both engines over the items that the fault can reach."""
    base, other = (engine_of(folder) for folder in (place / "base", candidate))
    shown = [sample for sample in samples(place / "pictures") if sample.images or not pictures]
    logits = [[engine.score(engine.prepare(sample), (5, 9, 3)).logits for sample in shown] for engine in (base, other)]
    return sum(float(kl_divergence(x, y).mean()) for x, y in zip(*logits, strict=True)) / len(shown)


PARTS = [
    ("visual.patch_embed.", "tower embedding"),
    ("visual.blocks.0.", "tower block 0"),
    ("visual.blocks.2.", "tower block 2"),
    ("visual.merger.", "merger"),
    ("deepstack_merger_list.0.", "deepstack tap 0"),
    ("deepstack_merger_list.1.", "deepstack tap 1"),
    ("language_model.layers.0.", "language layer 0"),
    ("language_model.layers.2.", "language layer 2"),
    ("language_model.norm.", "language head"),
]


@pytest.mark.parametrize(("part", "stage"), PARTS)
def test_one_faulty_stage_is_the_only_one_that_differs(place: Path, tmp_path: Path, part: str, stage: str) -> None:
    candidate = faulty(place / "base", tmp_path / "bad", part, noisy)
    (found,) = compared(place, candidate)
    assert found.stage == stage
    assert found.relative_error > 0.01
    assert found.cosine < 1
    assert found.kl == pytest.approx(effect(place, candidate, pictures=not part.startswith("language")), rel=1e-3)
    assert found.kl > 0


def test_an_equal_checkpoint_has_no_stage_that_differs(place: Path) -> None:
    assert compared(place, place / "base") == []


def test_the_larger_of_two_faults_comes_first(place: Path, tmp_path: Path) -> None:
    candidate = faulty(place / "base", tmp_path / "bad", "visual.blocks.1.mlp.linear_fc1.weight", lambda weight: weight * 1.001)
    faulty(candidate, tmp_path / "worse", "language_model.layers.1.", noisy)
    assert [found.stage for found in compared(place, tmp_path / "worse")] == ["language layer 1", "tower block 1"]


def test_a_tap_that_gives_zeros_is_named(place: Path, tmp_path: Path) -> None:
    candidate = faulty(place / "base", tmp_path / "bad", "deepstack_merger_list.1.linear_fc2", torch.zeros_like)
    (found,) = compared(place, candidate)
    assert (found.stage, found.relative_error, found.cosine, found.is_dead) == ("deepstack tap 1", 1.0, 0.0, True)


def test_a_dead_stage_comes_before_one_that_does_more(place: Path, tmp_path: Path) -> None:
    candidate = faulty(place / "base", tmp_path / "bad", "deepstack_merger_list.1.linear_fc2", torch.zeros_like)
    faulty(candidate, tmp_path / "worse", "language_model.layers.1.", noisy)
    assert [found.stage for found in compared(place, tmp_path / "worse")] == ["deepstack tap 1", "language layer 1"]


def test_other_pixels_are_the_preprocessing_and_no_stage_of_the_model(place: Path, tmp_path: Path) -> None:
    candidate = configured(place / "base", tmp_path / "bad", "preprocessor_config.json", image_mean=[0.1, 0.2, 0.3])
    (found,) = compared(place, candidate)
    assert found.stage == "preprocessing"
    assert found.kl == pytest.approx(effect(place, candidate, pictures=True), rel=1e-3)
    engines = [engine_of(folder) for folder in (place / "base", candidate)]
    alike = [same_inputs(*(forced(engine, sample) for engine in engines)) for sample in samples(place / "pictures")]
    assert alike == [False, False, True]


def test_pictures_of_another_size_are_the_preprocessing(place: Path, tmp_path: Path) -> None:
    size = {"shortest_edge": 1024, "longest_edge": 2048}
    candidate = configured(place / "base", tmp_path / "bad", "preprocessor_config.json", size=size)
    assert [found.stage for found in compared(place, candidate)] == ["preprocessing"]


def test_checkpoints_of_other_shapes_have_not_the_same_stages(place: Path, tmp_path: Path) -> None:
    from tests.tiny import build_tiny

    other = build_tiny(tmp_path / "other", dtype="float32")
    with pytest.raises(ValueError, match=r"not the same stages: .*tower blocks 3 and"):
        compare_stages(source_of(place / "base"), source_of(other), [], dtype=torch.float32, device=CPU)


def test_every_item_has_one_vote_whatever_its_distance() -> None:
    effects = {"a": {0: 100.0, 1: 0.1, 2: 0.1}, "b": {0: 0.0, 1: 0.3, 2: 0.3}}
    assert shares(effects) == pytest.approx({"a": (1 + 0.25 + 0.25) / 3, "b": (0 + 0.75 + 0.75) / 3})


def test_items_without_an_effect_do_not_vote_and_impossible_answers_take_all() -> None:
    assert shares({"a": {0: 0.0, 1: 1.0}, "b": {0: 0.0, 1: 3.0}}) == {"a": 0.25, "b": 0.75}
    assert shares({"a": {0: float("inf")}, "b": {0: 5.0}}) == {"a": 1.0, "b": 0.0}
    assert shares({"a": {0: 0.0}, "b": {}}) == {"a": 0.0, "b": 0.0}
    assert shares({}) == {}
