"""Calls of an engine in this process, timed: the same requests for every engine, nothing but the engine inside the clock."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from qvlopt.artifact.digest import sha256_file
from qvlopt.data.samples import ImageRef, Sample
from qvlopt.errors import ItemError
from qvlopt.model.prompt import PICTURE_MARK, Prompter
from qvlopt.runtime.engine import Answer, OnStage, Prepared
from qvlopt.timing.stages import CallTimes, Clock, StageRecorder, call_times
from qvlopt.timing.waiting import waited_seconds
from qvlopt.timing.workload import prompt_of

PICTURE_MARKS = 2
"""Tokens that Qwen3-VL's chat template puts around a picture: its start and its end."""


@dataclasses.dataclass(frozen=True)
class Request:
    """One request: a picture file, the seed of its prompt, the prompt's tokens (template included, picture not), new tokens.

    `picture_last` puts the picture behind the text, so that the prompt begins like no other though its picture is known.
    """

    id: str
    picture: str
    prompt_seed: tuple[int, ...]
    prompt_tokens: int
    new_tokens: int
    picture_last: bool = False


def request_from_json(values: Mapping[str, Any]) -> Request:
    """The request of `dataclasses.asdict`."""
    return Request(**{**values, "prompt_seed": tuple(values["prompt_seed"])})


class TimedEngine(Protocol):
    """What is timed: a `runtime.engine.LocalEngine` that tells its stages and whose prompter says what ends an answer."""

    on_stage: OnStage | None
    prompter: Prompter

    def prepare(self, sample: Sample) -> Prepared: ...

    def generate(self, prepared: Sequence[Prepared], *, max_new_tokens: int) -> list[Answer]: ...


class Session:
    """Times calls of one engine. Answers have a fixed length: from now on nothing ends one early."""

    def __init__(self, engine: TimedEngine, clock: Clock, *, waited: Callable[[], float | None] = waited_seconds) -> None:
        self._engine = engine
        self._waited = waited
        self._recorder = StageRecorder(clock)
        self._prompter = engine.prompter
        engine.prompter = dataclasses.replace(engine.prompter, eos_ids=())
        engine.on_stage = self._recorder

    def call(self, requests: Sequence[Request]) -> CallTimes:
        """Prepares and answers all requests at once. What goes wrong with one is the call's `error`; its times stay."""
        samples = [sample_of(request, self._count) for request in requests]
        before = self._waited()
        self._recorder.start()
        try:
            prepared = [self._engine.prepare(sample) for sample in samples]
            answers = self._engine.generate(prepared, max_new_tokens=requests[0].new_tokens)
        except ItemError as error:
            return CallTimes(self._recorder.elapsed(), len(requests), 0, (), (), error=error.reason)
        wall, after = self._recorder.elapsed(), self._waited()
        times = call_times(self._recorder.entries, wall, [len(answer.token_ids) for answer in answers])
        pictures = prepared[0].token_ids.count(self._prompter.image_token_id)
        wrong = problem(answers, requests[0].new_tokens)
        # a thread that ended took its count along
        waited = None if before is None or after is None else max(0.0, after - before)
        return dataclasses.replace(times, prompt_tokens=len(prepared[0].token_ids), picture_tokens=pictures, waited=waited, error=wrong)

    def _count(self, text: str) -> int:
        return len(self._prompter.encode(text)) + PICTURE_MARKS


def sample_of(request: Request, count: Callable[[str], int]) -> Sample:
    """The sample of a request; its picture's digest is known beforehand, as it is of every set."""
    path = Path(request.picture)
    image = ImageRef(path.name, path.parent, sha256_file(path))
    text = prompt_of(request.prompt_tokens, count, request.prompt_seed)
    question = f"{text}{PICTURE_MARK}" if request.picture_last else text
    return Sample(request.id, (image,), question, (), "text", request.id, "bench")


def problem(answers: Sequence[Answer], new_tokens: int) -> str | None:
    """Why a call does not count: an engine's error, an answer without a token, or one of another length than asked for."""
    for answer in answers:
        if answer.error is not None:
            return answer.error
        if not answer.token_ids:
            return "an answer without a single token"
        if len(answer.token_ids) != new_tokens:
            return f"an answer of {len(answer.token_ids)} tokens, {new_tokens} were asked for"
    return None
