"""A server in this process that answers as a test tells it to: well, slowly, wrongly, or not at all."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Behaviour = Callable[["Handler"], None]
MODEL = "nano"


class Handler(BaseHTTPRequestHandler):
    """One request; `body` is its JSON."""

    protocol_version = "HTTP/1.1"
    server: Server
    body: Any = None

    def do_GET(self) -> None:
        self.server.seen.append(("GET", self.path, dict(self.headers), None))
        if self.server.models is None:
            send(self, {"error": "no such page"}, status=404)
        else:
            send(self, {"object": "list", "data": [{"id": name, "owned_by": "test"} for name in self.server.models]})

    def do_POST(self) -> None:
        self.body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.seen.append(("POST", self.path, dict(self.headers), self.body))
            self.server.busy += 1
            self.server.most_busy = max(self.server.busy, self.server.most_busy)
            behaviour = self.server.script.pop(0) if self.server.script else self.server.usual
        try:
            behaviour(self)
        finally:
            with self.server.lock:
                self.server.busy -= 1

    def log_message(self, *_: object) -> None:
        pass


class Server(ThreadingHTTPServer):
    """`script` is what happens to the first requests, `usual` to all others."""

    daemon_threads = True

    def __init__(self, script: list[Behaviour], usual: Behaviour, models: tuple[str, ...] | None) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.script, self.usual, self.models = script, usual, models
        self.seen: list[tuple[str, str, dict[str, str], Any]] = []
        self.lock = threading.Lock()
        self.busy = self.most_busy = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"

    def posts(self) -> list[Any]:
        return [body for method, _, _, body in self.seen if method == "POST"]

    def handle_error(self, *_: object) -> None:
        pass  # a client that has gone is what some tests are about


@contextmanager
def serving(*script: Behaviour, usual: Behaviour | None = None, models: tuple[str, ...] | None = (MODEL,)) -> Iterator[Server]:
    """A running server; it says the last text of a message unless told otherwise."""
    server = Server(list(script), usual or echo, models)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join(timeout=10)


def send(handler: Handler, document: Any, *, status: int = 200, kind: str = "application/json", headers: Mapping[str, str] | None = None) -> None:
    """A whole reply; `document` is JSON, or bytes as they are."""
    data = document if isinstance(document, bytes) else json.dumps(document).encode()
    handler.send_response(status)
    handler.send_header("Content-Type", kind)
    handler.send_header("Content-Length", str(len(data)))
    for name, value in (headers or {}).items():
        handler.send_header(name, value)
    handler.end_headers()
    handler.wfile.write(data)


def completion(text: str | None, *, finish: str | None = "stop", prompt: int = 30, new: int = 3) -> dict[str, Any]:
    """The reply of a chat completion."""
    message = {"role": "assistant", "content": text}
    usage = {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}
    return {"object": "chat.completion", "choices": [{"index": 0, "message": message, "finish_reason": finish}], "usage": usage}


def say(text: str | None, **values: Any) -> Behaviour:
    return lambda handler: send(handler, completion(text, **values))


def echo(handler: Handler) -> None:
    """Says the last text of the message."""
    texts = [part["text"] for part in handler.body["messages"][0]["content"] if part["type"] == "text"]
    send(handler, completion(texts[-1] if texts else ""))


def refuse(status: int, message: str = "no", **headers: str) -> Behaviour:
    """An error as OpenAI's servers word it."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return lambda handler: send(handler, {"error": {"message": message}}, status=status, headers=named)


def cut(handler: Handler) -> None:
    """Half of a reply, then nothing."""
    handler.send_response(200)
    handler.send_header("Content-Type", "application/json")
    handler.send_header("Content-Length", "1000")
    handler.end_headers()
    handler.wfile.write(b'{"choices": [')
    hang_up(handler)


def hang_up(handler: Handler) -> None:
    """Ends the connection without a word."""
    handler.wfile.flush()
    handler.close_connection = True
    handler.connection.shutdown(socket.SHUT_RDWR)


@dataclass
class Chunked:
    """A stream of server-sent events: `events` as JSON lines, then `[DONE]` unless it is cut."""

    events: list[Any]
    is_cut: bool = False
    before: dict[int, Callable[[], None]] = field(default_factory=dict)

    def __call__(self, handler: Handler) -> None:
        handler.send_response(200)
        handler.send_header("Content-Type", "text/event-stream; charset=utf-8")
        handler.send_header("Connection", "close")
        handler.end_headers()
        for number, event in enumerate(self.events):
            self.before.get(number, lambda: None)()
            text = event if isinstance(event, str) else json.dumps(event)
            handler.wfile.write(f"data: {text}\n\n".encode())
            handler.wfile.flush()
        if not self.is_cut:
            handler.wfile.write(b"data: [DONE]\n\n")
        handler.close_connection = True


def delta(text: str | None = None, *, finish: str | None = None) -> dict[str, Any]:
    """One event of a streamed completion."""
    return {"choices": [{"index": 0, "delta": {} if text is None else {"content": text}, "finish_reason": finish}]}
