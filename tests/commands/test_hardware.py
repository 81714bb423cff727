"""Threads and device of a command."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from qvlopt.artifact.process import thread_count
from qvlopt.commands.hardware import prepare
from qvlopt.recipe.load import LoadedRecipe, load_recipe


def recipe(device: str, threads: int | None = 1) -> LoadedRecipe:
    return load_recipe({"model": {"path": "x"}, "hardware": {"device": device, "threads": threads}})


@pytest.fixture(autouse=True)
def _same_threads_afterwards() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("asked", [1, 2, None, 100_000])
def test_torch_gets_the_threads_that_the_process_may_use(asked: int | None) -> None:
    prepare(recipe("cpu", asked))
    assert torch.get_num_threads() == thread_count(asked)


@pytest.mark.parametrize(
    ("asked", "available", "given"),
    [("cpu", True, "cpu"), ("cpu", False, "cpu"), ("auto", True, "cuda"), ("auto", False, "cpu"), ("cuda", True, "cuda"), ("cuda", False, "cpu")],
)
def test_a_gpu_is_used_where_there_is_one_and_none_is_refused(monkeypatch: pytest.MonkeyPatch, asked: str, available: bool, given: str) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    assert prepare(recipe(asked)) == torch.device(given)


def test_going_on_without_the_gpu_that_was_asked_for_is_said(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    prepare(recipe("auto"))
    assert caplog.messages == []
    prepare(recipe("cuda"))
    assert caplog.messages == ["hardware.device: cuda is not available here, going on with the cpu"]
