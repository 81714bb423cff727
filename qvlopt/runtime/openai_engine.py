"""The engine behind a URL: any OpenAI-compatible server with vision, such as vLLM, SGLang, llama-server or transformers serve.

Every picture is sent as it is in the set, upright and in RGB, as a PNG in a data URL: the server resizes, normalises and
patches by the rules that it was started with, and those are part of what is measured. Tokens are chosen greedily as far
as the protocol can say it: temperature 0, a fixed seed, no penalty. A server gives no logits and no features, so damage
is measured on local engines only.
"""

from __future__ import annotations

import base64
import io
import logging
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from PIL.Image import Image

from qvlopt.data.samples import Sample
from qvlopt.errors import RunError, UsageError
from qvlopt.model.preprocess import Picture
from qvlopt.model.prompt import arrange
from qvlopt.recipe.load import LoadedRecipe
from qvlopt.recipe.schema import ServerSection
from qvlopt.runtime.engine import SERVERS_OWN, Answer, Prepared, Stop
from qvlopt.runtime.openai_address import Address
from qvlopt.runtime.openai_client import Client, Reply, Trouble

log = logging.getLogger(__name__)

KEY = "QVLOPT_API_KEY"
"""The only place where a key is read from."""

OPTIONAL: dict[str, Any] = {"repetition_penalty": 1.0}
"""Sent to overrule a checkpoint's generation_config where the server knows the field, left out where it refuses it."""

STREAMED: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}

WRONG_FIELD = (400, 422)
"""Statuses by which servers refuse a field that they do not know; also those of an item that they cannot take."""

NOT_FOUND = 404
HOPELESS = {
    401: f"set {KEY} to a key that it takes",
    403: f"set {KEY} to a key that may use this model",
    NOT_FOUND: "check the URL and the model's name",
}
"""Statuses that every item would get, and what to do."""

STOPS: dict[str | None, Stop] = {"stop": "eos", "length": "length", None: "eos"}

ROUNDS = 2
"""Requests for each place of `concurrency` in one group: more leave fewer places idle at its end, and hold more pictures in memory."""


@dataclass(frozen=True)
class Asked(Prepared):
    """A sample ready to be sent: its message. Ids, patches and positions are the server's business and empty here."""

    content: tuple[Mapping[str, Any], ...]


@dataclass(frozen=True)
class TimedAnswer:
    """An answer and when it came, in seconds since the request began to be sent; connecting is not counted.

    `chunks_s` are the arrivals of the chunks with text: the first is the time to first token as a client sees it. A server
    may put several tokens into a chunk, so time per token is (last - first) / (new tokens - 1). Empty after a failure.
    """

    answer: Answer
    chunks_s: tuple[float, ...]
    seconds: float


class OpenAIEngine:
    """An `Engine` over HTTP that answers `concurrency` items at once. No `LocalEngine`: it has no `score` and no `encode`."""

    def __init__(self, client: Client, model: str, *, concurrency: int, seed: int, about: Mapping[str, Any] | None = None) -> None:
        self.client = client
        self.model = model
        self.concurrency = concurrency
        self.seed = seed
        self._about = dict(about or {})
        self._refused: set[str] = set()
        self._warned = False
        self._pool = ThreadPoolExecutor(concurrency, thread_name_prefix="qvlopt-openai")

    @classmethod
    def open(cls, target: str, *, loaded: LoadedRecipe, client: Client | None = None) -> OpenAIEngine:
        """Connects to `URL#model`; without `#model` the recipe's `evaluate.server.model`, else the only one that is served.

        Raises UsageError for a wrong URL or model and for pixel limits, which only the server's start can set; RunError
        when nothing answers there or the key is refused.
        """
        server = loaded.recipe.evaluate.server
        if loaded.recipe.pixels is not None:
            raise UsageError("pixels: a server prepares its pictures itself", "set the limits where it is started, and leave pixels out")
        client = client or _client(Address.parse(target), server)
        served = _served(client)
        model = client.address.model or server.model or _only(served, client.address.url)
        # a model that is not listed may still be loaded when it is asked for, as transformers serve does
        about = {"owned_by": served.get(model, {}).get("owned_by"), "served": sorted(served)}
        return cls(client, model, concurrency=server.concurrency, seed=loaded.recipe.seed, about=about)

    @property
    def fingerprint(self) -> dict[str, Any]:
        """JSON values. What only the server knows is SERVERS_OWN, which says neither like nor unlike."""
        return {
            "engine": "openai",
            "server": self.client.address.url,
            "model": self.model,
            "model_digest": None,
            "dtype": SERVERS_OWN,
            "device": SERVERS_OWN,
            "pixels": SERVERS_OWN,
            "generation": {"sampling": "greedy", "penalties": None, "eos_ids": SERVERS_OWN},
            "seed": self.seed,
            "concurrency": self.concurrency,
            "fields_refused": sorted(self._refused),
            **self._about,
        }

    @property
    def group(self) -> int:
        """How many items to hand over at once so that every place is busy."""
        return self.concurrency * ROUNDS

    def prepare(self, sample: Sample) -> Asked:
        """Loads the pictures and writes the message. Raises ItemError for a picture that cannot be read."""
        images = [image.load() for image in sample.images]
        kinds, texts = arrange(sample.question, len(images))
        if "<|" in sample.question and not self._warned:
            self._warned = True
            log.warning("%s: a question holds <|, which the server may take for a special token", sample.id)
        pictures, pieces = iter(images), iter(texts)
        content = tuple(_picture_part(next(pictures)) if kind else {"type": "text", "text": next(pieces)} for kind in kinds)
        sizes = tuple(Picture(torch.empty(0), (0, 0), image.size) for image in images)
        return Asked(sample.id, (), sizes, torch.zeros((3, 0), dtype=torch.int64), 0, content)

    def generate(self, prepared: Sequence[Prepared], *, max_new_tokens: int) -> list[Answer]:
        """Answers in the order of `prepared`, `concurrency` at once. Raises RunError when no item could get an answer."""
        futures = [self._pool.submit(self._ask, item, max_new_tokens) for item in prepared]
        try:
            return [future.result() for future in futures]
        finally:
            for future in futures:
                future.cancel()

    def stream(self, item: Prepared, *, max_new_tokens: int, extra: Mapping[str, Any] | None = None) -> TimedAnswer:
        """One answer as a stream, in the caller's thread. `extra` are further fields, such as vLLM's `ignore_eos: true`."""
        outcome = self._send(item, {**self._fields(max_new_tokens), **STREAMED, **(extra or {})})
        if isinstance(outcome, Trouble):
            return TimedAnswer(self._failed(item, outcome), (), 0.0)
        if not outcome.events:
            return TimedAnswer(_error(item, "the server sent no stream"), (), 0.0)
        choices = [(when, choice) for when, event in outcome.events for choice in event.get("choices") or ()]
        texts = [(when, str((choice.get("delta") or {}).get("content") or "")) for when, choice in choices]
        usage: Mapping[str, Any] = next((event["usage"] for _, event in reversed(outcome.events) if event.get("usage")), {})
        finish = next((choice["finish_reason"] for _, choice in reversed(choices) if choice.get("finish_reason")), None)
        answer = _answer(item, "".join(text for _, text in texts), finish, usage)
        return TimedAnswer(answer, tuple(when for when, text in texts if text), outcome.seconds)

    def close(self) -> None:
        """Ends what is under way."""
        self.client.close()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _fields(self, max_new_tokens: int) -> dict[str, Any]:
        return {"model": self.model, "temperature": 0, "top_p": 1, "seed": self.seed, "max_tokens": max_new_tokens, **OPTIONAL}

    def _ask(self, item: Prepared, max_new_tokens: int) -> Answer:
        outcome = self._send(item, self._fields(max_new_tokens))
        if isinstance(outcome, Trouble):
            return self._failed(item, outcome)
        try:
            choice = outcome.document["choices"][0]
            text = choice["message"]["content"]
        except (KeyError, IndexError, TypeError):
            return _error(item, "the reply is JSON, but no chat completion with a message")
        if text is not None and not isinstance(text, str):
            return _error(item, "the reply's message is no text")
        return _answer(item, text or "", choice.get("finish_reason"), outcome.document.get("usage") or {})

    def _send(self, item: Prepared, fields: Mapping[str, Any]) -> Reply | Trouble:
        """Posts, and once more without a field that the server refuses by its name."""
        if not isinstance(item, Asked):
            raise TypeError(f"{type(item).__name__} was not prepared by this engine")
        optional = [*OPTIONAL, "stream_options"]
        while True:
            body = {key: value for key, value in fields.items() if key not in self._refused}
            body["messages"] = [{"role": "user", "content": list(item.content)}]
            outcome = self.client.request("/chat/completions", body)
            blamed = [key for key in optional if key in body and isinstance(outcome, Trouble) and key in outcome.reason]
            if not blamed or not isinstance(outcome, Trouble) or outcome.status not in WRONG_FIELD:
                return outcome
            self._refused.update(blamed)

    def _failed(self, item: Prepared, trouble: Trouble) -> Answer:
        """The item's failure. Raises RunError when all others would fail as well: refused, or nobody there any more."""
        if trouble.status in HOPELESS:
            names = ", ".join(self._about.get("served", ())) if trouble.status == NOT_FOUND else ""
            raise RunError(
                f"{self.client.address.url} refused {self.model}: {trouble.reason}",
                f"{HOPELESS[trouble.status]}; it lists {names}" if names else HOPELESS[trouble.status],
            )
        if trouble.status is None:
            probe = self.client.request("/models", retries=0)
            if isinstance(probe, Trouble) and probe.status is None:
                raise RunError(f"the server does not answer any more: {trouble.reason}", "start it again; it may have run out of memory")
        return _error(item, trouble.reason)


def _client(address: Address, server: ServerSection) -> Client:
    key = os.environ.get(KEY, "").strip() or None
    if key and not (key.isascii() and key.isprintable()):
        raise UsageError(f"{KEY} holds characters that cannot be sent", "set it again; it is not shown here")
    if key and address.scheme == "http" and not address.is_this_machine:
        log.warning("%s: the key travels unencrypted over http", address.url)
    return Client(address, server.timeout_s, server.retries, key)


def _served(client: Client) -> dict[str, Mapping[str, Any]]:
    """What the server says it serves, by name; nothing where it has no such list. Raises RunError when it cannot be reached."""
    outcome = client.request("/models")
    if isinstance(outcome, Trouble):
        if outcome.status is None or outcome.status in (401, 403):
            hint = HOPELESS.get(outcome.status or 0, "start the server, or correct the URL")
            where = "" if outcome.status is None else f"{client.address.url}: "
            raise RunError(f"no model can be asked: {where}{outcome.reason}", hint)
        return {}
    models = outcome.document.get("data")
    return {str(model["id"]): model for model in models if isinstance(model, dict) and "id" in model} if isinstance(models, list) else {}


def _only(served: Mapping[str, Any], url: str) -> str:
    if len(served) == 1:
        return next(iter(served))
    what = f"it serves {', '.join(served)}" if served else "it does not say what it serves"
    raise UsageError(f"{url}: no model is named, and {what}", f"name it as {url}#model")


def _picture_part(image: Image) -> dict[str, Any]:
    stream = io.BytesIO()
    image.save(stream, "PNG", compress_level=1)  # no loss at any level; the network is faster than a better one
    url = "data:image/png;base64," + base64.b64encode(stream.getvalue()).decode("ascii")
    return {"type": "image_url", "image_url": {"url": url}}


def _answer(item: Prepared, text: str, finish: object, usage: Mapping[str, Any]) -> Answer:
    if finish is not None and finish not in STOPS:
        return _error(item, f"the server ended the answer by {finish!r}")
    counts = [value if isinstance(value := usage.get(key), int) else None for key in ("prompt_tokens", "completion_tokens")]
    return Answer(item.id, (), text, STOPS[finish if isinstance(finish, str) else None], counts[0] or 0, new_tokens=counts[1])


def _error(item: Prepared, reason: str) -> Answer:
    return Answer(item.id, (), "", "error", 0, reason)
