"""Calls of an OpenAI-compatible server, timed from outside: when the first token came, and when the last.

Tokens are those that the server counted (`usage` of the last event), not chunks and not text that is encoded again. Answers
are asked to go on after the end of sequence, in the words of vLLM and llama-server, or of `transformers serve`; where a server
knows neither, the real number of tokens is used.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

from qvlopt.data.samples import Sample
from qvlopt.runtime.engine import Answer, Prepared
from qvlopt.timing.session import Request, sample_of
from qvlopt.timing.stages import CallTimes, Clock

TEMPLATE_TOKENS = 8
"""About what a chat template adds, where no tokenizer is at hand."""


class Timed(Protocol):
    """What is read of `runtime.openai_engine.TimedAnswer`."""

    @property
    def answer(self) -> Answer: ...

    @property
    def chunks_s(self) -> tuple[float, ...]: ...

    @property
    def seconds(self) -> float: ...


class StreamingEngine(Protocol):
    """What is used of `runtime.openai_engine.OpenAIEngine`."""

    def prepare(self, sample: Sample) -> Prepared: ...

    def stream(self, item: Prepared, *, max_new_tokens: int, extra: Mapping[str, Any] | None = None) -> Timed: ...


@dataclass
class ServerSession:
    """Times calls of one server's model; the requests of a call are sent at the same moment, each on a connection of its own.

    Pictures are read and encoded for sending before the clock starts, and connecting is not counted: what is left is the
    server's work and the network. `count` counts a text's tokens; without it a word is taken for a token. `refused` is how many
    of `fixed_length`'s ways the server has refused so far.
    """

    engine: StreamingEngine
    clock: Clock
    count: Callable[[str], int] | None = None
    refused: int = 0

    def call(self, requests: Sequence[Request]) -> CallTimes:
        """Sends all requests at once and waits for all of them. Raises RunError when the server is gone."""
        count = self.count or (lambda text: len(text.split()) + TEMPLATE_TOKENS)
        prepared = [self.engine.prepare(sample_of(request, count)) for request in requests]
        limit = requests[0].new_tokens
        with ThreadPoolExecutor(len(prepared)) as pool:
            began = self.clock()
            answers = list(pool.map(lambda item: self._one(item, limit), prepared))
            wall = self.clock() - began
        return summed(answers, wall)

    def _one(self, item: Prepared, limit: int) -> Timed:
        for tried, fields in enumerate(fixed_length(limit)):
            if tried < self.refused:
                continue
            timed = self.engine.stream(item, max_new_tokens=limit, extra=fields)
            if not any(field in (timed.answer.error or "") for field in fields):
                return timed
            self.refused = max(self.refused, tried + 1)
        return self.engine.stream(item, max_new_tokens=limit)


def fixed_length(tokens: int) -> tuple[Mapping[str, Any], ...]:
    """Fields by which servers go on after the end of sequence, one way after the other: each is left where its name is refused."""
    return {"ignore_eos": True}, {"generation_config": json.dumps({"min_new_tokens": tokens})}


def problem(timed: Timed) -> str | None:
    """Why a streamed answer does not count; a status of 200 alone is no answer."""
    if timed.answer.error is not None:
        return timed.answer.error
    if not timed.chunks_s or timed.answer.new_tokens == 0:
        return "an answer without a single token"
    if timed.answer.new_tokens is None:
        return "the server did not count the tokens (no usage in its stream)"
    return None


def summed(answers: Sequence[Timed], wall: float) -> CallTimes:
    """One call of all the answers that came together; those with a `problem` give no times, and the first problem is its error."""
    good = [timed for timed in answers if problem(timed) is None]
    tokens = [timed.answer.new_tokens or 0 for timed in good]
    return CallTimes(
        wall=wall,
        requests=len(answers),
        tokens=sum(tokens),
        ttft=tuple(timed.chunks_s[0] for timed in good),
        e2e=tuple(timed.seconds for timed in good),
        tpot=tuple((timed.chunks_s[-1] - timed.chunks_s[0]) / (count - 1) for timed, count in zip(good, tokens, strict=True) if count > 1),
        prompt_tokens=good[0].answer.prompt_tokens if good else None,
        error=next((said for timed in answers if (said := problem(timed)) is not None), None),
    )
