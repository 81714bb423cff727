"""Faults that users of other tools reported about pictures, prompts and data, put to evaluate and calibrate alike.

The numbers are those of the collection of reports that the project keeps (pictures 1 to 9, prompts and data files 10 to 19).
One set holds every hostile picture beside good ones; it is read from files and out of a parquet table. What only concerns
the engine (10, 11, 18, 19) or a metric (15 to 17) has its tests there as well.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import ExifTags, Image

from qvlopt.commands.calibrate import CalibrateResult, calibrate
from qvlopt.commands.evaluate import EvaluateResult, evaluate, evaluate_with
from qvlopt.data.samples import Sample, read_samples
from qvlopt.errors import UsageError
from qvlopt.model.preprocess import PictureProcessor
from qvlopt.recipe.load import LoadedRecipe, load_recipe
from tests.fakes import FakeEngine
from tests.tiny import build_tiny
from tests.tiny_run import SMALL


def gradient(width: int, height: int) -> Image.Image:
    across, down = np.linspace(0, 155, width)[None, :, None], np.linspace(0, 100, height)[:, None, None]
    return Image.fromarray((across * np.array([1.0, 0.4, 0.7]) + down).astype(np.uint8))


def saved(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def turned() -> bytes:
    """The picture of `upright`, its pixels turned to the left and marked as such (EXIF orientation 6: turn right to view)."""
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    return saved(gradient(96, 64).transpose(Image.Transpose.ROTATE_90), exif=exif)


def clear(hidden: int) -> bytes:
    """Half of it is transparent, with the colour `hidden` stored under it."""
    pixels = np.full((64, 64, 4), 255, np.uint8)
    pixels[:, :32, 1] = 0
    pixels[:, 32:] = (hidden, hidden // 2, 3, 0)
    return saved(Image.fromarray(pixels))


def ramp() -> Image.Image:
    return Image.fromarray(np.repeat(np.linspace(0, 65535, 256).astype(np.uint16)[None], 64, axis=0))


GOOD: dict[str, Callable[[], bytes]] = {
    "small-26x28": lambda: saved(gradient(26, 28)),  # 1
    "small-1x1": lambda: saved(gradient(1, 1)),
    "plain": lambda: saved(gradient(64, 64)),
    "strip-200": lambda: saved(gradient(8, 1600)),  # 2
    "upright": lambda: saved(gradient(96, 64)),  # 3
    "turned": turned,
    "clear-a": lambda: clear(0),  # 4
    "clear-b": lambda: clear(200),
    "grey16-png": lambda: saved(ramp()),  # 5
    "grey16-tiff": lambda: saved(ramp(), "TIFF"),
    "cmyk": lambda: saved(gradient(64, 64).convert("CMYK"), "JPEG"),
    "la": lambda: saved(gradient(64, 64).convert("LA")),
    "mode-1": lambda: saved(gradient(64, 64).convert("1")),
    "animated": lambda: saved(gradient(64, 64), "GIF", save_all=True, append_images=[Image.new("RGB", (64, 64))] * 2),
}
BAD: dict[str, tuple[Callable[[], bytes], str]] = {
    "strip-201": (lambda: saved(gradient(8, 1608)), "aspect ratio of 8x1608 is above 200"),  # 2
    "float": (lambda: saved(Image.new("F", (64, 64)), "TIFF"), "mode F"),  # 5
    "huge": (lambda: saved(Image.new("1", (20000, 10000))), "200,000,000 pixels"),  # 6
    "cut": (lambda: saved(Image.effect_noise((64, 64), 50))[:-1500], "trunc"),  # 7
    "empty": (lambda: b"", "is empty"),
    "text": (lambda: b"no picture at all", "no picture in a known format"),
}


def row(id: str, **values: Any) -> dict[str, Any]:
    return {"id": id, "question": "What is it?", "answers": ["x"], **values}


def as_files(folder: Path) -> Path:
    pictures = {name: make() for name, make in GOOD.items()} | {name: make() for name, (make, _) in BAD.items()}
    folder.mkdir()
    for name, data in pictures.items():
        (folder / f"{name}.jpg").write_bytes(data)
    rows = [row(name, images=[f"{name}.jpg"]) for name in pictures]
    rows += [row("gone", images=["gone.png"]), row("frames", video=["plain.jpg"])]  # 7, 9
    (folder / "manifest.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows), encoding="utf-8")
    return folder


def as_parquet(folder: Path) -> Path:
    pictures = {name: make() for name, make in GOOD.items()} | {name: make() for name, (make, _) in BAD.items()}
    folder.mkdir()
    rows = [row(name, image={"bytes": data, "path": "x"}) for name, data in pictures.items()]
    rows.append(row("gone", image={"bytes": None, "path": "gone.png"}))
    pq.write_table(pa.Table.from_pylist(rows), folder / "set.parquet", row_group_size=5)
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny(tmp_path_factory.mktemp("model") / "tiny", **SMALL)


def sections(model: Path, data: Path, output: Path, **evaluating: Any) -> dict[str, Any]:
    entry = {"name": "hostile", "path": str(data), "task": "ocr", "max_new_tokens": 2}
    return {
        "model": {"path": str(model)},
        "output": str(output),
        "hardware": {"device": "cpu", "threads": 1},
        "pixels": {"min": 1024, "max": 16384},
        "calibrate": {"data": str(data), "split": None, "samples": len(GOOD)},
        "evaluate": {"data": [entry], "cache": False, "reports": ["json", "md"], **evaluating},
    }


def recipe(model: Path, data: Path, output: Path, **evaluating: Any) -> LoadedRecipe:
    return load_recipe(sections(model, data, output, **evaluating))


@dataclass(frozen=True)
class Both:
    """The same hostile set after both commands."""

    data: Path
    evaluated: EvaluateResult
    calibrated: CalibrateResult
    items: dict[str, dict[str, Any]]

    def failed(self) -> dict[str, str]:
        return {id: item["failed"] for id, item in self.items.items() if item["failed"]}


@pytest.fixture(scope="module", params=[as_files, as_parquet], ids=["files", "parquet"])
def both(request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Both:
    place = tmp_path_factory.mktemp("both")
    data = request.param(place / "set")
    loaded = recipe(model, data, place / "out")
    evaluated, calibrated = evaluate(loaded), calibrate(loaded)
    assert isinstance(evaluated, EvaluateResult)
    assert isinstance(calibrated, CalibrateResult)
    lines = (evaluated.report / "items.jsonl").read_text(encoding="utf-8").splitlines()
    return Both(data, evaluated, calibrated, {item["id"]: item for item in map(json.loads, lines)})


def test_2_5_6_7_9_what_cannot_be_used_fails_alone_with_its_reason_and_the_status_says_so(both: Both) -> None:
    expected = {name: reason for name, (_, reason) in BAD.items()} | {"gone": "missing"} | ({"frames": "video"} if "frames" in both.items else {})
    assert set(both.failed()) == set(expected)
    for name, reason in expected.items():
        assert reason in both.failed()[name]
    assert both.evaluated.exit_code == 5
    assert (both.evaluated.report / "report.json").exists()


def test_1_to_7_everything_else_is_scored_and_counted(both: Both) -> None:
    scored = {id for id, item in both.items.items() if item["candidate_answer"] is not None}
    assert scored == set(GOOD)
    metric = both.evaluated.to_json()["results"][0]["metrics"][0]
    assert (metric["n"], metric["n_failed"]) == (len(GOOD), len(both.items) - len(GOOD))


def test_calibrate_skips_what_evaluate_fails_and_uses_the_rest(both: Both) -> None:
    assert both.calibrated.samples == len(GOOD)
    assert {item.id for item in both.calibrated.skipped} <= set(both.failed())
    for item in both.calibrated.skipped:
        assert item.reason == both.failed()[item.id]
    # what a header tells is found before the work, whether or not calibrate would have come to it
    assert {item.id for item in both.calibrated.skipped} >= {"strip-201", "huge", "empty", "text", "gone"}


@pytest.fixture(scope="module")
def processor(model: Path) -> PictureProcessor:
    from qvlopt.model.source import open_source

    source = open_source(str(model), folder=model)
    return PictureProcessor.for_tower(source.folder, source.settings.vision, None)


def values(both: Both, processor: PictureProcessor, id: str) -> torch.Tensor:
    samples = {sample.id: sample for sample in read_samples(both.data, task="ocr").samples}
    return processor.process(samples[id].images[0].load()).pixel_values


def test_3_a_turned_picture_gives_the_tensor_of_the_upright_one(both: Both, processor: PictureProcessor) -> None:
    assert torch.equal(values(both, processor, "turned"), values(both, processor, "upright"))
    assert both.items["turned"]["size"] == both.items["upright"]["size"] == [[96, 64]]


def test_4_colours_under_clear_pixels_change_nothing(both: Both, processor: PictureProcessor) -> None:
    assert torch.equal(values(both, processor, "clear-a"), values(both, processor, "clear-b"))


def test_5_sixteen_bit_greys_keep_their_levels(both: Both, processor: PictureProcessor) -> None:
    samples = {sample.id: sample for sample in read_samples(both.data, task="ocr").samples}
    for name in ("grey16-png", "grey16-tiff"):
        assert len(np.unique(np.asarray(samples[name].images[0].load()))) >= 250
    assert torch.equal(values(both, processor, "grey16-png"), values(both, processor, "grey16-tiff"))


def test_5_an_animation_is_said_once(both: Both) -> None:
    text = (both.evaluated.report / "report.json").read_text(encoding="utf-8")
    assert sum("more than one frame" in warning for warning in json.loads(text)["warnings"]) == 1


def test_8_pixel_limits_hold_in_both_commands_and_are_in_the_report(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "set"
    folder.mkdir()
    gradient(512, 512).save(folder / "p.png")
    (folder / "manifest.jsonl").write_text(json.dumps(row("a", images=["p.png"])), encoding="utf-8")
    settings = ("pixels.max=4096", "calibrate.samples=1")
    loaded = load_recipe(sections(model, folder, tmp_path / "out"), overrides=settings)
    evaluated, calibrated = evaluate(loaded), calibrate(loaded)
    assert isinstance(evaluated, EvaluateResult)
    assert isinstance(calibrated, CalibrateResult)
    item = json.loads((evaluated.report / "items.jsonl").read_text())
    assert item["size"] == [[64, 64]]  # 4 merged tokens of 32 x 32 pixels
    assert calibrated.tokens == 16  # the patches of 16 x 16 of those 4 tokens
    document = json.loads((evaluated.report / "report.json").read_text())
    assert [engine["pixels"] for engine in document["fingerprint"]["engines"].values()] == [{"min": 1024, "max": 4096}]


@pytest.mark.parametrize("pictures", [["p", None, None], [None] * 4, ["p", "p", None, None], ["small", "p", "wide"]])
def test_12_texts_single_pictures_and_mixed_sizes_all_run(model: Path, tmp_path: Path, pictures: list[str | None]) -> None:
    folder = tmp_path / "set"
    folder.mkdir()
    for name, size in {"p": (64, 64), "small": (26, 28), "wide": (128, 64)}.items():
        gradient(*size).save(folder / f"{name}.png")
    rows = [row(str(i), images=[f"{name}.png"] if name else []) for i, name in enumerate(pictures)]
    (folder / "manifest.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows), encoding="utf-8")
    evaluated = evaluate(recipe(model, folder, tmp_path / "out", batch=3))
    assert isinstance(evaluated, EvaluateResult)
    assert evaluated.to_json()["results"][0]["metrics"][0]["n"] == len(pictures)


def read_with(tmp_path: Path, text: bytes, say: Callable[[Sample], str | None], **entry: Any) -> dict[str, Any]:
    """evaluate on text-only rows as they are in the file, by an engine without a model."""
    folder = tmp_path / "set"
    folder.mkdir(exist_ok=True)
    (tmp_path / "source").mkdir(exist_ok=True)
    (folder / "manifest.jsonl").write_bytes(text)
    data = [{"name": "set", "path": str(folder), "task": "ocr", **entry}]
    given = sections(tmp_path / "source", folder, tmp_path / "out")
    given["evaluate"]["data"] = data
    result = evaluate_with(lambda _: FakeEngine(say), load_recipe(given))
    return dict(result.to_json()["results"][0])


LINES = json.dumps(row("a", answers=["été"]), ensure_ascii=False) + "\n" + json.dumps(row("b")) + "\n"


@pytest.mark.parametrize("text", [LINES, "\ufeff" + LINES, LINES.replace("\n", "\r\n"), "\n\n" + LINES + "\n \n"])
def test_13_marks_line_ends_and_blank_lines_do_not_change_the_result(tmp_path: Path, text: str) -> None:
    found = read_with(tmp_path, text.encode(), lambda sample: "e\u0301te\u0301" if sample.id == "a" else "x")
    assert found["metrics"][0]["candidate"] == 1.0


@pytest.mark.parametrize("command", [evaluate, calibrate])
@pytest.mark.parametrize("ids", [("1", "1"), (1, "1")])
def test_14_equal_ids_are_refused_before_any_work_by_both_commands(model: Path, tmp_path: Path, command: Any, ids: tuple[Any, Any]) -> None:
    folder = tmp_path / "set"
    folder.mkdir()
    rows = [{**row("x"), "id": id} for id in ids]
    (folder / "manifest.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows), encoding="utf-8")
    with pytest.raises(UsageError, match=r"manifest\.jsonl:1 and line 2: both have the id '1'"):
        command(recipe(model, folder, tmp_path / "out"))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("gold", "said", "cer", "exact"), [("", "", None, 1.0), ("", "abc", None, 0.0), ("abc", "", 1.0, 0.0), ("  ", "abc", None, 0.0)]
)
def test_15_empty_references_follow_one_rule_and_leave_valid_json(tmp_path: Path, gold: str, said: str, cer: float | None, exact: float) -> None:
    found = read_with(tmp_path, (json.dumps(row("a", answers=[gold])) + "\n").encode(), lambda _: said)
    by_name = {metric["metric"]: metric["candidate"] for metric in found["metrics"]}
    assert (by_name["cer"], by_name["exact_match"]) == (cer, exact)
    assert found["sets"][0]["n_empty_ref"] == int(not gold.strip())
    json.dumps(found, allow_nan=False)


def test_17_unparsed_choices_are_counted_apart_and_never_guessed(tmp_path: Path) -> None:
    rows = [row(id, answers=["B"], choices=["a cat", "a dog"]) for id in "abc"]
    said = {"a": "Based on the picture, the answer is (B)", "b": "The animal barks", "c": "A cat"}
    text = b"".join(json.dumps(each).encode() + b"\n" for each in rows)
    found = read_with(tmp_path, text, lambda sample: said[sample.id], task="choice")
    assert found["metrics"][0]["candidate"] == pytest.approx(1 / 3)
    assert found["sets"][0]["candidate"]["n_unparsed"] == 1


def test_19_the_share_that_ran_into_the_limit_is_told(tmp_path: Path) -> None:
    found = read_with(tmp_path, LINES.encode(), lambda _: "la la la la", max_new_tokens=4)
    assert found["sets"][0]["candidate"]["n_truncated"] == 2
