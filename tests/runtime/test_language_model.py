"""Tokens one by one, in chunks or at once, in a small buffer or one that grew: the same logits, written in place."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from qvlopt.model.source import open_source
from qvlopt.runtime.kv_cache import STEP
from qvlopt.runtime.language_model import LanguageModel
from qvlopt.runtime.onnx_model import OnnxModel, load_onnx_model
from qvlopt.runtime.torch_engine import TorchEngine
from tests.tiny import build_tiny
from tests.tiny_onnx import build_onnx, with_twin

TOKENS = 40


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny(tmp_path_factory.mktemp("tiny") / "model", tied=False, seed=3)


@pytest.fixture(scope="module")
def artifact(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_onnx(checkpoint, tmp_path_factory.mktemp("onnx") / "out")


@pytest.fixture(scope="module")
def model(artifact: Path) -> OnnxModel:
    return load_onnx_model(artifact, threads=1)


def inputs(seed: int = 0, tokens: int = TOKENS) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Embeddings, positions of all three axes, DeepStack features of the first half."""
    random = np.random.default_rng(seed)
    deepstack = random.normal(size=(2, tokens, 128)).astype(np.float32)
    deepstack[:, tokens // 2 :] = 0
    return random.normal(size=(tokens, 128)).astype(np.float32), random.integers(0, 50, (3, tokens)), deepstack


def run(language: LanguageModel, chunks: Sequence[tuple[int, int]], tokens: int = TOKENS) -> np.ndarray:
    """Logits of every token."""
    embeds, positions, deepstack = inputs(tokens=tokens)
    language.kv.start(1)
    rows = [language.run(embeds[a:b], positions[:, a:b], deepstack[:, a:b], range(b - a)) for a, b in chunks]
    return np.concatenate(rows)


def close(got: np.ndarray, expected: np.ndarray) -> bool:
    return bool(np.abs(got - expected).max() < 1e-4 * np.abs(expected).max())


def test_logits_are_those_of_the_torch_model(model: OnnxModel, checkpoint: Path) -> None:
    embeds, positions, deepstack = (torch.from_numpy(array) for array in inputs())
    engine = TorchEngine.open(open_source(str(checkpoint), folder=checkpoint.parent), dtype=torch.float32, device="cpu")
    with torch.inference_mode():
        hidden = engine.model.text(
            inputs_embeds=embeds[None], position_ids=positions[:, None], visual_pos_masks=torch.arange(TOKENS)[None] < TOKENS // 2,
            deepstack_visual_embeds=list(deepstack[:, : TOKENS // 2]),
        ).last_hidden_state[0]  # fmt: skip
        expected = torch.nn.functional.linear(hidden, engine.model.head).numpy()
    assert close(run(model.language, [(0, TOKENS)]), expected)


@pytest.mark.parametrize("edges", [[0, 1, 2, 40], [0, 17, 18, 33, 40], [*range(41)]])
def test_chunks_of_any_size_give_the_logits_of_one_run(model: OnnxModel, edges: list[int]) -> None:
    whole = run(model.language, [(0, TOKENS)])
    assert close(run(model.language, list(itertools.pairwise(edges))), whole)
    assert model.language.kv.length == TOKENS


def test_only_the_asked_rows_have_logits_and_none_is_a_run_too(model: OnnxModel) -> None:
    embeds, positions, deepstack = inputs()
    whole = run(model.language, [(0, TOKENS)])
    model.language.kv.start(1)
    assert model.language.run(embeds[:30], positions[:, :30], deepstack[:, :30], []).shape == (0, model.language.shape.vocabulary)
    rest = model.language.run(embeds[30:], positions[:, 30:], None, [9, 2])
    assert close(rest, whole[[39, 32]])


def test_keys_and_values_are_written_into_the_one_buffer(model: OnnxModel) -> None:
    run(model.language, [(0, TOKENS)])
    kv = model.language.kv
    filled = kv.array[:, :, 0, :, :TOKENS].any(axis=-1)
    assert filled.all()
    before = kv.snapshot(TOKENS)
    model.language.step(inputs()[0][0], 50)
    assert np.array_equal(kv.snapshot(TOKENS + 1)[:, :, :, :, :TOKENS], before)
    assert kv.array[:, :, 0, :, TOKENS].any(axis=-1).all()


def test_a_snapshot_brings_back_the_state_to_the_bit_in_any_capacity(model: OnnxModel) -> None:
    embeds, positions, deepstack = inputs()
    language = model.language
    run(language, [(0, 25)])
    snapshot = language.kv.snapshot(25)
    expected = language.run(embeds[25:], positions[:, 25:], deepstack[:, 25:], range(15)).copy()
    run(language, [(0, 13)])  # something else in between
    for room in (1, 5 * STEP):
        language.kv.start(room)
        language.kv.restore(snapshot)
        assert np.array_equal(language.run(embeds[25:], positions[:, 25:], deepstack[:, 25:], range(15)), expected)


def test_the_buffer_grows_under_way_and_the_logits_do_not_notice(model: OnnxModel) -> None:
    """Over the first step of 512, by chunks and by single tokens."""
    tokens = STEP + 30
    embeds, positions, _ = inputs(tokens=tokens)
    language = model.language
    language.kv.start(1)
    language.kv._allocate(STEP)
    language.run(embeds[: STEP - 5], positions[:, : STEP - 5], None, [])
    for at in range(STEP - 5, STEP + 5):
        positions[:, at] = at
        stepped = language.step(embeds[at], at).copy()
    assert language.kv.capacity == 2 * STEP
    language.kv.start(tokens)
    expected = language.run(embeds[: STEP + 5], positions[:, : STEP + 5], None, [STEP + 4])[0]
    assert close(stepped, expected)


def test_what_an_earlier_sequence_left_behind_reaches_no_logit_not_even_nan(model: OnnxModel) -> None:
    expected = run(model.language, [(0, 20)])
    run(model.language, [(0, TOKENS)])
    model.language.kv.array[:] = np.nan
    assert np.array_equal(run(model.language, [(0, 20)]), expected)
    model.language.kv.array[:, :, :, :, 20:] = np.nan
    assert np.isfinite(model.language.step(inputs()[0][20], 20)).all()


def test_a_twin_for_single_steps_works_on_the_same_buffer(artifact: Path, tmp_path: Path, model: OnnxModel) -> None:
    twin = load_onnx_model(with_twin(artifact, tmp_path / "twin"), threads=1)
    assert (twin.language.has_twin, model.language.has_twin) == (True, False)
    assert twin.digest != model.digest
    assert twin.vision_digest == model.vision_digest
    embeds, positions, deepstack = inputs()
    answers = []
    for language in (model.language, twin.language):
        run(language, [(0, 30)])
        answers.append([language.step(embeds[at], at).copy() for at in range(30, 36)])
        answers.append([language.run(embeds[36:], positions[:, 36:], deepstack[:, 36:], range(4))])
    assert np.array_equal(answers[0], answers[2])
    assert np.array_equal(answers[1], answers[3])
