"""Which stage is blamed for what two engines showed, from preprocessing to the last layer, for checkpoints and for graphs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from qvlopt.artifact.manifest import Manifest, SourceRecord, write_manifest
from qvlopt.commands.evaluate_damage import compare_graphs, measure_damage, measure_steps, name_stages
from qvlopt.commands.evaluate_inputs import find_exports
from qvlopt.recipe.load import LoadedRecipe, load_recipe
from qvlopt.report.progress import SilentProgress
from qvlopt.scoring.damage import Damage, Key, Look, look
from qvlopt.scoring.evaluate import EngineRun, Target
from tests.damage.forced import build, configured, engine_of, faulty, noisy, samples, source_of

CPU = torch.device("cpu")
NO_RUNS = (EngineRun({}, {}), EngineRun({}, {}))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("blame")
    build(place / "base")
    (place / "pictures").mkdir()
    return place


def looked(folder: Path, place: Path) -> Look:
    chosen = {Key("ocr", sample.id): (sample, (5, 9, 3)) for sample in samples(place / "pictures")}
    return look(engine_of(folder), chosen, SilentProgress())


def recipe(place: Path, **evaluate: object) -> LoadedRecipe:
    return load_recipe({"model": {"path": str(place / "base")}, "output": str(place / "out"), "evaluate": evaluate})


def named(place: Path, candidate: Path, **evaluate: object) -> Damage:
    looks = (looked(place / "base", place), looked(candidate, place))
    return name_stages(measure_damage(looks, NO_RUNS), looks, (str(place / "base"), str(candidate)), recipe(place, **evaluate))


def test_the_faulty_stage_of_a_checkpoint_is_named(place: Path, tmp_path: Path) -> None:
    found = named(place, faulty(place / "base", tmp_path / "bad", "visual.blocks.1.", noisy))
    assert found.blame is not None
    assert (found.blame.stage, found.blame.cause) == ("tower block 1", None)
    assert [stage.stage for stage in found.stages] == ["tower block 1"]
    assert found.notes == ()


def test_at_most_ten_stages_are_listed(place: Path, tmp_path: Path) -> None:
    found = named(place, faulty(place / "base", tmp_path / "bad", ".", noisy))
    assert len(found.stages) == 10


def test_equal_checkpoints_that_answer_otherwise_are_the_runtimes_doing(place: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(place / "base", tmp_path / "copy"))
    looks = (looked(place / "base", place), looked(faulty(place / "base", tmp_path / "bad", "visual.merger.", noisy), place))
    found = name_stages(measure_damage(looks, NO_RUNS), looks, (str(place / "base"), str(copy)), recipe(place))
    assert found.blame is not None
    assert found.blame.stage == "runtime"


def test_what_cannot_be_compared_is_noted(place: Path) -> None:
    looks = (looked(place / "base", place), looked(place / "base", place))
    damage = measure_damage(looks, NO_RUNS)
    served = name_stages(damage, looks, ("http://host/v1#m", str(place / "base")), recipe(place))
    gone = name_stages(damage, looks, (str(place / "base"), str(place / "gone")), recipe(place))
    assert served.notes == ("stages are compared only where the base is a checkpoint folder",)
    assert "no checkpoint at" in gone.notes[0]


@pytest.mark.parametrize(
    ("part", "stage"), [("visual.blocks.0.", "vision graph"), ("deepstack_merger_list.1.", "deepstack tap 1"), ("layers.2.", "decoder graph")]
)
def test_of_graphs_the_one_that_is_off_is_named(place: Path, tmp_path: Path, part: str, stage: str) -> None:
    looks = (looked(place / "base", place), looked(faulty(place / "base", tmp_path / "bad", part, noisy), place))
    found = compare_graphs(source_of(place / "base"), looks, measure_damage(looks, NO_RUNS), 3, CPU)
    assert found[0].stage == stage
    assert found[0].share > 0.95


def test_other_pixels_are_not_blamed_on_the_graphs(place: Path, tmp_path: Path) -> None:
    other = configured(place / "base", tmp_path / "bad", "preprocessor_config.json", image_mean=[0.1, 0.2, 0.3])
    looks = (looked(place / "base", place), looked(other, place))
    found = compare_graphs(source_of(place / "base"), looks, measure_damage(looks, NO_RUNS), 3, CPU)
    assert [stage.stage for stage in found] == ["preprocessing"]


def test_the_steps_say_where_the_distance_arose(place: Path, tmp_path: Path) -> None:
    base = looked(place / "base", place)
    bad = looked(faulty(place / "base", tmp_path / "bad", "visual.merger.", noisy), place)
    clean_export = measure_steps((base, base, bad), ("source", "export", "candidate"))
    assert [step.name for step in clean_export] == ["source -> export", "export -> candidate"]
    assert (clean_export[0].kl_mean, clean_export[0].vision_cosine_min) == (0.0, 1.0)
    assert clean_export[1].kl_mean is not None
    assert clean_export[1].kl_mean > 0
    bad_export = measure_steps((base, bad, bad), ("source", "export", "candidate"))
    assert [step.kl_mean for step in bad_export] == [clean_export[1].kl_mean, 0.0]


def artifact(folder: Path, kind: str, digest: str) -> str:
    folder.mkdir(parents=True)
    write_manifest(folder, Manifest(kind=kind, digest=json.dumps(kind), recipe={}, source=SourceRecord(path="x", digest=digest)))
    return str(folder)


def test_the_export_of_the_same_source_is_found(tmp_path: Path) -> None:
    loaded = load_recipe({"model": {"path": "x"}, "output": str(tmp_path / "out")})
    exported = artifact(tmp_path / "out" / "export", "export", "d" * 64)
    paths = [artifact(tmp_path / name, kind, digest * 64) for name, kind, digest in (("a", "int8", "d"), ("b", "int8", "e"), ("c", "awq", "d"))]
    targets = [Target(path, path, "x") for path in [*paths, "http://host/v1#m"]]
    assert find_exports(loaded, targets) == {paths[0]: exported}
