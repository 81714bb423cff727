"""On the trained checkpoint, float32 torch and ONNX give equal token ids: per item, in any batch, order and history."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from qvlopt.data.samples import read_samples
from qvlopt.model.source import open_source
from qvlopt.recipe.shipped import builtin
from qvlopt.runtime.engine import Answer, Prepared
from qvlopt.runtime.onnx_engine import OnnxEngine
from qvlopt.runtime.torch_engine import TorchEngine
from tests.tiny_onnx import build_onnx

ITEMS = 60
NEW = 32


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> tuple[TorchEngine, OnnxEngine]:
    artifact = build_onnx("builtin:nano", tmp_path_factory.mktemp("nano") / "onnx")
    source = open_source("builtin:nano", folder=Path.cwd())
    return TorchEngine.open(source, dtype=torch.float32, device="cpu"), OnnxEngine.open(artifact, threads=1)


@pytest.fixture(scope="module")
def prepared(engines: tuple[TorchEngine, OnnxEngine]) -> list[Prepared]:
    samples = read_samples(builtin("builtin:nano-eval", "calib"), limit=ITEMS, seed=0).samples
    assert {sample.task for sample in samples} == {"ocr", "vqa", "doc"}
    return [engines[0].prepare(sample) for sample in samples]


@pytest.fixture(scope="module")
def expected(engines: tuple[TorchEngine, OnnxEngine], prepared: list[Prepared]) -> list[Answer]:
    """Torch, one item at a time."""
    answers = [answer for item in prepared for answer in engines[0].generate([item], max_new_tokens=NEW)]
    assert len({answer.text for answer in answers}) > ITEMS / 3  # it reads, it does not babble
    return answers


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 7, ITEMS])
def test_both_engines_answer_alike_in_batches_of_any_size(
    engines: tuple[TorchEngine, OnnxEngine], prepared: list[Prepared], expected: list[Answer], batch: int
) -> None:
    for engine in engines:
        parts = [prepared[at : at + batch] for at in range(0, ITEMS, batch)]
        assert [answer for part in parts for answer in engine.generate(part, max_new_tokens=NEW)] == expected


def test_order_and_history_change_nothing(engines: tuple[TorchEngine, OnnxEngine], prepared: list[Prepared], expected: list[Answer]) -> None:
    order = torch.randperm(ITEMS, generator=torch.Generator().manual_seed(1)).tolist()
    for engine in engines:
        answers = engine.generate([prepared[index] for index in order], max_new_tokens=NEW)
        assert answers == [expected[index] for index in order]


def test_features_are_within_1e_4(engines: tuple[TorchEngine, OnnxEngine], prepared: list[Prepared]) -> None:
    for item in prepared[:20]:
        theirs, ours = (engine.encode(item.pictures[0]) for engine in engines)
        for a, b in zip(ours, theirs, strict=True):
            assert (a - b).norm() < 1e-4 * b.norm()
