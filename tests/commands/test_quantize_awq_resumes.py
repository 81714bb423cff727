"""quantize-awq that is killed, interrupted or runs out of disk: finished stages are kept, and the artifact ends up the same."""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from qvlopt.artifact import unfinished
from qvlopt.artifact.manifest import read_manifest, verify_files
from qvlopt.commands import awq_stages, self_check
from qvlopt.commands import quantize_awq as module
from qvlopt.commands.calibrate import calibrate
from qvlopt.commands.quantize_awq import QuantizeResult, quantize_awq
from qvlopt.errors import RunError, UsageError
from qvlopt.model.quantize_tower import TowerQuantizer
from tests.tiny_run import PLAIN, listing, tiny_recipe

STAGES = ("blocks.0", "blocks.1", "deepstack_merger_list.0", "merger")
PART = ".awq.part"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, model: Path, data: Path) -> dict[str, bytes]:
    """The files of an artifact that was made in one go."""
    return files(quantised(model, data, tmp_path_factory.mktemp("whole")).output)


def quantised(model: Path, data: Path, output: Path, *, overwrite: bool = False, **section: Any) -> QuantizeResult:
    result = quantize_awq(tiny_recipe(model, data, output, quantize_awq=section), overwrite=overwrite)
    assert isinstance(result, QuantizeResult)
    return result


def files(folder: Path) -> dict[str, bytes]:
    """All but the manifest, which holds seconds and paths."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "qvlopt.json"}


class Killed(BaseException):
    """Ends a run at once, as a signal would."""


def die_in(stage: str, monkeypatch: pytest.MonkeyPatch, error: BaseException) -> list[str]:
    """Makes the quantiser raise in that stage, and returns the list of stages that it is asked for."""
    real, asked = TowerQuantizer.quantized, []

    def quantized(self: TowerQuantizer, this: Any, grams: Any) -> Any:
        asked.append(this.name)
        if this.name == stage:
            raise error
        return real(self, this, grams)

    monkeypatch.setattr(TowerQuantizer, "quantized", quantized)
    return asked


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("error", [KeyboardInterrupt(), Killed(), OSError(28, "No space left on device")], ids=lambda e: type(e).__name__)
def test_a_run_that_ends_in_any_stage_goes_on_after_the_last_finished_one(
    model: Path, data: Path, tmp_path: Path, whole: dict[str, bytes], monkeypatch: pytest.MonkeyPatch, stage: str, error: BaseException
) -> None:
    with monkeypatch.context() as patched:
        die_in(stage, patched, error)
        with pytest.raises((KeyboardInterrupt, Killed, RunError)):
            quantised(model, data, tmp_path)
    assert os.listdir(tmp_path) == [PART]
    asked = die_in("none", monkeypatch, error)
    result = quantised(model, data, tmp_path)
    assert asked == list(STAGES[STAGES.index(stage) :])
    assert files(result.output) == whole
    assert os.listdir(tmp_path) == ["awq"]
    manifest, expected = read_manifest(result.output), read_manifest(quantised(model, data, tmp_path / "again").output)
    assert (manifest.layers, manifest.coverage, manifest.digest) == (expected.layers, expected.coverage, expected.digest)


@pytest.mark.parametrize("step", ["write_rewritten", "self_check", "awq_card", "write_manifest"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError("bug"), OSError(28, "No space left on device")], ids=repr)
def test_whatever_breaks_off_after_the_last_stage_leaves_the_finished_stages_only(
    model: Path, data: Path, tmp_path: Path, whole: dict[str, bytes], monkeypatch: pytest.MonkeyPatch, step: str, error: BaseException
) -> None:
    real = getattr(module, step)

    def broken(*args: Any, **how: Any) -> None:
        real(*args, **how)
        assert any(path.name.startswith(".awq.tmp-") for path in tmp_path.iterdir())
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(module, step, broken)
        with pytest.raises((KeyboardInterrupt, RuntimeError, RunError)):
            quantised(model, data, tmp_path)
    assert os.listdir(tmp_path) == [PART]
    asked = die_in("none", monkeypatch, Killed())
    assert files(quantised(model, data, tmp_path).output) == whole
    assert asked == []
    assert os.listdir(tmp_path) == ["awq"]


def test_the_rename_that_fails_leaves_the_finished_stages_only(model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_self: Path, _target: Path) -> Path:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", refuse)
        with pytest.raises(KeyboardInterrupt):
            quantised(model, data, tmp_path, search=PLAIN)
    assert os.listdir(tmp_path) == [PART]


def test_an_error_of_the_inputs_keeps_nothing(model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    die_in("merger", monkeypatch, RunError("the loss is worse"))
    with pytest.raises(RunError):
        quantised(model, data, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_interrupt_while_overwriting_leaves_the_old_artifact_and_goes_on(
    model: Path, data: Path, tmp_path: Path, whole: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    quantised(model, data, tmp_path, search=PLAIN)
    before = listing(tmp_path / "awq")
    with monkeypatch.context() as patched:
        die_in("blocks.1", patched, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            quantised(model, data, tmp_path, overwrite=True)
    assert listing(tmp_path / "awq") == before
    asked = die_in("none", monkeypatch, Killed())
    assert files(quantised(model, data, tmp_path, overwrite=True).output) == whole
    assert asked == list(STAGES[1:])


def interrupted(model: Path, data: Path, output: Path, monkeypatch: pytest.MonkeyPatch, **section: Any) -> None:
    with monkeypatch.context() as patched:
        die_in("blocks.1", patched, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            quantised(model, data, output, **section)


def test_unfinished_work_on_another_result_is_refused_and_overwriting_drops_it(
    model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupted(model, data, tmp_path, monkeypatch)
    before = listing(tmp_path)
    with pytest.raises(UsageError, match=r"\.awq\.part holds unfinished work on another result.*--overwrite") as refused:
        quantised(model, data, tmp_path, search=PLAIN)
    assert refused.value.exit_code == 2
    assert listing(tmp_path) == before
    asked = die_in("none", monkeypatch, Killed())
    assert quantised(model, data, tmp_path, search=PLAIN, overwrite=True).output.is_dir()
    assert asked == list(STAGES)
    assert os.listdir(tmp_path) == ["awq"]


def test_work_under_other_conditions_is_done_again(
    model: Path, data: Path, tmp_path: Path, whole: dict[str, bytes], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    interrupted(model, data, tmp_path, monkeypatch)
    head = tmp_path / PART / unfinished.HEAD
    fields = json.loads(head.read_text())
    fields["conditions"]["threads"] = "64"
    head.write_text(json.dumps(fields))
    asked = die_in("none", monkeypatch, Killed())
    with caplog.at_level(logging.WARNING):
        assert files(quantised(model, data, tmp_path).output) == whole
    assert any("threads 64, now 1" in message for message in caplog.messages)
    assert asked == list(STAGES)


@pytest.mark.parametrize("damage", ["cut", "gone", "record"])
def test_a_stage_whose_file_was_damaged_is_done_again(
    model: Path, data: Path, tmp_path: Path, whole: dict[str, bytes], monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    interrupted(model, data, tmp_path, monkeypatch)
    file, record = tmp_path / PART / "blocks.0.safetensors", tmp_path / PART / "stage-blocks.0.json"
    if damage == "cut":
        os.truncate(file, file.stat().st_size - 4)
    elif damage == "gone":
        file.unlink()
    else:
        record.write_text(record.read_text()[:-20])
    asked = die_in("none", monkeypatch, Killed())
    assert files(quantised(model, data, tmp_path).output) == whole
    assert asked == list(STAGES)


@pytest.mark.parametrize("kind", ["file", "link", "foreign"])
def test_what_is_not_ours_is_neither_used_nor_removed(model: Path, data: Path, tmp_path: Path, kind: str) -> None:
    place, elsewhere = tmp_path / PART, tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "mine").touch()
    if kind == "file":
        place.touch()
    elif kind == "link":
        place.symlink_to(elsewhere)
    else:
        shutil.copytree(elsewhere, place)
    with pytest.raises(UsageError, match=r"\.awq\.part is in the way"):
        quantised(model, data, tmp_path, overwrite=True)
    assert (elsewhere / "mine").exists()
    assert os.path.lexists(place)
    assert not (tmp_path / "awq").exists()


def test_parts_that_a_kill_left_beside_the_finished_artifact_go_at_the_next_run(model: Path, data: Path, tmp_path: Path) -> None:
    result = quantised(model, data, tmp_path, search=PLAIN)
    (tmp_path / PART).mkdir()
    (tmp_path / PART / unfinished.HEAD).write_text(json.dumps({"digest": read_manifest(result.output).digest}))
    assert quantised(model, data, tmp_path, search=PLAIN).existed
    assert verify_files(result.output) == []
    assert os.listdir(tmp_path) == ["awq"]


def test_statistics_of_calibrate_and_those_on_the_way_give_the_same_bytes(
    model: Path, data: Path, tmp_path: Path, whole: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    calibrate(tiny_recipe(model, data, tmp_path))
    monkeypatch.setattr(awq_stages, "captured", None)
    result = quantised(model, data, tmp_path)
    assert files(result.output) == whole
    assert sorted(os.listdir(tmp_path)) == ["awq", "calibrate"]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_a_process_that_is_really_killed_goes_on(model: Path, data: Path, tmp_path: Path, whole: dict[str, bytes], number: signal.Signals) -> None:
    script = f"""
import os, signal
from pathlib import Path
from qvlopt.model.quantize_tower import TowerQuantizer
from qvlopt.__main__ import main
real = TowerQuantizer.quantized
def quantized(self, stage, grams):
    if stage.name == "blocks.1":
        os.kill(os.getpid(), {int(number)})
    return real(self, stage, grams)
TowerQuantizer.quantized = quantized
main()
"""
    recipe = tmp_path / "r.yaml"
    recipe.write_text(
        json.dumps(
            tiny_recipe(model, data, tmp_path / "out").recipe.model_dump(mode="json", include={"name", "model", "output", "hardware", "calibrate"})
        )
    )
    words = ["quantize-awq", "--recipe", str(recipe), "--set", "quantize_awq.group_size=64", "--set", "quantize_awq.search.grid=2"]
    done = subprocess.run([sys.executable, "-c", script, *words], capture_output=True, text=True, check=False)
    assert done.returncode == (-9 if number == signal.SIGKILL else 130)
    if number != signal.SIGKILL:
        assert "finished work is kept" in done.stderr
        assert "quantize-awq --resume" in done.stderr
    assert PART in os.listdir(tmp_path / "out")
    again = subprocess.run([sys.executable, "-m", "qvlopt", *words, "--resume"], capture_output=True, text=True, check=False)
    assert again.returncode == 0, again.stderr
    made = files(tmp_path / "out" / "awq")
    assert "--recipe r.yaml --set quantize_awq.group_size=64 --set quantize_awq.search.grid=2" in made["README.md"].decode()
    assert made | {"README.md": b""} == whole | {"README.md": b""}  # the card names the command
    assert os.listdir(tmp_path / "out") == ["awq"]


def test_the_check_reads_one_stage_at_a_time(model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from qvlopt.model import stage_forward

    read: list[tuple[str, ...]] = []
    real = stage_forward.load_vision_part

    def noted(source: Any, prefixes: tuple[str, ...], **how: Any) -> Any:
        read.append(prefixes)
        return real(source, prefixes, **how)

    monkeypatch.setattr(stage_forward, "load_vision_part", noted)
    result = quantised(model, data, tmp_path, search=PLAIN)
    assert self_check.CHECK_PICTURES == 2
    assert result.check.passed
    assert all(prefixes == stage_forward.EMBEDDING_PARTS or prefixes[0].rstrip(".") in STAGES for prefixes in read)
