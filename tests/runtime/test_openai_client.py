"""HTTP to a server that misbehaves: what passes is tried again after a growing wait, what does not is told in words."""

from __future__ import annotations

import threading
import time
from random import Random
from typing import Any

import pytest

from qvlopt.errors import UsageError
from qvlopt.runtime.openai_address import Address
from qvlopt.runtime.openai_client import LONGEST_WAIT_S, Client, Reply, Trouble
from tests.servers import Behaviour, Chunked, Handler, completion, cut, delta, hang_up, refuse, say, send, serving

KEY = "secret-key-123"


def client(url: str, *, waits: list[float] | None = None, **values: Any) -> Client:
    kept: list[float] = [] if waits is None else waits
    usual: dict[str, Any] = {"timeout_s": 20.0, "retries": 3, "key": KEY, "sleep": kept.append, "random": Random(0)}
    return Client(Address.parse(url), **usual | values)


def ask(*script: Behaviour, **values: Any) -> Reply | Trouble:
    with serving(*script) as server:
        return client(server.url, **values).request("/chat/completions", {"messages": [{"content": [{"type": "text", "text": "hi"}]}]})


def trouble(*script: Behaviour, **values: Any) -> Trouble:
    outcome = ask(*script, **values)
    assert isinstance(outcome, Trouble)
    return outcome


@pytest.mark.parametrize(
    ("target", "url", "model"),
    [
        ("http://localhost:8000/v1#m", "http://localhost:8000/v1", "m"),
        ("http://localhost:8000", "http://localhost:8000/v1", ""),
        ("https://api.example/", "https://api.example:443/v1", ""),
        ("http://h/v1/chat/completions#org/name", "http://h:80/v1", "org/name"),
        ("http://[::1]:9/openai/v1/", "http://[::1]:9/openai/v1", ""),
    ],
)
def test_targets_are_a_url_and_a_model(target: str, url: str, model: str) -> None:
    address = Address.parse(target)
    assert (address.url, address.model) == (url, model)


@pytest.mark.parametrize("target", ["ftp://x/v1", "http:///v1#m", "localhost:8000#m", "http://h:99999/v1"])
def test_what_is_no_url_is_refused(target: str) -> None:
    with pytest.raises(UsageError) as error:
        Address.parse(target)
    assert "http://localhost:8000/v1#model-name" in str(error.value)


@pytest.mark.parametrize("target", [f"http://user:{KEY}@h/v1", f"http://{KEY}@h/v1", f"https://h/v1?api_key={KEY}"])
def test_secrets_in_a_url_are_refused_and_not_repeated(target: str) -> None:
    with pytest.raises(UsageError, match="QVLOPT_API_KEY") as error:
        Address.parse(target)
    assert KEY not in str(error.value)


@pytest.mark.parametrize(("host", "stays"), [("localhost", True), ("127.0.0.3", True), ("[::1]", True), ("10.0.0.1", False), ("gpu.example", False)])
def test_it_is_known_whether_pictures_leave_the_machine(host: str, stays: bool) -> None:
    assert Address.parse(f"http://{host}:1/v1").is_this_machine is stays


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504])
def test_passing_trouble_is_tried_again(status: int) -> None:
    waits: list[float] = []
    outcome = ask(refuse(status), refuse(status), say("there"), waits=waits)
    assert isinstance(outcome, Reply)
    assert outcome.document == completion("there")
    assert len(waits) == 2
    assert 0.25 <= waits[0] <= 0.5 <= waits[1] <= 1.0


@pytest.mark.parametrize("fault", [cut, hang_up])
def test_a_connection_that_is_cut_is_tried_again(fault: Behaviour) -> None:
    assert isinstance(ask(fault, say("there")), Reply)


@pytest.mark.parametrize("status", [400, 401, 403, 404, 413, 422, 301, 307])
def test_what_cannot_pass_is_asked_once(status: int) -> None:
    with serving(usual=refuse(status, "the reason", Location="http://elsewhere/")) as server:
        outcome = client(server.url).request("/chat/completions", {})
        assert len(server.seen) == 1
    assert isinstance(outcome, Trouble)
    assert (outcome.status, outcome.reason) == (status, f"status {status}: the reason")


def test_retries_end() -> None:
    with serving(usual=refuse(503, "loading")) as server:
        outcome = client(server.url, retries=2).request("/chat/completions", {})
        assert len(server.seen) == 3
    assert isinstance(outcome, Trouble)
    assert outcome.reason == "status 503: loading"


@pytest.mark.parametrize(("after", "expected"), [("7", 7.0), ("0", 0.5), ("99999", LONGEST_WAIT_S), ("soon", 0.5)])
def test_the_servers_word_on_when_to_come_back_is_kept(after: str, expected: float) -> None:
    waits: list[float] = []
    ask(refuse(429, Retry_After=after), say("there"), waits=waits)
    assert waits[0] == expected if expected > 1 else 0.25 <= waits[0] <= expected


def test_a_date_to_come_back_at_is_understood() -> None:
    waits: list[float] = []
    date = time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime(time.time() + 30))
    ask(refuse(503, Retry_After=date), say("there"), waits=waits)
    assert 20 < waits[0] <= 30


def test_waits_grow_and_differ_by_chance() -> None:
    with serving(usual=refuse(500)) as server:
        all_waits: list[list[float]] = [[], []]
        for seed, waits in enumerate(all_waits):
            client(server.url, waits=waits, retries=8, random=Random(seed)).request("/x", {})
    assert all_waits[0] != all_waits[1]
    for waits in all_waits:
        assert all(2**n * 0.25 <= wait <= min(60.0, 2**n * 0.5) for n, wait in enumerate(waits))


def test_a_server_that_is_too_slow_is_given_up() -> None:
    over = threading.Event()
    outcome = trouble(lambda _handler: over.wait(10), retries=0, timeout_s=0.2)
    over.set()
    assert outcome.reason == "no full reply within 0.2 s (server.timeout_s)"


def test_one_byte_at_a_time_is_too_slow_as_well() -> None:
    def drip(handler: Handler) -> None:
        handler.send_response(200)
        handler.send_header("Content-Length", "1000")
        handler.end_headers()
        for _ in range(200):
            handler.wfile.write(b" ")
            handler.wfile.flush()
            time.sleep(0.02)

    assert "no full reply" in trouble(drip, retries=0, timeout_s=0.3).reason


def test_nobody_there_is_told_with_the_address() -> None:
    with serving() as server:
        url = server.url
    outcome = client(url, retries=1).request("/models")
    assert isinstance(outcome, Trouble)
    assert outcome.status is None
    assert url in outcome.reason
    assert "refused" in outcome.reason


@pytest.mark.parametrize(
    ("data", "kind", "said"),
    [
        (b"<html>gateway</html>", "text/html", "no JSON but text/html: <html>gateway</html>"),
        (b'{"choices": [', "application/json", "no JSON but application/json"),
        (b"[1, 2]", "application/json", "no JSON object: [1, 2]"),
        (b"", "application/json", "nothing was said"),
        (b"\xff\xfe" + b"x" * 1000, "application/json", "..."),
    ],
)
def test_a_reply_that_is_no_json_fails_with_its_beginning(data: bytes, kind: str, said: str) -> None:
    outcome = trouble(lambda handler: send(handler, data, kind=kind))
    assert said in outcome.reason
    assert len(outcome.reason) < 500


@pytest.mark.parametrize("document", [{"error": "words"}, {"error": {"message": "words"}}, {"detail": "words"}, {"message": "words"}])
def test_the_servers_words_are_found(document: Any) -> None:
    assert trouble(lambda handler: send(handler, document, status=400)).reason == "status 400: words"


def test_the_key_is_sent_and_never_shown() -> None:
    with serving(refuse(401, f"Incorrect API key provided: {KEY}. You can find")) as server:
        ours = client(server.url)
        outcome = ours.request("/chat/completions", {})
        assert server.seen[0][2]["Authorization"] == f"Bearer {KEY}"
    assert isinstance(outcome, Trouble)
    assert outcome.reason == "status 401: Incorrect API key provided: [the key]. You can find"
    assert KEY not in repr(ours)


def test_without_a_key_none_is_sent() -> None:
    with serving(say("x")) as server:
        client(server.url, key=None).request("/chat/completions", {"messages": []})
        assert "Authorization" not in server.seen[0][2]


def test_a_stream_is_read_with_the_times_of_its_events() -> None:
    outcome = ask(Chunked([": comment", delta("a"), delta("b", finish="stop")]))
    assert isinstance(outcome, Trouble), "an event that is no JSON"
    outcome = ask(Chunked([delta("a"), delta("b", finish="stop")]))
    assert isinstance(outcome, Reply)
    assert [event for _, event in outcome.events] == [delta("a"), delta("b", finish="stop")]
    times = [when for when, _ in outcome.events]
    assert 0 < times[0] <= times[1] <= outcome.seconds


def test_a_stream_that_is_cut_is_tried_again() -> None:
    outcome = ask(Chunked([delta("a")], is_cut=True), Chunked([delta("b")]))
    assert isinstance(outcome, Reply)
    assert [event for _, event in outcome.events] == [delta("b")]


def test_a_stream_may_end_after_a_finished_choice() -> None:
    assert isinstance(ask(Chunked([delta("a"), delta(finish="stop")], is_cut=True), retries=0), Reply)


def test_an_error_within_a_stream_is_one() -> None:
    assert "out of memory" in trouble(Chunked([delta("a"), {"error": {"message": "out of memory"}}])).reason


def test_closing_ends_what_is_under_way() -> None:
    arrived, over = threading.Event(), threading.Event()

    def never(_handler: Handler) -> None:
        arrived.set()
        over.wait(20)

    with serving(usual=never) as server:
        ours = client(server.url, retries=5)
        outcomes: list[Reply | Trouble] = []
        thread = threading.Thread(target=lambda: outcomes.append(ours.request("/chat/completions", {})))
        thread.start()
        assert arrived.wait(10)
        ours.close()
        thread.join(timeout=10)
        over.set()
        assert len(server.posts()) == 1
    assert isinstance(outcomes[0], Trouble)
    assert isinstance(ours.request("/models"), Trouble)


def test_a_proxy_of_the_environment_is_not_used_for_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    assert isinstance(ask(say("x")), Reply)
    assert client("http://gpu.example:8000/v1")._connection().host == "127.0.0.1"
    monkeypatch.setenv("no_proxy", "gpu.example")
    assert client("http://gpu.example:8000/v1")._connection().host == "gpu.example"


def test_a_host_that_cannot_be_a_name_is_trouble_and_no_crash() -> None:
    outcome = client(f"http://{'a' * 80}.example/v1", retries=0).request("/models")
    assert isinstance(outcome, Trouble)
    assert outcome.status is None
