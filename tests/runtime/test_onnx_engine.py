"""The ONNX engine answers as torch does, and neither its caches nor what came before change a bit of an answer."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from onnxruntime.capi import onnxruntime_pybind11_state as states

from qvlopt.data.samples import Sample
from qvlopt.errors import ItemError, RunError
from qvlopt.model.source import open_source
from qvlopt.recipe.schema import PixelLimits
from qvlopt.runtime import byte_cache
from qvlopt.runtime.engine import Answer, LocalEngine, Prepared, Stage
from qvlopt.runtime.onnx_engine import OnnxEngine
from qvlopt.runtime.picture_cache import PictureCache
from qvlopt.runtime.prompt_cache import PromptCache
from qvlopt.runtime.sampling import Sampling
from qvlopt.runtime.torch_engine import TorchEngine
from qvlopt.runtime.vision_encoder import PictureFeatures, VisionEncoder
from tests.asked import NEW, one_by_one, prepared_in, samples_in
from tests.tiny import build_tiny
from tests.tiny_onnx import build_onnx, with_twin

MANY = 64 << 20
FOLLOWING = (("What is it?", [(64, 64)]), ("And what else is in it, if anything?", [(64, 64)]), ("Two: <image><image> why?", [(64, 64), (96, 64)]))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny(tmp_path_factory.mktemp("tiny") / "model", tied=False, seed=3)


@pytest.fixture(scope="module")
def artifact(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_onnx(checkpoint, tmp_path_factory.mktemp("onnx") / "out")


@pytest.fixture(scope="module")
def torch_engine(checkpoint: Path) -> TorchEngine:
    return TorchEngine.open(open_source(str(checkpoint), folder=checkpoint.parent), dtype=torch.float32, device="cpu")


@pytest.fixture
def engine(artifact: Path) -> OnnxEngine:
    """Cold: nothing seen yet."""
    return opened(artifact)


@pytest.fixture
def folder(artifact: Path, tmp_path: Path) -> Path:
    """A copy of the artifact that a test may change."""
    return Path(shutil.copytree(artifact, tmp_path / "copy"))


def opened(folder: Path, **more: Any) -> OnnxEngine:
    caches = {"pictures": PictureCache(MANY), "prompts": PromptCache(MANY)}
    return OnnxEngine.open(folder, threads=1, **{**caches, **more})


def uncached(folder: Path) -> OnnxEngine:
    return opened(folder, pictures=PictureCache(0), prompts=PromptCache(0))


def sharing(engine: LocalEngine, folder: Path) -> list[Prepared]:
    """Three prompts on one picture, the third with another one behind it."""
    first, second, third = samples_in(folder, FOLLOWING)
    image = first.images[0]
    changed = [first, Sample(second.id, (image,), *_rest(second)), Sample(third.id, (image, third.images[1]), *_rest(third))]
    return [engine.prepare(sample) for sample in changed]


def _rest(sample: Sample) -> tuple[str, tuple[str, ...], str, str, str]:
    return sample.question, sample.answers, sample.task, sample.cluster, sample.origin


def change_json(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


def counted(monkeypatch: pytest.MonkeyPatch, engine: OnnxEngine) -> dict[str, list[int]]:
    """Patches of every picture encoded and tokens of every run of the language model, as they come."""
    seen: dict[str, list[int]] = {"vision": [], "tokens": []}
    encode, run = VisionEncoder.encode, engine.model.language.run

    def encoding(self: VisionEncoder, picture: Any) -> PictureFeatures:
        seen["vision"].append(len(picture.pixel_values))
        return encode(self, picture)

    def running(embeds: np.ndarray, *rest: Any) -> np.ndarray:
        seen["tokens"].append(len(embeds))
        return run(embeds, *rest)

    monkeypatch.setattr(VisionEncoder, "encode", encoding)
    monkeypatch.setattr(engine.model.language, "run", running)
    return seen


def test_answers_are_those_of_torch_with_and_without_caches(engine: OnnxEngine, torch_engine: TorchEngine, artifact: Path, tmp_path: Path) -> None:
    expected = torch_engine.generate(prepared_in(torch_engine, tmp_path), max_new_tokens=NEW)
    prepared = prepared_in(engine, tmp_path)
    assert engine.generate(prepared, max_new_tokens=NEW) == expected
    assert engine.generate(prepared, max_new_tokens=NEW) == expected
    assert one_by_one(uncached(artifact), prepared[::-1])[::-1] == expected
    assert all(len(set(answer.token_ids)) > 3 for answer in expected)


def test_features_and_forced_logits_are_those_of_torch(engine: OnnxEngine, torch_engine: TorchEngine, tmp_path: Path) -> None:
    for item in prepared_in(torch_engine, tmp_path):
        for picture in item.pictures:
            got, expected = engine.encode(picture), torch_engine.encode(picture)
            for mine, theirs in zip(got, expected, strict=True):
                assert mine.shape == theirs.shape
                assert (mine - theirs).norm() < 1e-4 * theirs.norm()
        answer = torch_engine.generate([item], max_new_tokens=NEW)[0].token_ids
        scored = engine.score(item, answer)
        assert (scored.id, scored.answer_ids) == (item.id, answer)
        assert scored.logits.argmax(dim=-1).tolist() == list(answer)
        assert (scored.logits - torch_engine.score(item, answer).logits).abs().max() < 1e-4


def test_a_second_question_on_a_picture_costs_only_its_new_tokens(
    engine: OnnxEngine, artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared = sharing(engine, tmp_path)
    cold = [one_by_one(uncached(artifact), [item])[0] for item in prepared]
    seen = counted(monkeypatch, engine)
    answers = []
    for item in prepared:
        answers.append(engine.generate([item], max_new_tokens=NEW)[0])
        seen["vision"].append(0)
        seen["tokens"].append(0)
    assert answers == cold
    ends = [len(item.token_ids) - item.token_ids[::-1].index(engine.prompter.image_token_id) for item in prepared]
    assert seen["vision"] == [16, 0, 0, 24, 0]
    first, second, third = (len(item.token_ids) for item in prepared)
    start = ends[0]  # where the shared beginning ends; the third question begins otherwise
    assert seen["tokens"] == [start, first - start, 0, second - start, 0, *seen["tokens"][5:]]
    assert sum(seen["tokens"][5:]) == third


def test_a_prompt_with_another_picture_behind_a_known_one_goes_on_from_there(
    engine: OnnxEngine, artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = prepared_in(engine, tmp_path, [("Why?", [(64, 64)])])[0]
    sample = samples_in(tmp_path, [("Why?", [(64, 64), (96, 64)])])[0]
    two = engine.prepare(Sample("two", sample.images, *_rest(sample)))
    assert two.pictures[0] is one.pictures[0]
    engine.generate([one], max_new_tokens=NEW)
    seen = counted(monkeypatch, engine)
    assert engine.generate([two], max_new_tokens=NEW) == one_by_one(uncached(artifact), [two])
    assert seen["vision"][0] == 24
    assert sum(seen["tokens"]) < 2 * len(two.token_ids) - 4


def test_warm_logits_are_cold_logits_to_the_bit(engine: OnnxEngine, artifact: Path, tmp_path: Path) -> None:
    for item in sharing(engine, tmp_path):
        answer = tuple(range(40, 60))
        cold = uncached(artifact).score(item, answer).logits
        for _ in range(2):
            assert torch.equal(engine.score(item, answer).logits, cold)
    assert engine.prompts.memory.hits >= 3


def test_another_picture_of_equal_size_and_question_is_never_served(engine: OnnxEngine, artifact: Path, tmp_path: Path) -> None:
    asked = [("What is it?", [(64, 64)])] * 4
    prepared = prepared_in(engine, tmp_path, asked)
    expected = one_by_one(uncached(artifact), prepared)
    assert len({answer.token_ids for answer in expected}) == 4
    assert one_by_one(engine, prepared * 2) == expected * 2


def test_the_same_bytes_in_another_shape_are_another_picture(engine: OnnxEngine, artifact: Path, tmp_path: Path) -> None:
    wide, tall = prepared_in(engine, tmp_path, [("What is it?", [(128, 64)]), ("What is it?", [(64, 128)])])
    tall.pictures[0].pixel_values[:] = wide.pictures[0].pixel_values
    assert wide.token_ids == tall.token_ids
    expected = one_by_one(uncached(artifact), [wide, tall])
    assert expected[0].token_ids != expected[1].token_ids
    assert one_by_one(engine, [wide, tall, wide, tall]) == expected * 2


def test_models_that_share_caches_never_get_each_others_features(artifact: Path, tmp_path: Path) -> None:
    other = build_onnx(build_tiny(tmp_path / "model", tied=False, seed=4), tmp_path / "onnx")
    shared = {"pictures": PictureCache(MANY, folder=tmp_path / "cache"), "prompts": PromptCache(MANY)}
    engines = [opened(artifact, **shared), opened(other, **shared)]
    prepared = prepared_in(engines[0], tmp_path)
    expected = [one_by_one(uncached(folder), prepared) for folder in (artifact, other)]
    assert expected[0] != expected[1]
    assert [engine.generate(prepared, max_new_tokens=NEW) for engine in engines * 2] == expected * 2


def test_another_pixel_limit_is_another_picture(artifact: Path, tmp_path: Path) -> None:
    shared = {"pictures": PictureCache(MANY), "prompts": PromptCache(MANY)}
    limits = [None, PixelLimits(min=1024, max=2048), PixelLimits(min=1024, max=4096)]
    asked = [("What is it?", [(96, 96)])]
    for pixels in limits * 2:
        engine, alone = opened(artifact, pixels=pixels, **shared), opened(artifact, pixels=pixels)
        assert one_by_one(engine, prepared_in(engine, tmp_path, asked)) == one_by_one(alone, prepared_in(alone, tmp_path, asked))
    assert len(shared["pictures"].memory) == 3  # type: ignore[attr-defined]


def test_small_caches_evict_and_answers_stay(engine: OnnxEngine, artifact: Path, tmp_path: Path) -> None:
    prepared = prepared_in(engine, tmp_path)
    expected = one_by_one(uncached(artifact), prepared)
    small = opened(artifact, pictures=PictureCache(60_000), prompts=PromptCache(60_000))
    for _ in range(3):
        assert one_by_one(small, prepared) == expected
        assert small.pictures.memory.bytes <= 60_000
        assert small.prompts.memory.bytes <= 60_000


def test_samples_that_share_a_picture_run_one_after_another(engine: OnnxEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that even a cache of one picture encodes each once."""
    prepared = prepared_in(engine, tmp_path, [("What is it?", [(64, 64)]), ("What is it?", [(96, 64)])])
    mixed = [prepared[0], prepared[1], prepared[0], prepared[1], prepared[0]]
    engine.pictures = PictureCache(30_000)
    engine.prompts = PromptCache(0)
    seen = counted(monkeypatch, engine)
    answers = engine.generate(mixed, max_new_tokens=2)
    assert [answer.id for answer in answers] == [item.id for item in mixed]
    assert sorted(seen["vision"]) == [16, 24]


def test_every_end_id_and_the_limits_stop_an_answer(folder: Path, engine: OnnxEngine, tmp_path: Path) -> None:
    prepared = prepared_in(engine, tmp_path)
    free = engine.generate(prepared, max_new_tokens=NEW)
    ends = [free[0].token_ids[2], free[2].token_ids[5]]
    change_json(folder / "generation_config.json", lambda c: c.update(eos_token_id=ends))
    for answer, whole in zip(opened(folder).generate(prepared, max_new_tokens=NEW), free, strict=True):
        found = [at for at, token in enumerate(whole.token_ids) if token in ends]
        cut = whole.token_ids[: found[0] + 1] if found else whole.token_ids
        assert (answer.token_ids, answer.stop) == (cut, "eos" if found else "length")
    assert all(len(answer.token_ids) == 5 for answer in engine.generate(prepared, max_new_tokens=5) if answer.stop == "length")


def test_a_request_ends_when_its_time_is_up_and_the_next_has_its_own(engine: OnnxEngine, tmp_path: Path) -> None:
    prepared = prepared_in(engine, tmp_path)
    expected = engine.generate(prepared, max_new_tokens=NEW)
    assert [answer.stop for answer in expected[:2]] == ["length", "length"]
    ticks = iter(range(10**6))
    engine.time_limit_s, engine.clock = 6.5, lambda: float(next(ticks))  # a second between any two looks
    limited = engine.generate(prepared[:2], max_new_tokens=NEW)
    for answer, whole in zip(limited, expected, strict=False):
        assert answer.stop == "time"
        assert 0 < len(answer.token_ids) < NEW
        assert answer.token_ids == whole.token_ids[: len(answer.token_ids)]
        assert answer.text == engine.prompter.decode(answer.token_ids)
    engine.time_limit_s = 0.5
    answer = engine.generate(prepared[:1], max_new_tokens=NEW)[0]
    assert (answer.stop, answer.token_ids, answer.error) == ("time", (), None)
    assert engine.fingerprint["generation"]["time_limit_s"] == 0.5
    engine.time_limit_s = None
    assert engine.generate(prepared, max_new_tokens=NEW) == expected


def test_time_is_looked_at_between_pictures(engine: OnnxEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    item = prepared_in(engine, tmp_path, [("<image><image><image>?", [(64, 64), (96, 64), (128, 64)])])[0]
    seen = counted(monkeypatch, engine)
    ticks = iter(range(10**6))
    engine.time_limit_s, engine.clock = 1.5, lambda: float(next(ticks))
    answer = engine.generate([item], max_new_tokens=NEW)[0]
    assert (answer.stop, answer.token_ids, seen) == ("time", (), {"vision": [16], "tokens": []})
    engine.time_limit_s = None
    assert engine.generate([item], max_new_tokens=2)[0].error is None
    assert seen["vision"] == [16, 24, 32], "what was encoded in time is kept"


def test_pressure_empties_the_caches_and_changes_no_answer(artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spare = [1 << 40]
    monkeypatch.setattr(byte_cache, "spare_memory_bytes", lambda: spare[0])
    engine = opened(artifact)
    prepared = prepared_in(engine, tmp_path)
    expected = one_by_one(engine, prepared)
    assert min(len(engine.pictures.memory), len(engine.prompts.memory)) > 1
    spare[0] = -1
    fresh = prepared_in(engine, tmp_path, [("What is it?", [(64, 96)])])
    engine.generate(fresh, max_new_tokens=1)
    assert (len(engine.pictures.memory), len(engine.prompts.memory)) == (0, 0)
    assert one_by_one(engine, prepared) == expected
    assert (engine.pictures.memory.bytes, engine.prompts.memory.bytes) == (0, 0)


def test_a_failing_sample_fails_alone(engine: OnnxEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepared = prepared_in(engine, tmp_path)
    expected = engine.generate(prepared, max_new_tokens=NEW)
    run = engine.model.language.run
    for error, words in ((states.RuntimeException("bad node\nmore"), "onnxruntime: bad node"), (MemoryError(), "MemoryError")):

        def failing(embeds: np.ndarray, *rest: Any, error: Exception = error) -> np.ndarray:
            if len(embeds) == len(prepared[3].token_ids):
                raise error
            return run(embeds, *rest)

        monkeypatch.setattr(engine.model.language, "run", failing)
        answers = engine.generate(prepared, max_new_tokens=NEW)
        assert (answers[3].stop, answers[3].token_ids) == ("error", ())
        assert words in str(answers[3].error)
        assert answers[:3] + answers[4:] == expected[:3] + expected[4:]


def test_a_picture_of_nan_fails_alone_and_leaves_nothing_behind(engine: OnnxEngine, tmp_path: Path) -> None:
    prepared = prepared_in(engine, tmp_path)
    expected = engine.generate(prepared, max_new_tokens=NEW)
    kept = len(engine.prompts.memory)
    prepared[1].pictures[0].pixel_values[3, 3] = float("nan")
    answers = engine.generate(prepared, max_new_tokens=NEW)
    assert (answers[1].stop, answers[1].token_ids) == ("error", ())
    assert "not finite" in str(answers[1].error)
    assert answers[:1] + answers[2:] == expected[:1] + expected[2:]
    assert len(engine.prompts.memory) == kept


def test_sampling_draws_by_item_and_seed_whatever_the_company(engine: OnnxEngine, tmp_path: Path) -> None:
    prepared = prepared_in(engine, tmp_path)
    sampling = Sampling(temperature=1.5, top_k=50, top_p=0.95, seed=7)
    answers = engine.generate(prepared, max_new_tokens=NEW, sampling=sampling)
    assert answers != engine.generate(prepared, max_new_tokens=NEW)
    alone = [answer for item in prepared[::-1] for answer in engine.generate([item], max_new_tokens=NEW, sampling=sampling)]
    assert alone[::-1] == answers
    assert answers != engine.generate(prepared, max_new_tokens=NEW, sampling=Sampling(temperature=1.5, top_k=50, top_p=0.95, seed=8))
    assert engine.generate(prepared, max_new_tokens=NEW, sampling=Sampling(top_k=1)) == engine.generate(prepared, max_new_tokens=NEW)


def test_rows_that_only_pad_the_vocabulary_are_never_answered(engine: OnnxEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known, run = engine.prompter.vocabulary_size, engine.model.language.run
    assert engine.model.language.shape.vocabulary > known

    def padded(*given: Any) -> np.ndarray:
        logits = run(*given)
        logits[:, known:] = 1e9
        return logits

    monkeypatch.setattr(engine.model.language, "run", padded)
    item = prepared_in(engine, tmp_path)[0]
    assert engine.generate([item], max_new_tokens=1)[0].token_ids[0] < known
    assert engine.score(item, (1, 2)).logits.shape == (2, known)


def test_prompts_longer_than_a_chunk_and_than_a_buffer_are_answered_as_torch_does(
    engine: OnnxEngine, torch_engine: TorchEngine, tmp_path: Path
) -> None:
    question = "How many shapes are there in this picture, and which? " * 40
    prepared = prepared_in(engine, tmp_path, [(question, [(512, 480)]), (question, [])])
    assert len(prepared[0].token_ids) > 1024
    assert engine.generate(prepared, max_new_tokens=NEW) == torch_engine.generate(prepared, max_new_tokens=NEW)
    assert engine.model.language.kv.capacity > 1024


def test_an_answer_ends_with_the_models_positions(folder: Path, tmp_path: Path) -> None:
    change_json(folder / "config.json", lambda c: c["text_config"].update(max_position_embeddings=30))
    engine = opened(folder)
    item = engine.prepare(samples_in(tmp_path)[0])
    answer = engine.generate([item], max_new_tokens=NEW)[0]
    assert (answer.stop, len(item.token_ids) + len(answer.token_ids)) == ("length", 31)
    with pytest.raises(ItemError, match="the model has 30 positions"):
        engine.score(item, range(20))


def test_the_fast_layouts_twin_gives_the_same_answers_and_scores_by_steps(artifact: Path, engine: OnnxEngine, tmp_path: Path) -> None:
    fast = opened(with_twin(artifact, tmp_path / "fast"))
    prepared = prepared_in(engine, tmp_path)
    answers = fast.generate(prepared, max_new_tokens=NEW)
    assert answers == engine.generate(prepared, max_new_tokens=NEW)
    scored = fast.score(prepared[0], answers[0].token_ids)
    assert (scored.logits - engine.score(prepared[0], answers[0].token_ids).logits).abs().max() < 1e-4


def test_stages_are_shown_in_order_and_only_those_that_happen(engine: OnnxEngine, torch_engine: TorchEngine, tmp_path: Path) -> None:
    for local in (engine, torch_engine):
        assert isinstance(local, LocalEngine)
        seen: list[str] = []

        @contextmanager
        def watch(name: Stage, seen: list[str] = seen) -> Iterator[None]:
            seen.append(name)
            yield
            seen.append(f"/{name}")

        local.on_stage = watch
        item, text = prepared_in(local, tmp_path, [("What is it?", [(64, 64)]), ("Hi", [])])
        assert seen == ["preprocess", "/preprocess"] * 2
        for shown, vision in ((item, ["vision", "/vision"]), (text, [])):
            seen.clear()
            assert len(local.generate([shown], max_new_tokens=3)[0].token_ids) == 3
            assert seen == [*vision, "prefill", "/prefill", *["decode", "/decode"] * 2, "detokenise", "/detokenise"]
        local.on_stage = None


def test_the_fingerprint_is_json_and_compares_with_torchs(engine: OnnxEngine, torch_engine: TorchEngine) -> None:
    fingerprint = json.loads(json.dumps(engine.fingerprint))
    assert (fingerprint["engine"], fingerprint["kind"], fingerprint["threads"]) == ("onnx", "export", 1)
    for key in ("pixels", "generation", "dtype", "device"):
        assert fingerprint[key] == torch_engine.fingerprint[key]


def test_an_artifact_that_cannot_answer_is_refused(folder: Path) -> None:
    change_json(folder / "qvlopt.json", lambda c: c.update(kind="awq"))
    with pytest.raises(RunError, match="kind awq, expected export or int8"):
        opened(folder)


def test_closing_gives_everything_back(engine: OnnxEngine) -> None:
    engine.close()
    assert not hasattr(engine, "model")


def test_nothing_in_gives_nothing_out(engine: OnnxEngine) -> None:
    empty: Sequence[Answer] = engine.generate([], max_new_tokens=NEW)
    assert empty == []
