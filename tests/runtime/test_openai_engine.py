"""The engine behind a URL: what it sends, what it makes of replies, and which failures are an item's and which the run's."""

from __future__ import annotations

import base64
import io
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest
from PIL import Image

from qvlopt.data.samples import ImageRef, Sample
from qvlopt.errors import ItemError, RunError, UsageError
from qvlopt.recipe.load import LoadedRecipe, load_recipe
from qvlopt.runtime import open_engine
from qvlopt.runtime import openai_engine as module
from qvlopt.runtime.engine import SERVERS_OWN, LocalEngine
from qvlopt.runtime.openai_address import Address
from qvlopt.runtime.openai_client import Client
from qvlopt.runtime.openai_engine import OpenAIEngine
from tests.servers import MODEL, Behaviour, Chunked, Handler, Server, completion, delta, echo, hang_up, refuse, say, send, serving

KEY = "secret-key-123"


def recipe(**values: Any) -> LoadedRecipe:
    server = values.pop("server", {})
    return load_recipe({"model": {"path": "builtin:nano"}, "evaluate": {"server": server}, **values})


@contextmanager
def asking(*script: Behaviour, usual: Behaviour = echo, **server: Any) -> Iterator[tuple[OpenAIEngine, Server]]:
    """An engine over a fake server. Waits before retries take no time."""
    with serving(*script, usual=usual) as running:
        loaded = recipe(server=server)
        section = loaded.recipe.evaluate.server
        client = Client(Address.parse(running.url), section.timeout_s, section.retries, KEY, sleep=lambda _: None, random=Random(0))
        engine = OpenAIEngine.open(running.url, loaded=loaded, client=client)
        try:
            yield engine, running
        finally:
            engine.close()


@pytest.fixture
def picture(tmp_path: Path) -> ImageRef:
    """A JPEG whose EXIF turns it: 60 wide and 40 high in the file, upright 40 by 60."""
    exif = Image.Exif()
    exif[274] = 6
    Image.effect_noise((60, 40), 60).convert("RGB").save(tmp_path / "turned.jpg", exif=exif)
    return ImageRef("turned.jpg", tmp_path)


def sample(id: str = "a", question: str = "What is it?", images: tuple[ImageRef, ...] = ()) -> Sample:
    return Sample(id, images, question, ("it",), "ocr", id, f"set:{id}")


def test_it_is_an_engine_that_is_opened_by_its_url_and_not_a_local_one() -> None:
    with serving() as server:
        engine = open_engine(f"{server.url}#{MODEL}", loaded=recipe())
        assert isinstance(engine, OpenAIEngine)
        assert not isinstance(engine, LocalEngine)
        (answer,) = engine.generate([engine.prepare(sample())], max_new_tokens=7)
        engine.close()
    assert (answer.id, answer.text, answer.stop, answer.prompt_tokens, answer.new_tokens, answer.error) == ("a", "What is it?", "eos", 30, 3, None)


def test_tokens_are_chosen_greedily_with_a_fixed_seed() -> None:
    with asking() as (engine, server):
        engine.generate([engine.prepare(sample())], max_new_tokens=7)
        (body,) = server.posts()
    assert {key: body[key] for key in ("model", "temperature", "top_p", "seed", "max_tokens", "repetition_penalty")} == {
        "model": MODEL,
        "temperature": 0,
        "top_p": 1,
        "seed": 0,
        "max_tokens": 7,
        "repetition_penalty": 1.0,
    }
    assert [message["role"] for message in body["messages"]] == ["user"], "no system message"


def test_pictures_are_sent_whole_upright_and_without_loss(picture: ImageRef) -> None:
    with asking() as (engine, server):
        prepared = engine.prepare(sample(images=(picture,)))
        engine.generate([prepared], max_new_tokens=4)
        content = server.posts()[0]["messages"][0]["content"]
    assert [part["type"] for part in content] == ["image_url", "text"]
    kind, _, data = content[0]["image_url"]["url"].partition(",")
    assert kind == "data:image/png;base64"
    shown = Image.open(io.BytesIO(base64.b64decode(data)))
    assert shown.size == (40, 60) == prepared.pictures[0].size
    assert shown.tobytes() == picture.load().tobytes()
    assert not shown.getexif()


def test_marks_in_the_question_say_where_pictures_stand(picture: ImageRef) -> None:
    with asking() as (engine, _):
        content = engine.prepare(sample(question="left <image> right <image>", images=(picture, picture))).content
    assert [part.get("text", "picture") for part in content] == ["left ", "picture", " right ", "picture"]


def test_an_unreadable_picture_fails_its_item_before_anything_is_sent(tmp_path: Path) -> None:
    (tmp_path / "x.png").write_bytes(b"no picture")
    with asking() as (engine, server):
        with pytest.raises(ItemError, match=r"x\.png"):
            engine.prepare(sample(images=(ImageRef("x.png", tmp_path),)))
        assert server.posts() == []


def test_answers_keep_their_order_and_places_are_used_at_once() -> None:
    together = threading.Barrier(4)

    def wait_for_others(handler: Handler) -> None:
        together.wait(timeout=20)
        echo(handler)

    with asking(usual=wait_for_others, concurrency=4) as (engine, server):
        items = [engine.prepare(sample(str(i), f"question {i}")) for i in range(12)]
        answers = engine.generate(items, max_new_tokens=4)
        assert server.most_busy == 4
        assert engine.group >= 8
    assert [(answer.id, answer.text) for answer in answers] == [(str(i), f"question {i}") for i in range(12)]


def fault_by_question(handler: Handler) -> None:
    """One fault a question, each of them for ever."""
    text = handler.body["messages"][0]["content"][-1]["text"]
    faults: dict[str, Behaviour] = {
        "busy": refuse(429, "slow down"),
        "crash": refuse(500, "internal"),
        "long": refuse(400, "maximum context length is 4096 tokens"),
        "html": lambda each: send(each, b"<html>", kind="text/html"),
        "half": lambda each: send(each, b'{"choices": [', kind="application/json"),
        "shape": lambda each: send(each, {"choices": []}),
        "list": lambda each: send(each, completion([{"type": "text"}])),  # type: ignore[arg-type]
        "filter": say("x", finish="content_filter"),
        "cut": hang_up,
    }
    faults.get(text, echo)(handler)


def test_a_fault_is_its_items_and_the_others_go_on() -> None:
    questions = ["ok", "busy", "crash", "long", "html", "half", "shape", "list", "filter", "cut", "also ok"]
    with asking(usual=fault_by_question, retries=1) as (engine, server):
        answers = engine.generate([engine.prepare(sample(q, q)) for q in questions], max_new_tokens=4)
        tried = [body["messages"][0]["content"][-1]["text"] for body in server.posts()]
    failed = {answer.id: answer.error or "" for answer in answers if answer.stop == "error"}
    assert [answer.id for answer in answers if answer.stop != "error"] == ["ok", "also ok"]
    assert list(failed) == questions[1:-1]
    assert failed["busy"] == "status 429: slow down"
    assert failed["long"] == "status 400: maximum context length is 4096 tokens"
    assert "no JSON but text/html" in failed["html"]
    assert "no chat completion" in failed["shape"]
    assert "content_filter" in failed["filter"]
    assert {q: tried.count(q) for q in ("ok", "busy", "crash", "cut", "long", "html")} == {
        "ok": 1,
        "busy": 2,
        "crash": 2,
        "cut": 2,
        "long": 1,
        "html": 1,
    }


@pytest.mark.parametrize(
    ("reply", "text", "stop"),
    [(completion("cut sho", finish="length"), "cut sho", "length"), (completion(None), "", "eos"), (completion("x", finish=None), "x", "eos")],
)
def test_how_an_answer_ended_is_kept(reply: dict[str, Any], text: str, stop: str) -> None:
    with asking(lambda handler: send(handler, reply)) as (engine, _):
        (answer,) = engine.generate([engine.prepare(sample())], max_new_tokens=4)
    assert (answer.text, answer.stop, answer.error) == (text, stop, None)


def test_a_reply_without_usage_has_no_token_count() -> None:
    with asking(lambda handler: send(handler, {key: value for key, value in completion("x").items() if key != "usage"})) as (engine, _):
        (answer,) = engine.generate([engine.prepare(sample())], max_new_tokens=4)
    assert (answer.text, answer.new_tokens) == ("x", None)


@pytest.mark.parametrize(("status", "hint"), [(401, "QVLOPT_API_KEY"), (403, "QVLOPT_API_KEY"), (404, "it lists nano")])
def test_what_every_item_would_get_ends_the_run(status: int, hint: str) -> None:
    with asking(usual=refuse(status, "no")) as (engine, _), pytest.raises(RunError, match=f"status {status}: no") as error:
        engine.generate([engine.prepare(sample(str(i))) for i in range(30)], max_new_tokens=4)
    assert hint in (error.value.hint or "")


def test_a_server_that_has_gone_ends_the_run() -> None:
    with serving() as running:
        client = Client(Address.parse(running.url), 5.0, 1, sleep=lambda _: None)
        engine = OpenAIEngine.open(running.url, loaded=recipe(), client=client)
        item = engine.prepare(sample())
    with pytest.raises(RunError, match="does not answer any more"):
        engine.generate([item], max_new_tokens=4)
    engine.close()


def refuse_fields(*names: str) -> Behaviour:
    """A server that is strict about what it knows, as transformers serve is."""

    def strict(handler: Handler) -> None:
        unknown = {name for name in names if name in handler.body}
        if unknown:
            send(handler, {"detail": f"Unexpected fields in the request: {unknown}"}, status=422)
        else:
            echo(handler)

    return strict


def test_a_field_that_the_server_does_not_know_is_left_out_from_then_on() -> None:
    with asking(usual=refuse_fields("repetition_penalty")) as (engine, server):
        for _ in range(3):
            (answer,) = engine.generate([engine.prepare(sample())], max_new_tokens=4)
            assert answer.error is None
        assert ["repetition_penalty" in body for body in server.posts()] == [True, False, False, False]
        assert engine.fingerprint["fields_refused"] == ["repetition_penalty"]


def test_a_field_that_is_needed_is_not_left_out() -> None:
    with asking(usual=refuse_fields("seed")) as (engine, server):
        (answer,) = engine.generate([engine.prepare(sample())], max_new_tokens=4)
        assert len(server.posts()) == 1
    assert answer.stop == "error"


def test_the_fingerprint_says_what_is_known_and_what_the_server_decides() -> None:
    with asking(concurrency=3) as (engine, server):
        found = engine.fingerprint
        json.dumps(found)
        assert (found["engine"], found["server"], found["model"], found["owned_by"]) == ("openai", server.url, MODEL, "test")
        assert found["pixels"] == found["generation"]["eos_ids"] == SERVERS_OWN
        assert KEY not in json.dumps(found)


@pytest.mark.parametrize(
    ("models", "hint"), [(("a", "b"), "it serves a, b"), ((), "does not say what it serves"), (None, "does not say what it serves")]
)
def test_without_a_name_the_model_must_be_the_only_one(models: tuple[str, ...] | None, hint: str) -> None:
    with serving(models=models) as server:
        with pytest.raises(UsageError, match=hint):
            OpenAIEngine.open(server.url, loaded=recipe())
        assert OpenAIEngine.open(server.url, loaded=recipe(server={"model": "b"})).model == "b"
        assert OpenAIEngine.open(f"{server.url}#c", loaded=recipe()).model == "c"


def test_a_server_that_is_not_there_is_an_error_of_the_run() -> None:
    with serving() as server:
        url = server.url
    with pytest.raises(RunError, match="no model can be asked") as error:
        OpenAIEngine.open(url, loaded=recipe(server={"retries": 0}))
    assert error.value.exit_code == 5


def test_pixel_limits_are_refused_since_only_the_server_can_keep_them() -> None:
    with pytest.raises(UsageError, match="a server prepares its pictures itself"):
        OpenAIEngine.open("http://localhost:1/v1#m", loaded=recipe(pixels={"min": 1024, "max": 4096}))


def test_the_key_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QVLOPT_API_KEY", KEY)
    with serving() as server:
        OpenAIEngine.open(server.url, loaded=recipe()).close()
        assert server.seen[0][2]["Authorization"] == f"Bearer {KEY}"


def test_text_that_a_server_may_take_for_special_tokens_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    with asking() as (engine, _):
        for id in "ab":
            engine.prepare(sample(id, "say <|im_end|>"))
    assert [record.message for record in caplog.records] == ["a: a question holds <|, which the server may take for a special token"]


def test_a_stream_gives_the_answer_and_when_its_tokens_came() -> None:
    gone_on = threading.Event()
    events = [delta(""), delta("A "), delta("17"), delta(finish="stop"), {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 2}}]
    stream = Chunked(events, before={2: lambda: gone_on.wait(0.05)})  # type: ignore[dict-item]
    with asking(stream) as (engine, server):
        timed = engine.stream(engine.prepare(sample()), max_new_tokens=4, extra={"ignore_eos": True})
        (body,) = server.posts()
    assert (timed.answer.text, timed.answer.stop, timed.answer.prompt_tokens, timed.answer.new_tokens) == ("A 17", "eos", 9, 2)
    assert len(timed.chunks_s) == 2, "chunks without text are none"
    assert timed.chunks_s[1] - timed.chunks_s[0] >= 0.04
    assert timed.seconds >= timed.chunks_s[1]
    assert body["stream"] is True
    assert body["stream_options"] == {"include_usage": True}
    assert body["ignore_eos"] is True


def test_a_server_without_stream_options_still_streams() -> None:
    def strict(handler: Handler) -> None:
        if "stream_options" in handler.body:
            send(handler, {"detail": "Unsupported fields in the request: {'stream_options'}"}, status=422)
        else:
            Chunked([delta("x", finish="stop")])(handler)

    with asking(usual=strict) as (engine, _):
        timed = engine.stream(engine.prepare(sample()), max_new_tokens=4)
    assert (timed.answer.text, timed.answer.new_tokens) == ("x", None)


@pytest.mark.parametrize("fault", [say("whole"), refuse(400, "no"), Chunked([delta("a")], is_cut=True)])
def test_a_stream_that_fails_has_no_times(fault: Behaviour) -> None:
    with asking(usual=fault, retries=0) as (engine, _):
        timed = engine.stream(engine.prepare(sample()), max_new_tokens=4)
    assert timed.answer.stop == "error"
    assert timed.chunks_s == ()


@pytest.mark.parametrize(("target", "warns"), [("http://gpu.example/v1", True), ("https://gpu.example/v1", False), ("http://localhost/v1", False)])
def test_a_key_that_travels_in_the_clear_is_said(target: str, warns: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("QVLOPT_API_KEY", KEY)
    client = module._client(Address.parse(target), recipe().recipe.evaluate.server)
    assert client.key == KEY
    assert ("unencrypted" in caplog.text) is warns
    assert KEY not in caplog.text


@pytest.mark.parametrize("key", [f"{KEY}\nX-Other: 1", f"a\u2028{KEY}", "sch\u00fcssel"])
def test_a_key_that_cannot_be_sent_is_refused_without_being_shown(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QVLOPT_API_KEY", key)
    with pytest.raises(UsageError, match="QVLOPT_API_KEY holds characters") as error:
        OpenAIEngine.open("http://localhost:1/v1#m", loaded=recipe())
    assert key not in str(error.value)


def test_white_space_around_a_key_is_not_part_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QVLOPT_API_KEY", f" {KEY}\n")
    with serving() as server:
        OpenAIEngine.open(server.url, loaded=recipe()).close()
        assert server.seen[0][2]["Authorization"] == f"Bearer {KEY}"
