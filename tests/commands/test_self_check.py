"""The self-check sees what a broken artifact would do, before it gets its name."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from qvlopt.commands import quantize_awq as quantising
from qvlopt.commands.calibration_data import Asked
from qvlopt.commands.quantize_awq import quantize_awq
from qvlopt.commands.self_check import self_check
from qvlopt.errors import RunError
from qvlopt.model.rewrite import Rewrite, write_rewritten
from tests.tiny import build_tiny
from tests.tiny_run import PLAIN, SMALL, build_set, stored, tiny_recipe, with_first_value

LINEAR = "model.visual.blocks.0.mlp.linear_fc1"


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> Asked:
    root = tmp_path_factory.mktemp("check")
    return Asked.by(tiny_recipe(build_tiny(root / "tiny", **SMALL), build_set(root / "set"), root / "out"))


def written(asked: Asked, folder: Path, rewrite: Rewrite) -> Path:
    folder.mkdir()
    write_rewritten(folder, asked.source, rewrite)
    return folder


def scaled(asked: Asked, factor: float) -> Rewrite:
    name = "model.visual.merger.linear_fc2.weight"
    return Rewrite(added={name: (stored(asked.source.folder)[name].float() * factor).bfloat16()})


def test_an_unchanged_tower_is_off_by_nothing(asked: Asked, tmp_path: Path) -> None:
    check = self_check(written(asked, tmp_path / "a", Rewrite()), asked, Rewrite(), expected=(), found=())
    assert (check.passed, check.worst) == (True, 0.0)
    assert check.detail.startswith(f"read back {len(stored(asked.source.folder))} tensors: 0 as meant")
    assert "byte-identical to the source" in check.detail


def test_worst_is_the_largest_error_of_the_towers_outputs(asked: Asked, tmp_path: Path) -> None:
    rewrite = scaled(asked, 1.25)
    check = self_check(written(asked, tmp_path / "a", rewrite), asked, rewrite, expected=(LINEAR,), found=(LINEAR,))
    assert check.worst == pytest.approx(0.25, abs=0.02)  # biases are not scaled
    assert "(merged, 2 pictures)" in check.detail


def test_a_cast_is_told(asked: Asked, tmp_path: Path) -> None:
    rewrite = Rewrite(cast=torch.float16)
    check = self_check(written(asked, tmp_path / "a", rewrite), asked, rewrite, expected=(), found=())
    assert "the source's values as float16" in check.detail


@pytest.mark.parametrize("found", [(), (LINEAR, "model.visual.merger.linear_fc1")])
def test_a_linear_that_was_left_out_or_added_is_named(asked: Asked, tmp_path: Path, found: tuple[str, ...]) -> None:
    with pytest.raises(RunError, match=r"model\.visual\..*linear_fc1 was not treated as asked"):
        self_check(written(asked, tmp_path / "a", Rewrite()), asked, Rewrite(), expected=(LINEAR,), found=found)


def test_a_change_outside_the_tower_is_named(asked: Asked, tmp_path: Path) -> None:
    name = "model.language_model.norm.weight"
    rewrite = Rewrite(added={name: torch.ones(64).bfloat16()})
    with pytest.raises(RunError, match=rf"{name} lies outside the scope"):
        self_check(written(asked, tmp_path / "a", rewrite), asked, rewrite, expected=(), found=())


def test_a_tower_that_sees_nothing_any_more_is_refused(asked: Asked, tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"the reloaded tower's .* is off by \d+% \(use more bits or smaller groups\)"):
        self_check(written(asked, tmp_path / "a", scaled(asked, 3)), asked, scaled(asked, 3), expected=(LINEAR,), found=(LINEAR,))


def flipped(folder: Path) -> None:
    with_first_value(folder, {f"{LINEAR}.scales": 0.5})


def cut(folder: Path) -> None:
    path = folder / "model.safetensors"
    os.truncate(path, path.stat().st_size - 8)


def unsaid(folder: Path) -> None:
    (folder / "config.json").write_text((folder / "config.json").read_text().replace('"quantization_config"', '"lost"'))


@pytest.mark.parametrize("damage", [flipped, cut, unsaid], ids=lambda damage: damage.__name__)
def test_damage_on_the_way_to_the_disk_stops_the_run_and_leaves_no_artifact(
    asked: Asked, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: Callable[[Path], None]
) -> None:
    def write_then_damage(folder: Path, *rest: Any) -> None:
        write_rewritten(folder, *rest)
        damage(folder)

    monkeypatch.setattr(quantising, "write_rewritten", write_then_damage)
    data = asked.loaded.recipe.calibrate.data
    with pytest.raises(RunError):
        quantize_awq(tiny_recipe(asked.source.folder, Path(data), tmp_path, quantize_awq={"search": PLAIN}))
    assert os.listdir(tmp_path) == []
