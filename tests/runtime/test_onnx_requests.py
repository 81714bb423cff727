"""Many mixed requests: memory stays flat and every answer is the one that its request gets alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qvlopt.data.samples import Sample
from qvlopt.errors import ItemError
from qvlopt.runtime.engine import Answer
from qvlopt.runtime.onnx_engine import OnnxEngine
from qvlopt.runtime.picture_cache import PictureCache
from qvlopt.runtime.prompt_cache import PromptCache
from tests.asked import samples_in
from tests.tiny import build_tiny
from tests.tiny_onnx import build_onnx

REQUESTS = 100
SIZES = ((64, 64), (96, 64), (33, 200), (160, 96), (26, 28), (128, 128), (8, 1608))
"""The last one is longer than 200 times its width: that request fails."""
QUESTIONS = ("What is it?", "Read.", "How many shapes are there in this picture, and which?")
PICTURES_BYTES, PROMPTS_BYTES = 100_000, 300_000


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("requests")
    return build_onnx(build_tiny(folder / "model", tied=False, seed=3), folder / "onnx")


def requests_in(folder: Path) -> list[Sample]:
    """Pictures of every size asked about again and again, some texts without any, one file that is no picture."""
    asked = samples_in(folder, [(QUESTIONS[0], SIZES)])[0]
    (folder / "broken.png").write_bytes(b"no picture")
    broken = samples_in(folder, [(QUESTIONS[0], [(64, 64)])])[0].images[0]
    images = (*asked.images, type(broken)("broken.png", folder, "broken"))
    random = np.random.default_rng(5)
    samples = []
    for number in range(REQUESTS):
        shown = [images[index] for index in random.integers(0, len(images), random.choice([0, 1, 1, 1, 1, 2]))]
        question = str(random.choice(QUESTIONS))
        samples.append(Sample(f"r{number}", tuple(shown), question, ("x",), "vqa", "c", f"manifest.jsonl:{number + 1}"))
    return samples


def opened(artifact: Path, **limits: int) -> OnnxEngine:
    caches: dict[str, Any] = {"pictures": PictureCache(limits["pictures"]), "prompts": PromptCache(limits["prompts"])}
    return OnnxEngine.open(artifact, threads=1, **caches)


def asked(engine: OnnxEngine, sample: Sample) -> Answer | str:
    try:
        return engine.generate([engine.prepare(sample)], max_new_tokens=6)[0]
    except ItemError as error:
        return error.reason


def test_a_hundred_mixed_requests_hold_memory_flat_and_are_answered_as_one_by_one(artifact: Path, tmp_path: Path) -> None:
    samples = requests_in(tmp_path)
    cold = opened(artifact, pictures=0, prompts=0)
    expected = [asked(cold, sample) for sample in samples]
    engine = opened(artifact, pictures=PICTURES_BYTES, prompts=PROMPTS_BYTES)
    held = []
    for sample, answer in zip(samples, expected, strict=True):
        assert asked(engine, sample) == answer
        held.append((engine.pictures.memory.bytes, engine.prompts.memory.bytes, engine.model.language.kv.capacity))
    pictures, prompts, capacities = zip(*held, strict=True)
    assert PICTURES_BYTES / 2 < max(pictures) <= PICTURES_BYTES
    assert PROMPTS_BYTES / 2 < max(prompts) <= PROMPTS_BYTES
    assert set(capacities) == {512}
    assert engine.prompts.memory.hits > 5
    kinds = {type(answer) for answer in expected}
    assert kinds == {Answer, str}
    assert {"200", "broken.png"} <= {word for answer in expected if isinstance(answer, str) for word in ("200", "broken.png") if word in answer}
    assert len({answer.token_ids for answer in expected if isinstance(answer, Answer)}) > 20


def test_one_call_with_all_of_them_gives_the_same_answers(artifact: Path, tmp_path: Path) -> None:
    engine = opened(artifact, pictures=PICTURES_BYTES, prompts=PROMPTS_BYTES)
    prepared = []
    for sample in requests_in(tmp_path):
        try:
            prepared.append(engine.prepare(sample))
        except ItemError:
            continue
    together = engine.generate(prepared, max_new_tokens=6)
    cold = opened(artifact, pictures=0, prompts=0)
    assert together == [answer for item in prepared for answer in cold.generate([item], max_new_tokens=6)]
