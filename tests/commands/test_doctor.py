"""doctor: what a recipe takes is told from headers, what is missing fails, and nothing is written or fetched."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

from qvlopt.artifact.tensors import TensorFiles
from qvlopt.commands import calibration_data, forecast
from qvlopt.commands import doctor as module
from qvlopt.commands.calibrate import CalibrateResult, calibrate
from qvlopt.commands.doctor import DoctorResult, doctor
from qvlopt.commands.evaluate_cost import AskedItems
from qvlopt.commands.evaluate_inputs import read_sets
from qvlopt.commands.export import export
from qvlopt.commands.plan import Plan
from qvlopt.commands.quantize_awq import QuantizeResult, quantize_awq
from qvlopt.commands.quantize_int8 import quantize_int8
from qvlopt.commands.speed_probe import measured_rates
from qvlopt.model.answer_cost import AnswerCost
from qvlopt.model.cost import Rates, TowerCost
from qvlopt.model.preprocess import PictureProcessor
from qvlopt.model.prompt import Prompter
from qvlopt.model.source import open_source
from qvlopt.model.vision import VisionConfig
from qvlopt.recipe.load import LoadedRecipe, load_recipe
from qvlopt.recipe.schema import QuantizeAwqSection
from qvlopt.runtime.preparer import Preparer
from tests.documents import check_document, document_of
from tests.tiny_run import SIZES, SMALL, listing, tiny_recipe

RATES = Rates(linear=100.0, float32=50.0, passes=1.0, bytes=1.0)


@pytest.fixture(autouse=True)
def known_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forecast, "measured_rates", lambda _dtype: RATES)


def recipe_of(model: Path, data: Path, output: Path, *sections: str, **more: Any) -> LoadedRecipe:
    loaded = tiny_recipe(model, data, output, **more)
    return replace(loaded, sections=tuple(sections) or ("calibrate", "quantize_awq"))


def told(loaded: LoadedRecipe) -> DoctorResult:
    result = doctor(loaded)
    assert isinstance(result, DoctorResult)
    check_document(document_of("doctor", result.to_json(), exit_code=result.exit_code))
    return result


def status(result: DoctorResult, name: str) -> str:
    return next(check.status for check in result.checks if check.name == name)


def detail(result: DoctorResult, name: str) -> str:
    return next(check.detail for check in result.checks if check.name == name)


def test_every_section_gets_a_forecast_in_pipeline_order_and_nothing_is_written(model: Path, data: Path, tmp_path: Path) -> None:
    sections = ("evaluate", "quantize_awq", "calibrate", "export", "quantize_int8", "bench")
    before = listing(model)
    result = told(recipe_of(model, data, tmp_path / "out", *sections))
    assert [stage.name for stage in result.stages] == ["calibrate", "quantize-awq", "export", "quantize-int8", "evaluate", "bench"]
    assert [stage.basis for stage in result.stages] == ["counted", "counted", "rough", "rough", "counted", "rough"]
    assert all(stage.seconds > 0 and stage.rss_bytes > 0 for stage in result.stages)
    assert result.exit_code == 0
    assert list(tmp_path.iterdir()) == []
    assert listing(model) == before


def test_no_tensor_is_read(model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TensorFiles, "read", None)
    monkeypatch.setattr(TensorFiles, "sha256", None)
    assert told(recipe_of(model, data, tmp_path)).exit_code == 0


def test_the_disk_that_was_told_is_the_disk_that_is_taken(model: Path, data: Path, tmp_path: Path) -> None:
    loaded = recipe_of(model, data, tmp_path)
    stages = {stage.name: stage for stage in told(loaded).stages}
    made = calibrate(loaded)
    assert isinstance(made, CalibrateResult)
    statistics = sum(path.stat().st_size for path in made.output.iterdir())
    patches = sum(width * height // 256 for width, height in SIZES)
    hidden = 2 * 4 * patches * SMALL["vision"]["hidden_size"]
    assert stages["calibrate"].disk_bytes == pytest.approx(statistics + hidden, rel=0.25)
    artifact = quantize_awq(loaded)
    assert isinstance(artifact, QuantizeResult)
    quantised = artifact.vision_bytes_after
    assert artifact.bytes_after < stages["quantize-awq"].disk_bytes < artifact.bytes_after + quantised


def test_what_does_not_fit_into_memory_or_on_the_disk_fails(model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = recipe_of(model, data, tmp_path)
    need = max(stage.rss_bytes for stage in told(loaded).stages)
    for available, expected, code in ((2 * need, "ok", 0), (int(1.1 * need), "warn", 0), (need - 1, "fail", 5)):
        monkeypatch.setattr(module, "available_memory_bytes", lambda there=available: there)
        result = told(loaded)
        assert (status(result, "memory of stages"), result.exit_code) == (expected, code)
    monkeypatch.setattr(module, "available_memory_bytes", lambda: 2 * need)
    monkeypatch.setattr(module.shutil, "disk_usage", lambda _place: SimpleNamespace(free=10))
    result = told(loaded)
    assert (status(result, "disk"), result.exit_code) == ("fail", 5)
    assert "0.0 MB free" in detail(result, "disk")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model": {"path": "nowhere"}}, "no checkpoint at nowhere"),
        ({"calibrate": {"data": "nowhere"}}, "there is no set nowhere"),
        ({"calibrate": {"samples": 99}}, "calibrate.samples asks for 99"),
        ({"evaluate": {"data": [{"name": "x", "path": "nowhere", "task": "ocr"}]}}, "evaluate.data x: there is no set nowhere"),
        ({"quantize_awq": {"group_size": 96}}, "does not fit"),
    ],
    ids=str,
)
def test_inputs_that_are_not_there_fail_with_the_reason_and_nothing_is_fetched(
    model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], said: str
) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    fields = {
        "name": "t",
        "model": {"path": str(model)},
        "calibrate": {"data": str(data), "split": None, "samples": 2},
        "quantize_awq": {"group_size": 64},
    }
    for section, values in change.items():
        fields[section] = {**fields.get(section, {}), **values}
    result = told(load_recipe(fields))
    assert (status(result, "inputs"), result.exit_code, result.stages) == ("fail", 5, ())
    assert said in detail(result, "inputs")


def test_a_model_of_the_hub_that_is_not_there_yet_is_no_failure_and_is_not_fetched(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    result = told(recipe_of(Path("some/model"), data, tmp_path))
    assert (status(result, "inputs"), result.exit_code, result.stages) == ("warn", 0, ())
    assert "some/model at revision main is not in the cache" in detail(result, "inputs")


def test_a_set_of_the_hub_is_looked_for_in_the_cache_only(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []

    def find(_value: str, _folder: Path, *, download: bool = True) -> None:
        asked.append(download)

    monkeypatch.setattr(calibration_data, "find_set", find)
    assert "there is no set some/set" in detail(told(recipe_of(model, Path("some/set"), tmp_path)), "inputs")
    assert asked == [False]


def test_the_limits_of_the_sets_count(model: Path, data: Path, tmp_path: Path) -> None:
    entry = {"name": "ocr", "path": str(data), "task": "ocr"}
    times = []
    for limits in ({}, {"limit": 2}, {"data": [entry | {"limit": 5000}]}, {"data": [entry | {"limit": 5000}], "limit": 2}):
        loaded = recipe_of(model, data, tmp_path, "evaluate", evaluate={"data": [entry], "batch": 1, **limits})
        times.append(told(loaded).stages[0].seconds)
    usual, few, many, capped = times
    assert few == capped < usual == many


def test_a_gpu_that_is_not_there_fails_only_what_needs_it(model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for sections, expected in ((("quantize_awq",), "warn"), (("quantize_awq", "evaluate"), "fail")):
        loaded = recipe_of(model, data, tmp_path, *sections, hardware={"device": "cuda", "threads": 1})
        assert status(told(loaded), "device") == expected


def test_the_missing_extra_of_the_other_engine_is_named(model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = module.version

    def version(name: str) -> str:
        if name == "autoawq":
            raise PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(module, "version", version)
    result = told(recipe_of(model, data, tmp_path, quantize_awq={"engine": "autoawq"}))
    assert (status(result, "autoawq"), result.exit_code) == ("fail", 5)
    assert "autoawq" not in {check.name for check in told(recipe_of(model, data, tmp_path)).checks}


def test_packages_outside_what_the_distribution_asks_for_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class Distribution:
        requires = ("torch>=99", "nothing-of-that-name>=1", "rich>=1", 'absent; extra == "dev"')

    monkeypatch.setattr(module, "distribution", lambda _name: Distribution)
    assert [text.split(",")[0].split(" is ")[0] for text in module._unmet()] == ["torch", "nothing-of-that-name"]


def test_a_machine_that_is_busy_is_told(model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.os, "getloadavg", lambda: (9.0, 9.0, 9.0))
    assert status(told(recipe_of(model, data, tmp_path)), "load") == "warn"


def test_a_dry_run_is_a_plan(model: Path, data: Path, tmp_path: Path) -> None:
    assert isinstance(doctor(recipe_of(model, data, tmp_path), dry_run=True), Plan)


def test_people_see_tables_and_a_verdict(model: Path, data: Path, tmp_path: Path) -> None:
    stream = io.StringIO()
    told(recipe_of(model, data, tmp_path)).render(Console(file=stream, width=140))
    for said in ("quantize-awq", "counted", "threads", "this recipe can run here"):
        assert said in stream.getvalue()


def test_more_pictures_take_longer_and_no_more_memory(model: Path) -> None:
    config = open_source(str(model), folder=model).settings.vision
    few, many = (TowerCost(config, [100] * count, 10_000_000, RATES).calibrate() for count in (2000, 20_000))
    assert many.rss_bytes == few.rss_bytes
    assert many.seconds > few.seconds
    assert many.disk_bytes - few.disk_bytes == 18_000 * 100 * 2 * 4 * config.hidden_size


@pytest.mark.parametrize(
    ("depth", "pictures", "compensate", "measured"), [(24, 64, False, (1.77e9, 2.47e9)), (2, 24, False, (1.71e9, 2.15e9)), (2, 24, True, (2.39e9,))]
)
def test_memory_at_the_shape_of_2b_is_what_was_measured(depth: int, pictures: int, compensate: bool, measured: tuple[float, ...]) -> None:
    """Peaks of whole runs (benchmarks/RESULTS.md), forward passes in bfloat16 and, where there are two, in float32."""
    config = VisionConfig(depth, 1024, 16, 4096, 2048, 16, 2, 2, 2304, tuple(index for index in (5, 11, 17) if index < depth))
    section = QuantizeAwqSection.model_validate({"search": {"compensate": compensate}})
    cost = TowerCost(config, [784] * pictures, 4_255_064_064, RATES).quantize(section, packed_bytes=1, written_bytes=1)
    assert all(0.75 * peak < cost.rss_bytes < 1.25 * peak for peak in measured)


def test_the_decoder_layers_and_compensation_are_counted_too(model: Path, data: Path, tmp_path: Path) -> None:
    def seconds(**more: Any) -> float:
        return told(recipe_of(model, data, tmp_path, "quantize_awq", **more)).stages[0].seconds

    usual = seconds()
    assert seconds(quantize_awq={"search": {"compensate": True}}) > usual
    assert seconds(quantize_awq={"scope": "vision+language"}) > usual


def test_what_is_asked_of_every_item_is_counted(model: Path, data: Path, tmp_path: Path) -> None:
    loaded = recipe_of(model, data, tmp_path, evaluate={"data": [{"name": "x", "path": str(data), "task": "ocr"}]})
    (each,) = read_sets(loaded).sets
    source = open_source(str(model), folder=model)
    processor, prompter = PictureProcessor.for_tower(source.folder, source.settings.vision, None), Prompter.from_folder(source.folder)
    asked = AskedItems.of(each, processor, prompter)
    prepared = [Preparer(prompter, processor).prepare(sample) for sample in each.samples]
    assert asked.patches == [picture.pixel_values.shape[0] for item in prepared for picture in item.pictures]
    assert asked.prompts == [len(item.token_ids) for item in prepared]
    assert asked.answer == 1 + len(prompter.encode("noise")) - len(prompter.encode(""))


def test_a_larger_batch_takes_fewer_calls_and_a_longer_answer_more(model: Path) -> None:
    settings = open_source(str(model), folder=model).settings
    cost = AnswerCost(TowerCost(settings.vision, [16] * 100, 0, RATES), settings.text, [20] * 100)
    assert cost.seconds(answer=5, batch=8) < cost.seconds(answer=5, batch=1)
    assert cost.seconds(answer=5, batch=8) < cost.seconds(answer=9, batch=8)


@pytest.mark.parametrize("command", [calibrate, quantize_awq, export, quantize_int8], ids=lambda command: command.__name__)
def test_a_plan_says_what_its_stage_takes(model: Path, data: Path, tmp_path: Path, command: Callable[..., object]) -> None:
    loaded = recipe_of(model, data, tmp_path, command.__name__)
    plan = command(loaded, dry_run=True)
    assert isinstance(plan, Plan)
    (stage,) = told(loaded).stages
    assert plan.rows[-1].item == "takes"
    assert plan.rows[-1].value.startswith(f"about {forecast.sized(stage.rss_bytes)} of memory, {forecast.sized(stage.disk_bytes)} of disk, ")


def test_the_probe_measures_all_rates() -> None:
    assert all(rate > 0 for rate in measured_rates(torch.float32))
