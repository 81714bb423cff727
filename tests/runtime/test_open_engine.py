"""The recipe chooses engine, device and dtype, and is refused clearly where this version or machine has none."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from qvlopt.errors import RunError
from qvlopt.recipe.load import LoadedRecipe, load_recipe
from qvlopt.runtime import open_engine
from tests.tiny import build_tiny
from tests.tiny_onnx import build_onnx


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    """Opening an engine sets torch's threads; other tests keep theirs."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="module")
def onnx(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_onnx(tiny, tmp_path_factory.mktemp("onnx") / "out")


def recipe(tiny: Path, **changes: Any) -> LoadedRecipe:
    return load_recipe({"version": 1, "name": "test", "model": {"path": str(tiny)}, "output": "out", "seed": 0, **changes})


@pytest.mark.parametrize(("asked", "dtype"), [("auto", torch.float32), ("float32", torch.float32), ("bfloat16", torch.bfloat16)])
def test_on_the_cpu_auto_is_float32(tiny: Path, asked: str, dtype: torch.dtype) -> None:
    engine = open_engine(str(tiny), loaded=recipe(tiny, hardware={"device": "cpu", "threads": 1}, evaluate={"dtype": asked}))
    assert engine.model.dtype == dtype
    assert engine.fingerprint["device"] == "cpu"
    assert torch.get_num_threads() == 1


def test_a_gpu_that_is_not_there_is_an_error_of_the_run(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RunError, match="torch sees no GPU") as error:
        open_engine(str(tiny), loaded=recipe(tiny, hardware={"device": "cuda"}))
    assert error.value.exit_code == 5
    assert open_engine(str(tiny), loaded=recipe(tiny, hardware={"device": "auto", "threads": 1})).model.device.type == "cpu"


def test_an_onnx_artifact_is_answered_by_onnxruntime_and_a_checkpoint_by_torch(tiny: Path, onnx: Path) -> None:
    for asked, path, name in (("auto", onnx, "onnx"), ("onnx", onnx, "onnx"), ("auto", tiny, "torch"), ("torch", tiny, "torch")):
        engine = open_engine(str(path), loaded=recipe(tiny, evaluate={"engine": asked}, hardware={"threads": 1}))
        assert engine.fingerprint["engine"] == name
        assert engine.fingerprint["threads"] == 1


def test_what_is_there_decides_as_a_base_may_need_another_engine(tiny: Path, onnx: Path) -> None:
    for asked, path, name in (("torch", onnx, "onnx"), ("onnx", tiny, "torch")):
        engine = open_engine(str(path), loaded=recipe(tiny, evaluate={"engine": asked}, hardware={"threads": 1}))
        assert engine.fingerprint["engine"] == name


def test_an_onnx_artifact_runs_on_no_gpu_and_says_so(tiny: Path, onnx: Path) -> None:
    with pytest.raises(RunError, match="runs on the CPU only"):
        open_engine(str(onnx), loaded=recipe(tiny, hardware={"device": "cuda"}))


def test_the_recipes_limits_and_threads_reach_onnxruntime(tiny: Path, onnx: Path) -> None:
    engine = open_engine(str(onnx), loaded=recipe(tiny, pixels={"min": 2048, "max": 8192}, hardware={"threads": 1}))
    assert engine.fingerprint["pixels"] == {"min": 2048, "max": 8192}


def test_pixel_limits_of_the_recipe_are_the_engines(tiny: Path) -> None:
    engine = open_engine(str(tiny), loaded=recipe(tiny, pixels={"min": 2048, "max": 8192}, hardware={"threads": 1}))
    assert (engine.processor.min_pixels, engine.processor.max_pixels) == (2048, 8192)
