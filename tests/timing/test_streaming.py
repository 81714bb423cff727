"""A server's streams as the engine hands them over: what counts as an answer, and when its tokens came."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from qvlopt.data.samples import Sample
from qvlopt.runtime.engine import Answer, Prepared
from qvlopt.runtime.openai_engine import TimedAnswer
from qvlopt.timing.session import Request
from qvlopt.timing.streaming import ServerSession
from qvlopt.timing.workload import write_picture
from tests.clock import FakeClock


def answer(tokens: int | None = 4, *, error: str | None = None, chunks: tuple[float, ...] = (0.5, 0.75, 1.25), prompt: int = 70) -> TimedAnswer:
    return TimedAnswer(Answer("x", (), "text", "error" if error else "length", prompt, error, tokens), chunks, 1.5)


class Server:
    """Streams the answers that it was given, one a request, and remembers the fields."""

    def __init__(self, clock: FakeClock, *answers: TimedAnswer) -> None:
        self.clock, self.answers = clock, list(answers)
        self.extras: list[Mapping[str, Any] | None] = []
        self.questions: list[str] = []

    def prepare(self, sample: Sample) -> Prepared:
        self.questions.append(sample.question)
        return Prepared(sample.id, (), (), torch.zeros((3, 0), dtype=torch.int64), 0)

    def stream(self, item: Prepared, *, max_new_tokens: int, extra: Mapping[str, Any] | None = None) -> TimedAnswer:
        del item, max_new_tokens
        self.extras.append(extra)
        self.clock.pass_(2.0)
        return self.answers.pop(0)


@pytest.fixture
def request_(tmp_path: Path) -> Request:
    return Request("0", str(write_picture(tmp_path, 64, 64, (0,))), (0,), 30, 4)


def test_moments_are_the_streams_and_tokens_the_servers(request_: Request) -> None:
    clock = FakeClock()
    server = Server(clock, answer())
    times = ServerSession(server, clock).call([request_])
    assert (times.ttft, times.e2e, times.tpot) == ((0.5,), (1.5,), (0.25,))
    assert (times.tokens, times.prompt_tokens, times.wall, times.error) == (4, 70, 2.0, None)
    assert times.coverage is None
    assert server.extras == [{"ignore_eos": True}]


def test_requests_at_once_have_moments_each(request_: Request) -> None:
    clock = FakeClock()
    times = ServerSession(Server(clock, *[answer()] * 3), clock).call([request_] * 3)
    assert (len(times.ttft), len(times.e2e), times.tokens, times.requests) == (3, 3, 12, 3)


@pytest.mark.parametrize(
    ("stream", "reason"),
    [
        (answer(0), "an answer without a single token"),
        (answer(4, chunks=()), "an answer without a single token"),
        (answer(None), "the server did not count the tokens"),
        (answer(error="status 500: boom"), "status 500: boom"),
    ],
)
def test_a_stream_without_counted_tokens_is_a_failure(request_: Request, stream: TimedAnswer, reason: str) -> None:
    clock = FakeClock()
    times = ServerSession(Server(clock, stream), clock).call([request_])
    assert times.error is not None
    assert times.error.startswith(reason)
    assert (times.ttft, times.tokens) == ((), 0)


def test_one_failure_among_many_is_told_and_gives_no_times(request_: Request) -> None:
    clock = FakeClock()
    times = ServerSession(Server(clock, answer(), answer(0), answer()), clock).call([request_] * 3)
    assert times.error == "an answer without a single token"
    assert len(times.e2e) == 2


def test_one_token_has_no_time_per_token(request_: Request) -> None:
    clock = FakeClock()
    assert ServerSession(Server(clock, answer(1, chunks=(0.5,))), clock).call([request_]).tpot == ()


IGNORING, LENGTHENING = {"ignore_eos": True}, {"generation_config": '{"min_new_tokens": 4}'}


def test_a_server_that_refuses_a_field_is_asked_in_the_next_way_from_then_on(request_: Request) -> None:
    clock = FakeClock()
    server = Server(clock, answer(error="status 422: Unexpected fields in the request: {'ignore_eos'}"), answer(), answer())
    session = ServerSession(server, clock)
    assert session.call([request_]).error is None
    assert session.call([request_]).error is None
    assert server.extras == [IGNORING, LENGTHENING, LENGTHENING]


def test_a_server_that_refuses_every_way_is_asked_plainly_from_then_on(request_: Request) -> None:
    clock = FakeClock()
    refusals = [answer(error=f"status 400: unknown field {field}") for field in ("ignore_eos", "generation_config")]
    server = Server(clock, *refusals, answer(), answer())
    session = ServerSession(server, clock)
    assert session.call([request_]).error is None
    assert session.call([request_]).error is None
    assert server.extras == [IGNORING, LENGTHENING, None, None]


def test_an_error_that_names_no_field_is_the_answers(request_: Request) -> None:
    clock = FakeClock()
    server = Server(clock, answer(error="status 500: boom"))
    assert ServerSession(server, clock).call([request_]).error == "status 500: boom"
    assert server.extras == [IGNORING]


def test_without_a_tokenizer_a_word_stands_for_a_token(request_: Request) -> None:
    clock = FakeClock()
    server = Server(clock, answer())
    ServerSession(server, clock).call([request_])
    assert len(server.questions[0].split()) == request_.prompt_tokens - 8
