"""What quantize-int8 knows of the calibration set: the same to the bit, whether `calibrate` ran before, later, or never."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from qvlopt.artifact.manifest import FileRecord, Manifest, read_manifest, write_manifest
from qvlopt.commands.calibrate import CalibrateResult, calibrate
from qvlopt.commands.graphs_result import GraphsResult
from qvlopt.commands.plan import Plan
from qvlopt.commands.quantize_int8 import quantize_int8
from qvlopt.commands.run import RunResult, run
from qvlopt.recipe.load import LoadedRecipe
from tests.tiny_run import SIZES, build_set, row, tiny_recipe

SECTION = {"max_layer_error": 0.3}
BOTH = {"scope": "vision+language"}


def recipe(model: Path, data: Path, output: Path, **more: Any) -> LoadedRecipe:
    section = SECTION | more.pop("quantize_int8", {})
    return tiny_recipe(model, data, output, quantize_int8=section, calibrate={"samples": 4} | more.pop("calibrate", {}), **more)


def quantised(loaded: LoadedRecipe) -> GraphsResult:
    result = quantize_int8(loaded)
    assert isinstance(result, GraphsResult)
    return result


def calibrated(loaded: LoadedRecipe) -> Path:
    result = calibrate(loaded)
    assert isinstance(result, CalibrateResult)
    return result.output


def said(folder: Path) -> Manifest:
    """The manifest without what it took and where it was."""
    return read_manifest(folder).model_copy(update={"seconds": 0.0, "peak_rss_bytes": 0, "recipe": {}})


def weights(folder: Path) -> dict[str, FileRecord]:
    return {name: record for name, record in read_manifest(folder).files.items() if name != "README.md"}


@pytest.mark.parametrize("more", [{}, {"calibrate": BOTH}, {"quantize_awq": {"search": {"compensate": True}}}], ids=["vision", "both", "held out"])
def test_a_calibrate_output_changes_nothing_but_the_time(model: Path, data: Path, tmp_path: Path, more: dict[str, Any]) -> None:
    alone = quantised(recipe(model, data, tmp_path / "alone", **more)).output
    before = calibrated(recipe(model, data, tmp_path / "after", **more))
    after = quantised(recipe(model, data, tmp_path / "after", **more)).output
    assert weights(after) == weights(alone)
    mine, theirs = said(after), said(alone)
    assert (mine.digest, mine.layers, mine.coverage, mine.parents) == (theirs.digest, theirs.layers, theirs.coverage, theirs.parents)
    assert [parent.digest for parent in mine.parents] == [read_manifest(before).digest]
    named = recipe(model, data, tmp_path / "named", **more | {"quantize_int8": {"statistics": str(before)}})
    assert read_manifest(quantised(named).output).digest == mine.digest


def test_what_was_quantised_before_a_run_calibrates_is_still_the_same(model: Path, data: Path, tmp_path: Path) -> None:
    loaded = recipe(model, data, tmp_path / "out")
    quantised(loaded)
    result = run(loaded)
    assert isinstance(result, RunResult)
    assert [(step.command, step.status) for step in result.steps if step.command != "quantize_awq"] == [
        ("calibrate", "done"),
        ("quantize_int8", "existed"),
    ]


def test_statistics_of_the_language_model_decide_its_smoothing(model: Path, data: Path, tmp_path: Path) -> None:
    """One channel that was far larger elsewhere in the calibration set than in the measured prompts."""
    loaded = recipe(model, data, tmp_path / "out", calibrate=BOTH)
    folder, first = calibrated(loaded), quantised(loaded)
    layer = "model.language_model.layers.0.mlp.down_proj"
    (shard,) = [path for path in folder.glob("*.safetensors") if f"{layer}.abs_max" in load_file(path)]
    tensors = load_file(shard)
    tensors[f"{layer}.abs_max"][3] *= 50
    save_file(tensors, shard, metadata={"format": "pt"})
    write_manifest(folder, read_manifest(folder).model_copy(update={"digest": "another"}))
    second = quantised(recipe(model, data, tmp_path / "other", calibrate=BOTH, quantize_int8={"statistics": str(folder)}))
    changed = {name for name, record in weights(second.output).items() if record != weights(first.output)[name]}
    assert "decoder.onnx.data" in changed
    assert "vision.onnx.data" not in changed
    losses = [{entry.name: entry.loss for entry in result.layers} for result in (first, second)]
    assert {name for name in losses[0] if losses[0][name] != losses[1][name]} == {layer}


def test_without_smoothing_nothing_is_calibrated(model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> None:
        raise AssertionError

    monkeypatch.setattr("qvlopt.commands.quantize_int8.magnitudes", never)
    result = quantised(recipe(model, data, tmp_path / "out", quantize_int8={"smooth": False}))
    assert read_manifest(result.output).parents == ()


def test_the_order_of_the_samples_changes_nothing(model: Path, tmp_path: Path) -> None:
    sets = [build_set(tmp_path / f"set{step}", rows=[row(index) for index in range(len(SIZES))][::step]) for step in (1, -1)]
    one, other = (quantised(recipe(model, data, tmp_path / str(number))).output for number, data in enumerate(sets))
    assert weights(one) == weights(other)
    assert read_manifest(one).digest == read_manifest(other).digest


def test_the_plan_says_where_the_statistics_come_from(model: Path, data: Path, tmp_path: Path) -> None:
    loaded = recipe(model, data, tmp_path / "out")
    for expected in ("4 samples, found now", f"the calibrate output {tmp_path / 'out' / 'calibrate'}"):
        plan = quantize_int8(loaded, dry_run=True)
        assert isinstance(plan, Plan)
        assert expected in dict(plan.rows)["measures"]
        calibrate(loaded)


def test_hidden_states_on_the_way_are_gone_in_the_end(model: Path, data: Path, tmp_path: Path) -> None:
    output = quantised(recipe(model, data, tmp_path / "out")).output
    assert all(path.is_file() for path in output.iterdir())
