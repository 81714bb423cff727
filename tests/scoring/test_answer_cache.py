"""Answers are kept across kills, and only for the very same question under the very same conditions."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

from qvlopt.data.samples import ImageRef, Sample
from qvlopt.runtime.engine import Answer
from qvlopt.scoring.answer_cache import AnswerCache, Kept, cache_path


@pytest.fixture
def sample(tmp_path: Path) -> Sample:
    Image.new("RGB", (32, 32)).save(tmp_path / "a.png")
    return Sample("a", (ImageRef("a.png", tmp_path),), "What?", ("x",), "ocr", "a", "x:1")


def kept(text: str = "an answer\n\u2028", error: str | None = None) -> Kept:
    return Kept(Answer("a", (1, 2, 3), text, "error" if error else "eos", 7, error), ((32, 32),), "0123")


def cached(path: Path, sample: Sample, item: Kept) -> Path:
    with AnswerCache(path) as cache:
        cache.put([(sample, item)], 16)
    return path


def test_an_answer_comes_back_as_it_was_under_the_id_that_asks(tmp_path: Path, sample: Sample) -> None:
    path = cached(tmp_path / "c" / "x.jsonl", sample, kept())
    with AnswerCache(path) as cache:
        assert cache.get(sample, 16) == kept()
        again = cache.get(replace(sample, id="other", cluster="c", answers=("y",)), 16)
    assert again is not None
    assert again.answer == replace(kept().answer, id="other")


def test_another_question_picture_or_limit_is_not_answered(tmp_path: Path, sample: Sample) -> None:
    path = cached(tmp_path / "x.jsonl", sample, kept())
    Image.new("RGB", (32, 32), "red").save(tmp_path / "b.png")
    with AnswerCache(path) as cache:
        assert cache.get(replace(sample, question="Why?"), 16) is None
        assert cache.get(replace(sample, images=(ImageRef("b.png", tmp_path),)), 16) is None
        assert cache.get(replace(sample, images=()), 16) is None
        assert cache.get(sample, 17) is None


def test_the_bytes_of_the_picture_count_and_not_its_name(tmp_path: Path, sample: Sample) -> None:
    path = cached(tmp_path / "x.jsonl", sample, kept())
    (tmp_path / "copy.png").write_bytes((tmp_path / "a.png").read_bytes())
    with AnswerCache(path) as cache:
        assert cache.get(replace(sample, images=(ImageRef("copy.png", tmp_path),)), 16) is not None
        Image.new("RGB", (32, 32), "red").save(tmp_path / "a.png")
        assert cache.get(sample, 16) is None


def test_failed_answers_and_missing_pictures_are_not_kept(tmp_path: Path, sample: Sample) -> None:
    path = cached(tmp_path / "x.jsonl", sample, kept(error="out of memory"))
    gone = replace(sample, images=(ImageRef("gone.png", tmp_path),))
    with AnswerCache(path) as cache:
        cache.put([(gone, kept())], 16)
        assert cache.get(gone, 16) is None
    assert path.read_bytes() == b""


@pytest.mark.parametrize("cut", [1, 20, 60])
def test_a_line_that_a_kill_cut_short_is_left_out_and_the_next_one_is_whole(tmp_path: Path, sample: Sample, cut: int) -> None:
    path = cached(tmp_path / "x.jsonl", sample, kept())
    second = replace(sample, question="second")
    cached(path, second, kept("second"))
    path.write_bytes(path.read_bytes()[:-cut])
    third = replace(sample, question="third")
    cached(path, third, kept("third"))
    with AnswerCache(path) as cache:
        found = [cache.get(each, 16) for each in (sample, second, third)]
    assert [each.answer.text if each else None for each in found] in (["an answer\n\u2028", None, "third"], ["an answer\n\u2028", "second", "third"])
    assert found[1] is None or cut == 1  # only the line's end was cut


def test_a_fresh_cache_answers_nothing_and_keeps_what_comes(tmp_path: Path, sample: Sample) -> None:
    path = cached(tmp_path / "x.jsonl", sample, kept("old"))
    with AnswerCache(path, is_fresh=True) as cache:
        assert cache.get(sample, 16) is None
        cache.put([(sample, kept("new"))], 16)
    with AnswerCache(path) as cache:
        found = cache.get(sample, 16)
    assert found is not None
    assert found.answer.text == "new"


def test_the_file_is_named_by_weights_settings_and_batch(tmp_path: Path) -> None:
    conditions = {"model_digest": "d", "dtype": "float32", "pixels": {"min": 1, "max": 2}}
    first = cache_path(tmp_path, conditions, 8)
    assert first == cache_path(tmp_path, dict(reversed(conditions.items())), 8)
    others = [
        cache_path(tmp_path, conditions | change, 8) for change in ({"model_digest": "e"}, {"dtype": "bfloat16"}, {"pixels": {"min": 1, "max": 3}})
    ]
    assert len({first, cache_path(tmp_path, conditions, 4), *others}) == 5
