"""The torch engine answers greedily as transformers does, and an answer depends on its sample alone."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3VLForConditionalGeneration

from qvlopt.data.samples import Sample
from qvlopt.errors import ItemError, RunError
from qvlopt.model.source import open_source
from qvlopt.recipe.schema import PixelLimits
from qvlopt.runtime.batch import build_batch
from qvlopt.runtime.engine import Answer, Prepared
from qvlopt.runtime.torch_engine import TorchEngine
from tests.asked import one_by_one, prepared_in, samples_in
from tests.tiny import build_tiny

NEW = 16


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Untied: a tied random model mostly repeats the last token, which would hide mistakes."""
    return build_tiny(tmp_path_factory.mktemp("tiny") / "model", tied=False, seed=3)


@pytest.fixture(scope="module")
def engine(tiny: Path) -> TorchEngine:
    return engine_of(tiny)


@pytest.fixture
def folder(tiny: Path, tmp_path: Path) -> Path:
    """A copy that a test may change."""
    return Path(shutil.copytree(tiny, tmp_path / "copy"))


def engine_of(folder: Path, pixels: PixelLimits | None = None) -> TorchEngine:
    return TorchEngine.open(open_source(str(folder), folder=folder.parent), dtype=torch.float32, device="cpu", pixels=pixels)


def change_json(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


def their_inputs(engine: TorchEngine, item: Prepared) -> dict[str, torch.Tensor]:
    ids = torch.tensor([item.token_ids])
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if item.pictures:
        inputs["pixel_values"] = torch.cat([picture.pixel_values for picture in item.pictures])
        inputs["image_grid_thw"] = torch.tensor([(1, *picture.grid) for picture in item.pictures])
        inputs["mm_token_type_ids"] = (ids == engine.model.image_token_id).int()
    return inputs


def test_answers_are_those_of_transformers_own_generation(tiny: Path, engine: TorchEngine, tmp_path: Path) -> None:
    theirs = Qwen3VLForConditionalGeneration.from_pretrained(tiny, dtype=torch.float32)
    prepared = prepared_in(engine, tmp_path)
    padding = list(range(engine.prompter.vocabulary_size, engine.model.head.shape[0]))  # transformers would answer these too
    for item, answer in zip(prepared, engine.generate(prepared, max_new_tokens=NEW), strict=True):
        ids = theirs.generate(**their_inputs(engine, item), do_sample=False, max_new_tokens=NEW, suppress_tokens=padding)
        assert answer.token_ids == tuple(ids[0, len(item.token_ids) :].tolist())
        assert len(set(answer.token_ids)) > 3  # the model does not merely repeat itself


def test_logits_at_every_position_are_those_of_transformers_also_under_padding(tiny: Path, engine: TorchEngine, tmp_path: Path) -> None:
    theirs = Qwen3VLForConditionalGeneration.from_pretrained(tiny, dtype=torch.float32)
    prepared = prepared_in(engine, tmp_path)
    with torch.inference_mode():
        batch = build_batch(engine.model, prepared)
        hidden = engine.model.text(
            inputs_embeds=batch.embeds, attention_mask=batch.mask, position_ids=batch.positions,
            visual_pos_masks=batch.visual, deepstack_visual_embeds=batch.deepstack,
        ).last_hidden_state  # fmt: skip
        for row, item in enumerate(prepared):
            got = torch.nn.functional.linear(hidden[row, -len(item.token_ids) :], engine.model.head)
            expected = theirs(**their_inputs(engine, item)).logits[0]
            assert (got - expected).abs().max() < 1e-4
            assert (got - expected).abs().mean() < 1e-5


@pytest.mark.parametrize("pad", ["<|im_end|>", "<|endoftext|>", None])
def test_a_batch_gives_what_its_samples_give_alone_whatever_the_pad_token(folder: Path, tmp_path: Path, pad: str | None) -> None:
    change_json(folder / "tokenizer_config.json", lambda c: c.update(pad_token=pad))
    engine = engine_of(folder)
    prepared = prepared_in(engine, tmp_path)
    assert len({len(item.token_ids) for item in prepared}) > 3
    assert engine.generate(prepared, max_new_tokens=NEW) == one_by_one(engine, prepared)


def test_order_and_history_do_not_change_an_answer(engine: TorchEngine, tmp_path: Path) -> None:
    prepared = prepared_in(engine, tmp_path)
    expected = engine.generate(prepared, max_new_tokens=NEW)
    assert engine.generate(prepared[::-1], max_new_tokens=NEW)[::-1] == expected
    assert engine.generate(prepared[2:5], max_new_tokens=NEW) == expected[2:5]
    assert engine.generate(prepared, max_new_tokens=5) == [
        Answer(a.id, a.token_ids[:5], engine.prompter.decode(a.token_ids[:5]), "length" if len(a.token_ids) > 5 else a.stop, a.prompt_tokens)
        for a in expected
    ]


def test_what_padding_is_filled_with_reaches_no_answer(folder: Path, tmp_path: Path) -> None:
    engine = engine_of(folder)
    prepared = prepared_in(engine, tmp_path)
    expected = engine.generate(prepared, max_new_tokens=4)
    assert not any(0 in item.token_ids for item in prepared)
    with torch.no_grad():
        engine.model.text.embed_tokens.weight[0] = 1e4
    assert engine.generate(prepared, max_new_tokens=4) == expected


def test_rows_that_only_pad_the_vocabulary_are_never_answered(folder: Path, tmp_path: Path) -> None:
    known = engine_of(folder).prompter.vocabulary_size
    tensors = load_file(folder / "model.safetensors")
    assert tensors["lm_head.weight"].shape[0] > known
    expected = one_by_one(engine_of(folder), prepared_in(engine_of(folder), tmp_path))
    tensors["lm_head.weight"][known:] = 100 * tensors["lm_head.weight"][:1]
    save_file(tensors, folder / "model.safetensors")
    engine = engine_of(folder)
    answers = engine.generate(prepared_in(engine, tmp_path), max_new_tokens=NEW)
    assert answers == expected
    assert max(token for answer in answers for token in answer.token_ids) < known


def test_every_end_id_stops_its_own_row_and_no_other(folder: Path, tmp_path: Path, engine: TorchEngine) -> None:
    prepared = prepared_in(engine, tmp_path)
    free = engine.generate(prepared, max_new_tokens=NEW)
    ends = [free[0].token_ids[2], free[2].token_ids[5]]
    change_json(folder / "generation_config.json", lambda c: c.update(eos_token_id=ends))
    stopped = engine_of(folder).generate(prepared, max_new_tokens=NEW)
    for answer, whole in zip(stopped, free, strict=True):
        found = [at for at, token in enumerate(whole.token_ids) if token in ends]
        cut = whole.token_ids[: found[0] + 1] if found else whole.token_ids
        assert (answer.token_ids, answer.stop) == (cut, "eos" if found else "length")
    assert {answer.stop for answer in stopped} == {"eos", "length"}
    assert stopped == one_by_one(engine_of(folder), prepared)


def test_a_loop_ends_at_the_limit_and_says_so(tmp_path: Path) -> None:
    engine = engine_of(build_tiny(tmp_path / "tied"))  # tied random weights repeat themselves
    answers = engine.generate(prepared_in(engine, tmp_path), max_new_tokens=64)
    loops = [answer for answer in answers if answer.stop == "length"]
    assert loops
    assert all(len(answer.token_ids) == 64 for answer in loops)


def test_sampling_settings_of_the_checkpoint_change_nothing(folder: Path, tmp_path: Path) -> None:
    prepared = prepared_in(engine_of(folder), tmp_path)
    assert json.loads((folder / "generation_config.json").read_text())["do_sample"] is True
    sampled = engine_of(folder).generate(prepared, max_new_tokens=NEW)
    change_json(folder / "generation_config.json", lambda c: c.update(do_sample=False, repetition_penalty=5.0, temperature=0.01))
    assert engine_of(folder).generate(prepared, max_new_tokens=NEW) == sampled


def test_an_answer_ends_with_the_models_positions(folder: Path, tmp_path: Path) -> None:
    change_json(folder / "config.json", lambda c: c["text_config"].update(max_position_embeddings=30))
    engine = engine_of(folder)
    item = engine.prepare(samples_in(tmp_path)[0])
    answer = engine.generate([item], max_new_tokens=NEW)[0]
    assert answer.stop == "length"
    assert len(item.token_ids) + len(answer.token_ids) == 31
    with pytest.raises(ItemError, match="the model has 30 positions"):
        engine.prepare(samples_in(tmp_path)[2])


def test_a_row_with_logits_that_are_not_finite_fails_alone(engine: TorchEngine, tmp_path: Path) -> None:
    prepared = prepared_in(engine, tmp_path)
    expected = engine.generate(prepared, max_new_tokens=NEW)
    prepared[1].pictures[0].pixel_values[3, 3] = float("nan")
    answers = engine.generate(prepared, max_new_tokens=NEW)
    assert (answers[1].stop, answers[1].token_ids) == ("error", ())
    assert "not finite" in str(answers[1].error)
    assert answers[:1] + answers[2:] == expected[:1] + expected[2:]


def test_a_batch_too_large_for_memory_is_halved_and_a_sample_too_large_fails_alone(
    engine: TorchEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared = prepared_in(engine, tmp_path)
    expected = engine.generate(prepared, max_new_tokens=NEW)
    whole = TorchEngine._answer

    def short_of_memory(self: TorchEngine, items: Sequence[Prepared], new: int) -> list[Answer]:
        if len(items) > 2 or items[0] is prepared[0]:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")
        return whole(self, items, new)

    monkeypatch.setattr(TorchEngine, "_answer", short_of_memory)
    answers = engine.generate(prepared, max_new_tokens=NEW)
    assert answers[1:] == expected[1:]
    assert answers[0].stop == "error"
    assert "out of memory" in str(answers[0].error)


def test_other_failures_are_not_taken_for_a_lack_of_memory(engine: TorchEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> list[Answer]:
        raise RuntimeError("shape mismatch")

    monkeypatch.setattr(TorchEngine, "_answer", broken)
    with pytest.raises(RuntimeError, match="shape mismatch"):
        engine.generate(prepared_in(engine, tmp_path), max_new_tokens=2)


def test_a_picture_asked_about_twice_is_loaded_and_encoded_once(engine: TorchEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sample = samples_in(tmp_path)[0]
    again = Sample("again", sample.images, "Read.", ("x",), "ocr", sample.cluster, "manifest.jsonl:9")
    prepared = [engine.prepare(sample), engine.prepare(again)]
    assert prepared[0].pictures[0] is prepared[1].pictures[0]
    alone = one_by_one(engine, prepared)
    pictures: list[int] = []
    embed = type(engine.model.vision).embed
    monkeypatch.setattr(type(engine.model.vision), "embed", lambda self, pixels, grid: (pictures.append(len(pixels)), embed(self, pixels, grid))[1])
    assert engine.generate(prepared, max_new_tokens=NEW) == alone
    assert pictures == [1]


def test_unusable_pictures_fail_their_items_and_leave_the_others(engine: TorchEngine, tmp_path: Path) -> None:
    samples = samples_in(tmp_path, [("a", [(64, 64)]), ("b", [(8, 1608)]), ("c", [(1, 1)]), ("d", [(64, 64)]), ("e", [(8, 1600)])])
    (tmp_path / "3-0.png").write_bytes(b"no picture")
    outcomes = []
    for sample in samples:
        try:
            engine.prepare(sample)
            outcomes.append("ok")
        except ItemError as error:
            outcomes.append(error.reason)
    assert [outcome == "ok" for outcome in outcomes] == [True, False, True, False, True]
    assert "200" in outcomes[1]
    assert "3-0.png" in outcomes[3]


def test_the_recipes_pixel_limits_reach_the_prompt_and_the_fingerprint(tiny: Path, tmp_path: Path) -> None:
    engine = engine_of(tiny, PixelLimits(min=1024, max=4096))
    item = prepared_in(engine, tmp_path, [("What?", [(512, 512)])])[0]
    assert item.token_ids.count(engine.model.image_token_id) == 4
    assert engine.fingerprint["pixels"] == {"min": 1024, "max": 4096}


def test_the_fingerprint_names_what_answers_depend_on_and_is_json(engine: TorchEngine) -> None:
    fingerprint = json.loads(json.dumps(engine.fingerprint))
    assert fingerprint["engine"] == "torch"
    assert (fingerprint["dtype"], fingerprint["device"]) == ("float32", "cpu")
    assert fingerprint["threads"] == torch.get_num_threads()
    assert fingerprint["generation"] == {"sampling": "greedy", "penalties": None, "eos_ids": list(engine.prompter.eos_ids)}
    assert fingerprint["versions"]["torch"] == torch.__version__


def test_nothing_in_gives_nothing_out(engine: TorchEngine) -> None:
    assert engine.generate([], max_new_tokens=NEW) == []


def test_a_tokenizer_with_more_ids_than_the_model_has_rows_is_refused(tmp_path: Path) -> None:
    folder = build_tiny(tmp_path / "small", text={"vocab_size": 64})
    with pytest.raises(RunError, match="the model only 64 rows"):
        engine_of(folder)


def test_picture_settings_of_another_checkpoint_are_refused(folder: Path) -> None:
    change_json(folder / "preprocessor_config.json", lambda c: c.update(patch_size=14))
    with pytest.raises(RunError, match="patch_size, temporal_patch_size, merge_size and channels"):
        engine_of(folder)


def test_forced_logits_are_those_that_generation_chose_by_and_those_of_transformers(tiny: Path, engine: TorchEngine, tmp_path: Path) -> None:
    theirs = Qwen3VLForConditionalGeneration.from_pretrained(tiny, dtype=torch.float32)
    for item in prepared_in(engine, tmp_path):
        answer = engine.generate([item], max_new_tokens=NEW)[0].token_ids
        scored = engine.score(item, answer)
        assert (scored.id, scored.answer_ids, scored.logits.dtype) == (item.id, answer, torch.float32)
        assert scored.logits.argmax(dim=-1).tolist() == list(answer)
        inputs = their_inputs(engine, item)
        longer = torch.tensor([[*item.token_ids, *answer[:-1]]])
        inputs |= {"input_ids": longer, "attention_mask": torch.ones_like(longer)}
        if item.pictures:
            inputs["mm_token_type_ids"] = (longer == engine.model.image_token_id).int()
        with torch.inference_mode():
            expected = theirs(**inputs).logits[0, len(item.token_ids) - 1 :, : engine.prompter.vocabulary_size]
        assert scored.logits.shape == expected.shape
        assert (scored.logits - expected).abs().max() < 1e-4


def test_an_image_token_in_an_answer_is_no_picture(engine: TorchEngine, tmp_path: Path) -> None:
    item = prepared_in(engine, tmp_path)[0]
    image = engine.model.image_token_id
    assert torch.equal(engine.score(item, (5, image, 6)).logits[:2], engine.score(item, (5, 7)).logits)
    assert engine.score(item, ()).logits.shape == (0, engine.prompter.vocabulary_size)


def test_an_answer_longer_than_the_models_positions_is_not_scored(engine: TorchEngine, tmp_path: Path) -> None:
    with pytest.raises(ItemError, match="the model has 4096 positions"):
        engine.score(prepared_in(engine, tmp_path)[0], [5] * 4096)


def test_a_picture_is_encoded_as_the_tower_does(engine: TorchEngine, tmp_path: Path) -> None:
    picture = prepared_in(engine, tmp_path)[2].pictures[0]
    encoded = engine.encode(picture)
    expected = engine.model.vision(picture.pixel_values[None], picture.grid)
    assert torch.equal(encoded.image_embeds, expected.merged[0])
    assert torch.equal(encoded.deepstack, torch.stack([tap[0] for tap in expected.deepstack]))


def test_attention_is_sdpa_unless_another_is_asked_for(tiny: Path, engine: TorchEngine, tmp_path: Path) -> None:
    source = open_source(str(tiny), folder=tiny.parent)
    eager = TorchEngine.open(source, dtype=torch.float32, device="cpu", attn_implementation="eager")
    assert (engine.fingerprint["attention"], eager.fingerprint["attention"]) == ("sdpa", "eager")
    prepared = prepared_in(engine, tmp_path)
    assert eager.generate(prepared, max_new_tokens=NEW) == engine.generate(prepared, max_new_tokens=NEW)
    answer = (5, 6, 7)
    difference = (eager.score(prepared[0], answer).logits - engine.score(prepared[0], answer).logits).abs().max()
    assert 0 < difference < 1e-3
    with pytest.raises(RunError, match="flash_attention_2 cannot be used here"):
        TorchEngine.open(source, dtype=torch.float32, device="cpu", attn_implementation="flash_attention_2")
