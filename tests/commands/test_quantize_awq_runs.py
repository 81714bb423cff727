"""quantize-awq against what exists already, what it must refuse, and what breaks off: complete or absent, never half."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from qvlopt.artifact.manifest import read_manifest, verify_files
from qvlopt.commands import awq_stages as stages
from qvlopt.commands import quantize_awq as module
from qvlopt.commands.calibrate import calibrate
from qvlopt.commands.plan import Plan
from qvlopt.commands.quantize_awq import QuantizeResult, quantize_awq
from qvlopt.errors import QvloptError, RunError, UsageError
from tests.documents import check_document, document_of
from tests.tiny import build_tiny
from tests.tiny_run import PLAIN, SMALL, listing, tiny_recipe, with_first_value


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory: pytest.TempPathFactory, model: Path, data: Path) -> dict[str, QuantizeResult]:
    """The same recipe in all formats, by plain rounding."""
    root = tmp_path_factory.mktemp("artifacts")
    return {form: quantised(model, data, root / form, format=form, search=PLAIN) for form in ("awq", "compressed-tensors", "bf16")}


def quantised(model: Path, data: Path, output: Path, **section: Any) -> QuantizeResult:
    result = quantize_awq(tiny_recipe(model, data, output, quantize_awq=section))
    assert isinstance(result, QuantizeResult)
    return result


def test_the_same_artifact_is_not_made_twice(model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = quantised(model, data, tmp_path, search=PLAIN)
    before = listing(tmp_path)
    for forbidden in ("write_folder", "unfinished", "quantise_stages"):
        monkeypatch.setattr(module, forbidden, None)
    second = quantised(model, data, tmp_path, search=PLAIN)
    assert (first.existed, second.existed, second.exit_code) == (False, True, 0)
    assert second.to_json() == first.to_json()
    assert listing(tmp_path) == before


@pytest.mark.parametrize("change", [{"bits": 8}, {"search": {**PLAIN, "bias": True}}, {"keep": ["merger.*"]}], ids=str)
def test_another_artifact_in_place_is_kept_unless_overwritten(model: Path, data: Path, tmp_path: Path, change: dict[str, Any]) -> None:
    section = {"format": "compressed-tensors", "search": PLAIN}
    first = quantised(model, data, tmp_path, **section)
    before, digest = listing(tmp_path), read_manifest(first.output).digest
    with pytest.raises(UsageError, match=r"--overwrite.*--resume") as refused:
        quantised(model, data, tmp_path, **section | change)
    assert refused.value.exit_code == 2
    assert listing(tmp_path) == before
    replaced = quantize_awq(tiny_recipe(model, data, tmp_path, quantize_awq=section | change), overwrite=True)
    assert isinstance(replaced, QuantizeResult)
    assert read_manifest(replaced.output).digest != digest
    assert verify_files(replaced.output) == []
    assert replaced.output == first.output
    assert os.listdir(tmp_path) == ["awq"]


def test_statistics_of_other_samples_beside_it_are_neither_used_nor_touched(model: Path, data: Path, tmp_path: Path) -> None:
    calibrate(tiny_recipe(model, data, tmp_path))
    before = listing(tmp_path / "calibrate")
    result = quantize_awq(tiny_recipe(model, data, tmp_path, calibrate={"samples": 2}, quantize_awq={"search": PLAIN}))
    assert isinstance(result, QuantizeResult)
    manifest = read_manifest(result.output)
    assert manifest.coverage is not None
    assert manifest.coverage["samples"] == 2
    assert listing(tmp_path / "calibrate") == before


def test_overwriting_removes_nothing_of_the_users(model: Path, data: Path, tmp_path: Path) -> None:
    result = quantised(model, data, tmp_path, search=PLAIN)
    (result.output / "notes.txt").write_text("mine")
    before = listing(result.output)
    with pytest.raises(UsageError, match=r"notes\.txt"):
        quantize_awq(tiny_recipe(model, data, tmp_path, quantize_awq={"format": "bf16", "search": PLAIN}), overwrite=True)
    assert listing(result.output) == before


def test_an_output_that_is_taken_is_refused_before_any_work(model: Path, data: Path, tmp_path: Path) -> None:
    (tmp_path / "awq").mkdir()
    (tmp_path / "awq" / "mine").touch()
    with pytest.raises(UsageError, match="awq is taken"):
        quantised(model, data, tmp_path, search=PLAIN)
    assert os.listdir(tmp_path) == ["awq"]


def test_a_place_that_cannot_be_written_is_refused_before_any_work(model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(stages, "captured", None)
    recipe = tiny_recipe(model, data, tmp_path, quantize_awq={"search": PLAIN}, flags={"output": str(tmp_path / "file" / "awq")})
    with pytest.raises(RunError, match="Not a directory"):
        quantize_awq(recipe)


def test_a_file_of_the_source_that_leads_outside_is_refused_before_any_work(data: Path, tmp_path: Path) -> None:
    source = build_tiny(tmp_path / "source", **SMALL)
    (tmp_path / "outside.txt").touch()
    (source / "notes.txt").symlink_to(tmp_path / "outside.txt")
    with pytest.raises(RunError, match=r"notes\.txt is a link to"):
        quantised(source, data, tmp_path / "out", search=PLAIN)
    assert not (tmp_path / "out").exists()


def test_overwriting_leaves_alone_what_is_done(model: Path, data: Path, tmp_path: Path) -> None:
    quantised(model, data, tmp_path, search=PLAIN)
    before = listing(tmp_path)
    result = quantize_awq(tiny_recipe(model, data, tmp_path, quantize_awq={"search": PLAIN}), overwrite=True)
    assert isinstance(result, QuantizeResult)
    assert result.existed
    assert listing(tmp_path) == before


def test_finished_statistics_are_used_again(model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calibrate(tiny_recipe(model, data, tmp_path))
    monkeypatch.setattr(stages, "captured", None)
    assert quantised(model, data, tmp_path, search=PLAIN).output.is_dir()


def test_named_statistics_are_used_and_are_part_of_what_the_artifact_is(model: Path, data: Path, tmp_path: Path) -> None:
    calibrate(tiny_recipe(model, data, tmp_path / "two", calibrate={"samples": 2}))
    named = str(tmp_path / "two" / "calibrate")
    result = quantised(model, data, tmp_path / "out", statistics=named)
    manifest = read_manifest(result.output)
    assert manifest.parents[0].digest == read_manifest(Path(named)).digest
    assert manifest.coverage is not None
    assert manifest.coverage["samples"] == 2
    assert not (tmp_path / "out" / "calibrate").exists()
    with pytest.raises(UsageError, match="holds another result"):
        quantised(model, data, tmp_path / "out")
    assert quantised(model, data, tmp_path / "out", statistics=named).existed


def test_statistics_of_another_model_or_kind_are_refused(model: Path, data: Path, artifacts: dict[str, QuantizeResult], tmp_path: Path) -> None:
    other = build_tiny(tmp_path / "other", seed=1, **SMALL)
    calibrate(tiny_recipe(other, data, tmp_path / "foreign"))
    for named, said in (
        (tmp_path / "foreign" / "calibrate", "was not calibrated on this source"),
        (artifacts["awq"].output, "was not calibrated on this source"),
        (tmp_path / "nowhere", "there is no folder"),
        (data, r"has no readable qvlopt\.json"),
    ):
        with pytest.raises(RunError, match=said) as refused:
            quantised(model, data, tmp_path / "out", statistics=str(named))
        assert refused.value.exit_code == 5
    assert not (tmp_path / "out").exists()


def test_the_option_names_the_very_folder_and_nothing_is_written_beside_it(
    model: Path, data: Path, artifacts: dict[str, QuantizeResult], tmp_path: Path
) -> None:
    result = quantize_awq(tiny_recipe(model, data, tmp_path / "x", quantize_awq={"search": PLAIN}, flags={"output": str(tmp_path / "here")}))
    assert isinstance(result, QuantizeResult)
    assert os.listdir(tmp_path) == ["here"]
    assert (result.output / "model.safetensors").read_bytes() == (artifacts["awq"].output / "model.safetensors").read_bytes()


def test_a_group_that_does_not_divide_is_refused_before_calibration(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages, "captured", None)
    odd = build_tiny(tmp_path / "odd", vision={**SMALL["vision"], "intermediate_size": 96}, text=SMALL["text"])
    with pytest.raises(UsageError) as refused:
        quantised(odd, data, tmp_path / "out")
    for index in range(2):
        assert f"model.visual.blocks.{index}.mlp.linear_fc2: input width 96" in refused.value.message
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ({"engine": "autoawq", "on_indivisible": "pad"}, "does not fit engine: autoawq"),
        ({"keep": ["lm_head", "visual.blocks.7.*"]}, r"matches no module .*the nearest is model\.visual\.blocks\."),
        ({"keep": ["*"]}, "leaves no layer"),
    ],
    ids=str,
)
def test_what_cannot_be_done_is_refused_and_nothing_is_written(model: Path, data: Path, tmp_path: Path, section: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said) as refused:
        quantised(model, data, tmp_path / "out", **section)
    assert refused.value.exit_code == 2
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("form", ["awq", "compressed-tensors"])
def test_an_artifact_is_not_quantised_again(data: Path, artifacts: dict[str, QuantizeResult], tmp_path: Path, form: str) -> None:
    with pytest.raises(UsageError, match=rf"is quantised already \({form}\)"):
        quantised(artifacts[form].output, data, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_weight_of_the_tower_that_is_not_finite_is_named_and_nothing_is_written(data: Path, tmp_path: Path) -> None:
    model = with_first_value(build_tiny(tmp_path / "tiny", **SMALL), {"model.visual.blocks.0.mlp.linear_fc2.weight": float("nan")})
    with pytest.raises(RunError, match=r"model\.visual\.blocks\.0\.mlp\.linear_fc2\.weight holds NaN or infinity"):
        quantised(model, data, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_weight_of_the_language_model_that_is_not_finite_is_named_and_no_artifact_is_left(data: Path, tmp_path: Path) -> None:
    name = "model.language_model.layers.0.mlp.up_proj.weight"
    model = with_first_value(build_tiny(tmp_path / "tiny", **SMALL), {name: float("inf")})
    with pytest.raises(RunError, match=rf"{name} holds NaN or infinity"):
        quantised(model, data, tmp_path / "out", search=PLAIN)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["model.language_model.embed_tokens.weight", "model.visual.pos_embed.weight", "model.visual.merger.linear_fc2.bias"])
def test_a_kept_tensor_that_float16_cannot_hold_is_named_and_no_artifact_is_left(data: Path, tmp_path: Path, name: str) -> None:
    model = with_first_value(build_tiny(tmp_path / "tiny", **SMALL), {name: 70000.0})
    with pytest.raises(RunError, match=rf"{name}.* does not fit torch\.float16") as failed:
        quantised(model, data, tmp_path / "out", dtype="float16", search=PLAIN)
    assert failed.value.exit_code == 5
    assert not (tmp_path / "out").exists()


def test_a_dry_run_writes_nothing_and_tells_what_it_would(model: Path, data: Path, tmp_path: Path) -> None:
    plan = quantize_awq(tiny_recipe(model, data, tmp_path / "out", quantize_awq={"scope": "vision.blocks"}), dry_run=True)
    assert isinstance(plan, Plan)
    rows = {item.item: item.value for item in plan.rows}
    assert "8 linears" in rows["quantises"]
    assert "4 bits in groups of 64" in rows["quantises"]
    assert "4 linears of the scope's parts" in rows["keeps"]
    assert "of memory" in rows["takes"]
    assert str(tmp_path / "out" / "awq") in rows["writes"]
    check_document(document_of("quantize-awq", plan.to_json()))
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_does_not_promise_bytes_that_a_cast_changes(model: Path, data: Path, tmp_path: Path) -> None:
    kept = {}
    for dtype in ("source", "float16"):
        plan = quantize_awq(tiny_recipe(model, data, tmp_path, quantize_awq={"dtype": dtype}), dry_run=True)
        assert isinstance(plan, Plan)
        kept[dtype] = next(item.value for item in plan.rows if item.item == "keeps")
    assert "byte for byte" in kept["source"]
    assert "byte for byte" not in kept["float16"]
    assert "float16" in kept["float16"]


def test_the_planned_size_is_about_the_written_one(model: Path, data: Path, artifacts: dict[str, QuantizeResult], tmp_path: Path) -> None:
    for form, result in artifacts.items():
        plan = quantize_awq(tiny_recipe(model, data, tmp_path, quantize_awq={"format": form}), dry_run=True)
        assert isinstance(plan, Plan)
        text = next(item.value for item in plan.rows if item.item == "writes")
        planned = int(text.split("about ")[1].split(" bytes")[0].replace(",", ""))
        assert planned == pytest.approx(result.bytes_after, rel=0.01)


def test_every_refusal_is_one_line_with_a_hint(model: Path, data: Path, tmp_path: Path) -> None:
    for section in ({"keep": ["nothing"]}, {"group_size": 96}, {"statistics": str(tmp_path / "x")}):
        with pytest.raises(QvloptError) as refused:
            quantised(model, data, tmp_path / "out", **section)
        assert "\n" not in refused.value.message
        assert refused.value.hint
