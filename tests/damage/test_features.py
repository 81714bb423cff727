"""What features do to the answers, read by the base's own language model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from qvlopt.damage.features import VISION_GRAPH, Featured, swap_features
from qvlopt.damage.logits import kl_divergence
from qvlopt.damage.tally import StageDamage
from tests.damage.forced import build, engine_of, faulty, forced, noisy, samples, source_of


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("features")
    build(place / "base")
    (place / "pictures").mkdir()
    return place


def swapped(place: Path, candidate: Path) -> tuple[StageDamage | None, float]:
    """The damage of the candidate's features, and what the two engines' logits show for a fault in the tower alone."""
    base, other = engine_of(place / "base"), engine_of(candidate)
    items, distances = [], []
    for sample in samples(place / "pictures")[:2]:
        item = forced(base, sample)
        sides = []
        for engine in (base, other):
            encoded = [engine.encode(picture) for picture in item.pictures]
            sides.append((torch.cat([each.image_embeds for each in encoded]), torch.cat([each.deepstack for each in encoded], dim=1)))
        items.append(Featured(item, sides[0], sides[1]))
        logits = [engine.score(engine.prepare(sample), item.answer_ids).logits for engine in (base, other)]
        distances.append(float(kl_divergence(*logits).mean()))
    vocabulary = base.prompter.vocabulary_size
    found = swap_features(source_of(place / "base"), items, dtype=torch.float32, device=torch.device("cpu"), vocabulary=vocabulary)
    return found, sum(distances) / len(distances)


@pytest.mark.parametrize(
    ("part", "stage"), [("visual.blocks.0.", VISION_GRAPH), ("visual.merger.", "merger"), ("deepstack_merger_list.1.", "deepstack tap 1")]
)
def test_other_features_are_named_and_weighed(place: Path, tmp_path: Path, part: str, stage: str) -> None:
    found, distance = swapped(place, faulty(place / "base", tmp_path / "bad", part, noisy))
    assert found is not None
    assert found.stage == stage
    assert found.kl == pytest.approx(distance, rel=1e-3)


def test_equal_features_are_no_damage_whatever_the_language_model_does(place: Path, tmp_path: Path) -> None:
    found, distance = swapped(place, faulty(place / "base", tmp_path / "bad", "language_model.layers.1.", noisy))
    assert found is None
    assert distance > 0
