"""Statistics over a set: the same for any order and batch, complete or absent, and what was left out is said."""

from __future__ import annotations

import io
import logging
import os
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from PIL import Image
from rich.console import Console
from safetensors.torch import load_file

from qvlopt.artifact.manifest import read_manifest, verify_files
from qvlopt.artifact.unfinished import Parts
from qvlopt.commands import calibrate as module
from qvlopt.commands.calibrate import CalibrateResult, Skipped, calibrate
from qvlopt.commands.export import export
from qvlopt.commands.plan import Plan
from qvlopt.commands.quantize_awq import quantize_awq
from qvlopt.commands.quantize_int8 import quantize_int8
from qvlopt.errors import RunError, UsageError
from qvlopt.model.names import Stage, vision_linears
from qvlopt.model.source import open_source
from qvlopt.model.statistics import FILE, StatisticsFiles
from qvlopt.quant.objective import Gram
from tests.documents import check_document, document_of
from tests.tiny import build_tiny
from tests.tiny_run import SIZES, SMALL, build_set, listing, row, tiny_recipe, with_first_value, write_manifest

PART = ".calibrate.part"
PATCHES = sum(width * height // 256 for width, height in SIZES)


def calibrated(model: Path, data: Path, output: Path, **section: Any) -> CalibrateResult:
    result = calibrate(tiny_recipe(model, data, output, calibrate=section))
    assert isinstance(result, CalibrateResult)
    return result


def statistics(result: CalibrateResult) -> Mapping[str, torch.Tensor]:
    files = sorted(result.output.glob("statistics-*.safetensors"))
    return {name: tensor for path in files for name, tensor in load_file(path).items()}


def stored_bytes(result: CalibrateResult) -> dict[str, bytes]:
    """Every file but the manifest, which holds seconds."""
    return {path.name: path.read_bytes() for path in result.output.iterdir() if path.name != "qvlopt.json"}


def test_every_linear_of_the_tower_gets_statistics_of_every_patch(model: Path, data: Path, tmp_path: Path) -> None:
    result = calibrated(model, data, tmp_path)
    linears = vision_linears(open_source(str(model), folder=model).settings.vision)
    files = StatisticsFiles(result.output)
    assert result.output == tmp_path / "calibrate"
    assert files.layers == set(linears)
    assert (result.samples, result.images, result.tokens, result.layers, result.skipped) == (len(SIZES), len(SIZES), PATCHES, len(linears), ())
    for name in linears:
        merged = ".merger." in name or "deepstack" in name
        assert files.read(name).count == (PATCHES // 4 if merged else PATCHES)


def test_the_result_is_a_valid_document_and_the_manifest_says_the_same(model: Path, data: Path, tmp_path: Path) -> None:
    result = calibrated(model, data, tmp_path)
    check_document(document_of("calibrate", result.to_json()))
    manifest = read_manifest(result.output)
    assert (manifest.kind, manifest.digest) == ("statistics", result.digest)
    assert manifest.source is not None
    assert manifest.source.digest == open_source(str(model), folder=model).digest
    assert manifest.coverage is not None
    assert manifest.coverage["tokens_per_layer"]["model.visual.blocks.0.attn.qkv"] == PATCHES
    assert set(manifest.files) == {f"{FILE}.index.json", *(f"statistics-0000{place}-of-00004.safetensors" for place in range(1, 5))}
    assert verify_files(result.output) == []


@pytest.mark.parametrize("order", ["reversed", "shuffled"])
def test_the_order_of_the_lines_does_not_matter_to_a_bit(model: Path, data: Path, tmp_path: Path, order: str) -> None:
    rows = [row(index) for index in range(len(SIZES))]
    if order == "reversed":
        rows.reverse()
    else:
        random.Random(3).shuffle(rows)
    other = build_set(tmp_path / "set", rows=rows)
    for section in ({}, {"samples": 3}, {"batch": 2}):
        expected, got = calibrated(model, data, tmp_path / f"a{section}", **section), calibrated(model, other, tmp_path / f"b{section}", **section)
        assert stored_bytes(expected) == stored_bytes(got)


def test_the_batch_does_not_matter(model: Path, data: Path, tmp_path: Path) -> None:
    one, four = calibrated(model, data, tmp_path / "1", batch=1), calibrated(model, data, tmp_path / "4", batch=4)
    assert (one.samples, one.images, one.tokens) == (four.samples, four.images, four.tokens)
    for name, expected in statistics(one).items():
        got = statistics(four)[name]
        assert float((got.double() - expected.double()).norm()) <= 1e-5 * float(expected.double().norm()), name


def test_float32_and_bfloat16_saves_of_the_same_values_give_the_same_statistics(model: Path, data: Path, tmp_path: Path) -> None:
    wide = build_tiny(tmp_path / "wide", dtype="float32", **SMALL)
    expected, got = (statistics(calibrated(m, data, tmp_path / m.name)) for m in (model, wide))
    assert all(torch.equal(got[name], tensor) for name, tensor in expected.items())
    assert {tensor.dtype for tensor in got.values()} == {torch.float32, torch.float64, torch.int64}


def test_samples_are_chosen_by_the_seed(model: Path, data: Path, tmp_path: Path) -> None:
    results = [calibrate(tiny_recipe(model, data, tmp_path / str(seed), calibrate={"samples": 2}, seed=seed)) for seed in range(4)]
    assert len({str(sorted(stored_bytes(r).items())) for r in results if isinstance(r, CalibrateResult)}) > 1


def test_unusable_samples_are_counted_with_reasons_and_the_rest_is_used(model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    bad = [
        row(0, id="missing", images=["pictures/none.png"]),
        row(0, id="strip", images=["pictures/strip.png"]),
        row(0, id="cut", images=["pictures/cut.png"]),
        row(0, id="film", images=[], video="film.mp4"),
        row(0, id="half", images=["pictures/0.png", "pictures/none.png"]),
    ]
    data = build_set(tmp_path / "set", rows=[*bad, *(row(index) for index in range(len(SIZES)))])
    Image.new("RGB", (8, 1608)).save(data / "pictures" / "strip.png")
    (data / "pictures" / "cut.png").write_bytes((data / "pictures" / "1.png").read_bytes()[:-400])
    with caplog.at_level(logging.WARNING):
        result = calibrated(model, data, tmp_path / "out")
    reasons = {item.id: item.reason for item in result.skipped}
    assert set(reasons) <= {values["id"] for values in bad}
    assert result.samples == result.images == len(SIZES)
    assert result.tokens == PATCHES
    # Headers are read before the run, but samples after the last one needed are never decoded.
    with pytest.raises(RunError):
        calibrated(model, data, tmp_path / "more", samples=len(SIZES) + 1)
    everything = dict(message.removeprefix("skipped ").split(": ", 1) for message in caplog.messages if message.startswith("skipped "))
    assert set(everything) == {values["id"] for values in bad}
    for sample, said in (("missing", "missing"), ("strip", "aspect ratio"), ("cut", "cut.png"), ("film", "video"), ("half", "none.png")):
        assert said in everything[sample]
    assert reasons.items() <= everything.items()


def test_too_few_usable_samples_end_the_run_and_leave_nothing(model: Path, tmp_path: Path) -> None:
    data = build_set(tmp_path / "set", rows=[row(0), row(1), row(2, images=["pictures/none.png"])])
    with pytest.raises(RunError, match=r"2 usable samples of 3, 1 skipped; calibrate\.samples asks for 3") as failed:
        calibrated(model, data, tmp_path / "out", samples=3)
    assert failed.value.exit_code == 5
    assert not (tmp_path / "out").exists()


def test_a_set_without_a_picture_is_refused(model: Path, tmp_path: Path) -> None:
    data = build_set(tmp_path / "set", rows=[row(index, images=[], task="text") for index in range(4)])
    with pytest.raises(RunError, match=r"none of the . samples taken has a picture, so the vision tower was never seen"):
        calibrated(model, data, tmp_path / "out", samples=4)
    assert not (tmp_path / "out").exists()


def test_texts_among_pictures_and_a_single_picture_are_fine(model: Path, tmp_path: Path) -> None:
    mixed = build_set(tmp_path / "mixed", rows=[row(0), row(1), row(2, images=[], task="text"), row(3, images=["pictures/3.png", "pictures/4.png"])])
    result = calibrated(model, mixed, tmp_path / "a", samples=4)
    assert (result.samples, result.images) == (4, 4)
    single = build_set(tmp_path / "single", rows=[row(0)])
    assert calibrated(model, single, tmp_path / "b", samples=1).images == 1


def test_an_empty_set_is_refused(model: Path, tmp_path: Path) -> None:
    with pytest.raises((RunError, UsageError), match="has no rows"):
        calibrated(model, build_set(tmp_path / "set", rows=[]), tmp_path / "out")


@pytest.mark.parametrize("place", ["nowhere", "builtin:nowhere"])
def test_a_missing_set_is_said(model: Path, tmp_path: Path, place: str) -> None:
    with pytest.raises((RunError, UsageError), match="nowhere"):
        calibrate(tiny_recipe(model, tmp_path, tmp_path / "out", calibrate={"data": place}))
    assert not (tmp_path / "out").exists()


def test_a_missing_folder_of_pictures_is_a_failure_not_a_wrong_recipe(model: Path, tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"calibrate\.data: there is no set") as failed:
        calibrated(model, tmp_path / "nowhere", tmp_path / "out")
    assert failed.value.exit_code == 5


def test_the_same_statistics_are_not_made_twice(model: Path, data: Path, tmp_path: Path) -> None:
    first = calibrated(model, data, tmp_path)
    before = listing(tmp_path)
    second = calibrated(model, data, tmp_path)
    assert (first.existed, second.existed) == (False, True)
    assert listing(tmp_path) == before
    assert {**second.to_json()} == first.to_json()


@pytest.mark.parametrize("change", [{"samples": 5}, {"batch": 2}])
def test_other_statistics_in_place_are_kept_unless_overwritten(model: Path, data: Path, tmp_path: Path, change: dict[str, int]) -> None:
    first = calibrated(model, data, tmp_path)
    before = listing(tmp_path)
    with pytest.raises(UsageError, match=r"--overwrite.*--resume"):
        calibrated(model, data, tmp_path, **change)
    assert listing(tmp_path) == before
    replaced = calibrate(tiny_recipe(model, data, tmp_path, calibrate=change), overwrite=True)
    assert isinstance(replaced, CalibrateResult)
    assert read_manifest(tmp_path / "calibrate").digest == replaced.digest != first.digest


def test_the_ids_of_skipped_samples_act_on_no_terminal(model: Path, tmp_path: Path) -> None:
    rows = [row(index) for index in range(len(SIZES))] + [row(0, id="\x1b[31mred [b]\n::error::x", images=["none.png"])]
    stream = io.StringIO()
    calibrated(model, build_set(tmp_path / "hostile", rows=rows), tmp_path / "out").render(Console(file=stream, markup=False))
    assert "\\x1b[31mred [b]\\n::error::x" in stream.getvalue()
    assert "\x1b" not in stream.getvalue()
    assert not any(line.startswith("::") for line in stream.getvalue().splitlines())


def test_another_model_or_other_pixels_are_other_statistics(model: Path, data: Path, tmp_path: Path) -> None:
    other = build_tiny(tmp_path / "other", seed=1, **SMALL)
    plain = calibrated(model, data, tmp_path / "a")
    assert calibrated(other, data, tmp_path / "b").digest != plain.digest
    limited = calibrate(tiny_recipe(model, data, tmp_path / "c", pixels={"min": 1024, "max": 4096}))
    assert isinstance(limited, CalibrateResult)
    assert limited.digest != plain.digest
    assert limited.tokens < plain.tokens


def test_a_dry_run_writes_nothing_and_tells_what_it_would(model: Path, data: Path, tmp_path: Path) -> None:
    plan = calibrate(tiny_recipe(model, data, tmp_path / "out"), dry_run=True)
    assert isinstance(plan, Plan)
    assert [item.item for item in plan.rows] == ["source", "data", "layers", "writes", "takes"]
    assert f"{len(SIZES)} samples" in plan.rows[1].value
    check_document(document_of("calibrate", plan.to_json()))
    assert list(tmp_path.iterdir()) == []


def test_the_option_names_the_very_folder(model: Path, data: Path, tmp_path: Path) -> None:
    result = calibrate(tiny_recipe(model, data, tmp_path / "x", flags={"output": str(tmp_path / "here")}))
    assert isinstance(result, CalibrateResult)
    assert result.output == tmp_path / "here"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["here"]


def test_a_weight_that_is_not_finite_is_named_and_nothing_is_written(data: Path, tmp_path: Path) -> None:
    model = with_first_value(build_tiny(tmp_path / "tiny", **SMALL), {"model.visual.blocks.1.norm2.weight": float("nan")})
    with pytest.raises(RunError, match=r"model\.visual\.blocks\.1\.norm2\.weight holds NaN or infinity"):
        calibrated(model, data, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_room_for_the_hidden_states_is_asked_for_too(model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(module, "require_space", lambda _output, size: asked.append(size))
    calibrated(model, data, tmp_path / "out")
    statistics, before_and_after = module.statistics_bytes(open_source(str(model), folder=tmp_path)), 2 * 4 * 64 * PATCHES
    assert asked[0] == pytest.approx(statistics + before_and_after, rel=0.01)


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError("bug"), OSError(28, "No space left on device")], ids=repr)
@pytest.mark.parametrize("step", ["gather_statistics", "write_manifest"])
def test_whatever_breaks_off_at_the_end_leaves_finished_stages_only_and_they_are_used(
    model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, error: BaseException
) -> None:
    real = getattr(module, step)

    def broken(*rest: Any) -> None:
        real(*rest)
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(module, step, broken)
        with pytest.raises((KeyboardInterrupt, RuntimeError, RunError)):
            calibrated(model, data, tmp_path)
    assert os.listdir(tmp_path) == [PART]
    with monkeypatch.context() as patched:
        patched.setattr(module, "_keep", None)  # nothing is left to keep
        again = calibrated(model, data, tmp_path)
    assert os.listdir(tmp_path) == ["calibrate"]
    assert stored_bytes(again) == stored_bytes(calibrated(model, data, tmp_path / "whole"))


@pytest.mark.parametrize("scope", ["vision", "vision+language"])
def test_a_run_that_is_killed_in_any_stage_goes_on_after_the_last_finished_one(
    model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scope: str
) -> None:
    section = {"scope": scope, "samples": 4}
    real, kept = module._keep, list[str]()

    def keep(parts: Parts, stage: Stage, grams: Mapping[str, Gram]) -> dict[str, int]:
        kept.append(stage.name)
        if len(kept) == last:
            raise KeyboardInterrupt
        return real(parts, stage, grams)

    monkeypatch.setattr(module, "_keep", keep)
    last = 0
    whole = calibrated(model, data, tmp_path / "whole", **section)
    stages = tuple(kept)
    for last, name in enumerate(stages, 1):
        kept.clear()
        with pytest.raises(KeyboardInterrupt):
            calibrated(model, data, tmp_path / name, **section)
        assert os.listdir(tmp_path / name) == [PART]
        kept.clear()
        last = 0
        again = calibrated(model, data, tmp_path / name, **section)
        assert kept == list(stages[stages.index(name) :])
        assert stored_bytes(again) == stored_bytes(whole)
        manifests = [read_manifest(result.output) for result in (again, whole)]
        assert manifests[0].coverage == manifests[1].coverage
        assert os.listdir(tmp_path / name) == ["calibrate"]


def test_an_error_of_ours_leaves_nothing(model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise RunError("broken")

    monkeypatch.setattr(module, "gather_statistics", refuse)
    with pytest.raises(RunError, match="broken"):
        calibrated(model, data, tmp_path / "out")
    assert os.listdir(tmp_path) == []


def test_a_dry_run_of_a_model_of_the_hub_fetches_nothing_and_says_so(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def snapshot(repository: str, *, local_files_only: bool, **_: object) -> str:
        asked.append(local_files_only)
        raise LocalEntryNotFoundError(f"{repository} is not there")

    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    for command in (calibrate, quantize_awq, export, quantize_int8):
        plan = command(tiny_recipe(Path("some/model"), data, tmp_path / "out"), dry_run=True)
        assert isinstance(plan, Plan)
        (row,) = plan.rows
        assert row.item == "fetches"
        assert "some/model at revision main is not in the cache" in row.value
    assert asked == [True] * 4
    assert list(tmp_path.iterdir()) == []


def test_a_changed_locked_set_is_refused(model: Path, tmp_path: Path) -> None:
    from qvlopt.data.sets import write_lock

    data = build_set(tmp_path / "set")
    write_lock(data, name="set", licence="CC0-1.0")
    write_manifest(data, [row(0)])
    with pytest.raises(RunError, match=r"manifest\.jsonl"):
        calibrated(model, data, tmp_path / "out", samples=1)


def test_without_the_gpu_that_was_asked_for_it_goes_on(model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = calibrate(tiny_recipe(model, data, tmp_path, hardware={"device": "cuda", "threads": 1}))
    assert isinstance(result, CalibrateResult)
    assert result.exit_code == 0


class Counting:
    """A progress that keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[str, int]] = []

    def start(self, total: int, text: str) -> None:
        self.told.append((text, total))

    def advance(self, n: int = 1, text: str | None = None) -> None:
        self.told.append(("advance" if text is None else text, n))

    def finish(self) -> None:
        self.told.append(("finish", 0))


def test_progress_is_told_and_finished(model: Path, data: Path, tmp_path: Path) -> None:
    progress = Counting()
    calibrate(tiny_recipe(model, data, tmp_path), progress=progress)
    linears = len(vision_linears(open_source(str(model), folder=model).settings.vision))
    assert progress.told[0] == ("calibrate", linears)
    assert sum(n for _, n in progress.told[1:-1]) == linears
    assert f"blocks.1: {len(SIZES)} of {len(SIZES)} pictures" in dict(progress.told)
    assert progress.told[-1] == ("finish", 0)


def test_skipped_samples_are_shown_to_people_and_programs(tmp_path: Path) -> None:
    import io

    from rich.console import Console

    result = CalibrateResult(tmp_path, 3, 3, 48, 14, (Skipped("p[1]", "is a video"),), "d", existed=False)
    console = Console(file=io.StringIO(), width=100)
    result.render(console)
    assert isinstance(console.file, io.StringIO)
    assert "skipped p[1]: is a video" in console.file.getvalue()
    assert result.to_json()["skipped"] == [{"id": "p[1]", "reason": "is a video"}]
