"""Calls of an engine on a clock that only its work moves: stages, fixed lengths, failures that a status would hide."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from qvlopt.data.samples import ImageRef, Sample
from qvlopt.errors import ItemError
from qvlopt.model.prompt import Prompter
from qvlopt.model.source import open_source
from qvlopt.runtime.engine import Answer, OnStage, Prepared, stage
from qvlopt.runtime.onnx_engine import OnnxEngine
from qvlopt.runtime.torch_engine import TorchEngine
from qvlopt.timing.session import Request, Session
from qvlopt.timing.stages import STAGES, CallTimes
from qvlopt.timing.workload import write_picture
from tests.clock import FakeClock
from tests.tiny import build_tiny
from tests.tiny_onnx import build_onnx

NEW = 4
SECONDS = {"load": 1.0, "process": 2.0, "tower": 30.0, "prefill": 20.0, "step": 5.0, "decode": 0.25}
"""What each piece of work takes on the fake clock."""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny(tmp_path_factory.mktemp("tiny") / "model", tied=False, seed=3)


@pytest.fixture
def request_(tmp_path: Path) -> Request:
    return Request("0", str(write_picture(tmp_path, 64, 96, (0,))), (0, 1), 40, NEW)


def passing(work: Callable[..., Any], seconds: float, clock: FakeClock) -> Callable[..., Any]:
    """`work`, which takes so long on the fake clock."""

    def call(*args: Any, **named: Any) -> Any:
        clock.pass_(seconds)
        return work(*args, **named)

    return call


def slowed(pieces: Sequence[tuple[type, str, str]], clock: FakeClock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each piece of an engine's real work, by class, method and name in SECONDS, lets its time pass; nothing else does."""
    for owner, name, piece in pieces:
        monkeypatch.setattr(owner, name, passing(getattr(owner, name), SECONDS[piece], clock))


def slowed_text(text: torch.nn.Module, clock: FakeClock, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same for a language model of torch, where prompt and step are one method."""
    forward = text.forward

    def call(*, inputs_embeds: torch.Tensor, **named: Any) -> Any:
        clock.pass_(SECONDS["prefill" if inputs_embeds.shape[1] > 1 else "step"])
        return forward(inputs_embeds=inputs_embeds, **named)

    monkeypatch.setattr(text, "forward", call)


def test_every_second_of_the_torch_engine_is_in_its_stage(tiny: Path, request_: Request, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = TorchEngine.open(open_source(str(tiny), folder=tiny.parent), dtype=torch.float32, device="cpu")
    clock = FakeClock()
    session = Session(engine, clock)
    tower = (type(engine.model.vision), "__call__", "tower")
    slowed([(ImageRef, "load", "load"), (type(engine.processor), "process", "process"), tower, (Prompter, "decode", "decode")], clock, monkeypatch)
    slowed_text(engine.model.text, clock, monkeypatch)
    times = session.call([request_])
    assert times.error is None
    assert times.stages == {
        "preprocess": (SECONDS["load"] + SECONDS["process"],),
        "vision": (SECONDS["tower"],),
        "prefill": (SECONDS["prefill"],),
        "decode": (SECONDS["step"],) * (NEW - 1),
        "detokenise": (SECONDS["decode"],),
    }
    assert times.wall == sum(map(sum, times.stages.values()))
    assert times.ttft == (SECONDS["load"] + SECONDS["process"] + SECONDS["tower"] + SECONDS["prefill"],)
    assert times.tpot == (SECONDS["step"] + SECONDS["decode"] / (NEW - 1),)
    assert times.coverage is not None
    assert times.coverage >= 0.95


def test_every_second_of_the_onnx_engine_is_in_its_stage(tiny: Path, request_: Request, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = OnnxEngine.open(build_onnx(tiny, tmp_path / "export"), threads=1)
    clock = FakeClock()
    session = Session(engine, clock)
    pieces = (
        (ImageRef, "load", "load"),
        (type(engine.processor), "process", "process"),
        (type(engine.model.vision), "encode", "tower"),
        (type(engine.model.language), "run", "prefill"),
        (type(engine.model.language), "step", "step"),
        (Prompter, "decode", "decode"),
    )
    slowed(pieces, clock, monkeypatch)
    times = session.call([request_])
    assert times.error is None
    assert {name: sum(spent) for name, spent in times.stages.items() if name != "prefill"} == {
        "preprocess": SECONDS["load"] + SECONDS["process"],
        "vision": SECONDS["tower"],
        "decode": SECONDS["step"] * (NEW - 1),
        "detokenise": SECONDS["decode"],
    }
    assert sum(times.stages["prefill"]) >= SECONDS["prefill"]  # a run for every chunk
    assert times.coverage == 1.0


def test_a_call_has_what_its_threads_waited(tiny: Path, request_: Request) -> None:
    clock, counts = FakeClock(), iter([2.0, 2.75, 3.0, 2.5, None, 1.0])
    session = Session(SaidEngine(Prompter.from_folder(tiny), clock, [5] * NEW), clock, waited=lambda: next(counts))
    assert [session.call([request_]).waited for _ in range(3)] == [0.75, 0.0, None]


def test_an_answer_has_the_length_that_was_asked_for_whatever_the_model_says(tiny: Path, request_: Request) -> None:
    """The model's own first token is made its end of sequence: without the fixed length nothing else would come."""
    engine = TorchEngine.open(open_source(str(tiny), folder=tiny.parent), dtype=torch.float32, device="cpu")
    free = Session(engine, FakeClock())
    first = free.call([request_])
    assert first.tokens == NEW
    engine.prompter = replace(engine.prompter, eos_ids=tuple(range(engine.prompter.vocabulary_size)))
    times = Session(engine, FakeClock()).call([request_])
    assert (times.tokens, times.error) == (NEW, None)


def test_prompt_tokens_are_counted_from_ids_with_the_pictures_apart(tiny: Path, request_: Request) -> None:
    engine = TorchEngine.open(open_source(str(tiny), folder=tiny.parent), dtype=torch.float32, device="cpu")
    times = Session(engine, FakeClock()).call([request_])
    assert times.picture_tokens == (64 // 32) * (96 // 32)
    assert times.prompt_tokens == request_.prompt_tokens + times.picture_tokens
    last = Session(engine, FakeClock()).call([replace(request_, picture_last=True)])
    assert (last.prompt_tokens, last.picture_tokens) == (times.prompt_tokens, times.picture_tokens)


class SaidEngine:
    """Answers with the ids that it was given, a second a stage; `untimed` seconds are spent outside of all stages."""

    def __init__(self, prompter: Prompter, clock: FakeClock, ids: Sequence[int], *, error: str | None = None, untimed: float = 0.0) -> None:
        self.prompter = prompter
        self.on_stage: OnStage | None = None
        self.clock, self.ids, self.error, self.untimed = clock, tuple(ids), error, untimed

    def prepare(self, sample: Sample) -> Prepared:
        self._work("preprocess")
        return Prepared(sample.id, (1, 2, 3), (), torch.zeros((3, 3), dtype=torch.int64), 0)

    def generate(self, prepared: Sequence[Prepared], *, max_new_tokens: int) -> list[Answer]:
        del max_new_tokens
        for name in STAGES[1:]:
            self._work(name)
        self.clock.pass_(self.untimed)
        return [Answer(item.id, self.ids, "    ", "error" if self.error else "length", 3, self.error) for item in prepared]

    def _work(self, name: Any) -> None:
        with stage(self.on_stage, name):
            self.clock.pass_(1.0)


def said(tiny: Path, request: Request, ids: Sequence[int], **more: Any) -> CallTimes:
    clock = FakeClock()
    return Session(SaidEngine(Prompter.from_folder(tiny), clock, ids, **more), clock).call([request])


def test_an_answer_of_spaces_is_counted_by_its_ids(tiny: Path, request_: Request) -> None:
    times = said(tiny, request_, [5, 5, 5, 5])
    assert (times.tokens, times.error) == (4, None)


def test_an_answer_without_a_token_is_a_failure(tiny: Path, request_: Request) -> None:
    assert said(tiny, request_, []).error == "an answer without a single token"


def test_an_answer_of_another_length_is_a_failure(tiny: Path, request_: Request) -> None:
    assert said(tiny, request_, [5, 5]).error == "an answer of 2 tokens, 4 were asked for"


def test_an_engines_error_is_the_calls(tiny: Path, request_: Request) -> None:
    assert said(tiny, request_, [], error="out of memory").error == "out of memory"


def test_time_that_no_stage_has_shows(tiny: Path, request_: Request) -> None:
    assert said(tiny, request_, [5] * 4).coverage == 1.0
    assert said(tiny, request_, [5] * 4, untimed=5.0).coverage == 0.5


def test_a_picture_that_cannot_be_read_fails_its_call(tiny: Path, request_: Request, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_args: Any) -> Any:
        raise ItemError("is damaged")

    monkeypatch.setattr(SaidEngine, "prepare", broken)
    assert said(tiny, request_, [5] * 4).error == "is damaged"
