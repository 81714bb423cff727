"""HTTP to an OpenAI-compatible server: JSON and event streams, deadlines, retries with backoff. Knows nothing of pictures.

Nothing is raised for what a server does: a request ends as a `Reply` or as `Trouble`, and the engine decides what that
means for an item or for the run. Redirects are not followed, since they could carry the key to another host.
"""

from __future__ import annotations

import http.client
import json
import socket
import ssl
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from random import Random
from typing import Any, NamedTuple
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from qvlopt.runtime.openai_address import Address

RETRIED = frozenset({408, 425, 429, 500, 502, 503, 504, 529})
"""Statuses that may pass: too slow, too early, too many requests, and a server or gateway that is in trouble."""

FIRST_WAIT_S, LONGEST_WAIT_S = 0.5, 60.0
"""The wait before the first retry, which doubles with each, and what no wait exceeds, whatever Retry-After says."""

MOST_BYTES = 64 * 2**20
"""Of a reply; an answer is kilobytes."""

SHOWN = 300
"""Characters of a server's words in a reason."""


class Reply(NamedTuple):
    """A reply of status 200: one JSON object, or the objects of an event stream with the seconds when each arrived.

    Seconds count from when the request began to be sent; connecting is not in them.
    """

    document: Mapping[str, Any]
    events: tuple[tuple[float, Mapping[str, Any]], ...]
    seconds: float


class Trouble(NamedTuple):
    """Why there is no reply, in words. `status` is the server's, None where none came; `can_pass` says that a retry may help."""

    reason: str
    status: int | None
    can_pass: bool
    retry_after_s: float | None = None


@dataclass
class Client:
    """Sends requests to one server from any number of threads. `key` is sent as a bearer token and never shown."""

    address: Address
    timeout_s: float
    retries: int
    key: str | None = field(default=None, repr=False)
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], object] | None = None
    random: Random = field(default_factory=Random, repr=False)
    _closed: threading.Event = field(default_factory=threading.Event, repr=False)
    _open: set[http.client.HTTPConnection] = field(default_factory=set, repr=False)

    def request(self, path: str, body: Mapping[str, Any] | None = None, *, retries: int | None = None) -> Reply | Trouble:
        """GET without a body, else POST of JSON. Tries again while trouble can pass, `retries` times (None: the client's)."""
        left = self.retries if retries is None else retries
        if self._closed.is_set():
            return Trouble("the connection was closed here", None, can_pass=False)
        for number in range(left + 1):
            outcome = self._attempt(path, body)
            if isinstance(outcome, Reply) or not outcome.can_pass or number == left or self._closed.is_set():
                return outcome
            (self.sleep or self._closed.wait)(self._wait(number, outcome))
        raise AssertionError("unreachable")

    def close(self) -> None:
        """Ends every request that is under way, from whatever thread."""
        self._closed.set()
        for connection in list(self._open):
            if connection.sock is not None:
                try:
                    connection.sock.shutdown(socket.SHUT_RDWR)
                except OSError:
                    continue  # it has ended meanwhile

    def _wait(self, number: int, trouble: Trouble) -> float:
        """Twice as long each time, half of it by chance so that many clients do not come back at once."""
        wait = FIRST_WAIT_S * 2.0**number * (0.5 + self.random.random() / 2)
        return min(LONGEST_WAIT_S, max(wait, trouble.retry_after_s or 0.0))

    def _attempt(self, path: str, body: Mapping[str, Any] | None) -> Reply | Trouble:
        deadline = self.clock() + self.timeout_s
        connection = self._connection()
        self._open.add(connection)
        try:
            connection.connect()
            return self._exchange(connection, path, body, deadline)
        except TimeoutError:
            return Trouble(f"no full reply within {self.timeout_s:g} s (server.timeout_s)", None, can_pass=True)
        except http.client.IncompleteRead as error:
            return Trouble(f"the connection was cut after {len(error.partial):,} bytes", None, can_pass=True)
        except ssl.SSLCertVerificationError as error:
            return Trouble(f"{self.address.url}: its certificate is not trusted ({error.verify_message})", None, can_pass=False)
        except (OSError, http.client.HTTPException, UnicodeError) as error:
            said = getattr(error, "strerror", None) or str(error) or type(error).__name__
            return Trouble(f"{self.address.url}: no connection, or it was cut ({said})", None, can_pass=True)
        finally:
            self._open.discard(connection)
            connection.close()

    def _connection(self) -> http.client.HTTPConnection:
        """Not connected yet; through the environment's proxy where it names one for this host."""
        address = self.address
        kind = http.client.HTTPSConnection if address.scheme == "https" else http.client.HTTPConnection
        proxy = None if address.is_this_machine or proxy_bypass(address.host) else getproxies().get(address.scheme)
        if proxy is None:
            return kind(address.host, address.port, timeout=self.timeout_s)
        parts = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
        connection = kind(parts.hostname or "", parts.port or 80, timeout=self.timeout_s)
        connection.set_tunnel(address.host, address.port)
        return connection

    def _exchange(self, connection: http.client.HTTPConnection, path: str, body: Mapping[str, Any] | None, deadline: float) -> Reply | Trouble:
        headers = {"Accept": "application/json, text/event-stream", "User-Agent": "qvlopt"}
        if body is not None:
            headers["Content-Type"] = "application/json"
        if self.key:
            headers["Authorization"] = f"Bearer {self.key}"
        data = None if body is None else json.dumps(body).encode("utf-8")
        began = self.clock()
        connection.request("GET" if data is None else "POST", self.address.path + path, body=data, headers=headers)
        response = connection.getresponse()
        lines = _Lines(response, connection, deadline, self.clock)
        if response.status != 200:
            return self._refused(response, lines.rest())
        kind = (response.getheader("Content-Type") or "").partition(";")[0].strip().lower()
        if kind == "text/event-stream":
            return self._stream(lines, began)
        return self._document(kind, lines.rest(), self.clock() - began)

    def _document(self, kind: str, data: bytes, seconds: float) -> Reply | Trouble:
        try:
            document = json.loads(data)
        except ValueError:
            return Trouble(f"the reply is no JSON but {kind or 'of no type'}: {self._said(data)}", 200, can_pass=False)
        if not isinstance(document, dict):
            return Trouble(f"the reply is no JSON object: {self._said(data)}", 200, can_pass=False)
        return Reply(document, (), seconds)

    def _stream(self, lines: _Lines, began: float) -> Reply | Trouble:
        """Server-sent events, one JSON object a `data:` line, until `[DONE]`, or an end after a choice that is finished."""
        events: list[tuple[float, Mapping[str, Any]]] = []
        for line in lines:
            if not line.startswith(b"data:"):
                continue
            data = line[5:].strip()
            if data == b"[DONE]":
                return Reply({}, tuple(events), self.clock() - began)
            try:
                event = json.loads(data)
            except ValueError:
                return Trouble(f"an event of the stream is no JSON: {self._said(data)}", 200, can_pass=False)
            if not isinstance(event, dict) or "error" in event:
                return Trouble(f"the stream ended in an error: {self._said(data)}", 200, can_pass=False)
            events.append((self.clock() - began, event))
        if any(isinstance(choice, dict) and choice.get("finish_reason") for _, event in events for choice in event.get("choices") or ()):
            return Reply({}, tuple(events), self.clock() - began)  # transformers serve sends no [DONE]
        return Trouble("the stream was cut before its end", None, can_pass=True)

    def _refused(self, response: http.client.HTTPResponse, data: bytes) -> Trouble:
        after = _seconds(response.getheader("Retry-After"))
        return Trouble(f"status {response.status}: {self._said(data)}", response.status, response.status in RETRIED, after)

    def _said(self, data: bytes) -> str:
        """The server's words, from the places where servers put them, without our key should they hold it."""
        text = data[:100_000].decode("utf-8", "replace")
        try:
            document = json.loads(data)
            error = document.get("error", document)
            found = error if isinstance(error, str) else next((error[key] for key in ("message", "detail", "msg") if error.get(key)), text)
            text = found if isinstance(found, str) else json.dumps(found)
        except (ValueError, AttributeError, TypeError):
            pass  # it is shown as it is
        text = " ".join((text.replace(self.key, "[the key]") if self.key else text).split())
        return text[:SHOWN] + ("..." if len(text) > SHOWN else "") or "nothing was said"


class _Lines:
    """The body of a response, read before a deadline: a slow server cannot hold a request by one byte at a time."""

    def __init__(
        self, response: http.client.HTTPResponse, connection: http.client.HTTPConnection, deadline: float, clock: Callable[[], float]
    ) -> None:
        self._response, self._socket = response, connection.sock
        self._deadline, self._clock = deadline, clock
        self._held = b""
        self._read = 0

    def __iter__(self) -> _Lines:
        return self

    def __next__(self) -> bytes:
        while b"\n" not in self._held:
            part = self._more()
            if not part:
                raise StopIteration
            self._held += part
        line, _, self._held = self._held.partition(b"\n")
        return line

    def rest(self) -> bytes:
        """All of it. Raises http.client.IncompleteRead when it is shorter than announced."""
        parts = [self._held]
        while part := self._more():
            parts.append(part)
        missing = self._response.length
        if missing:
            raise http.client.IncompleteRead(b"".join(parts), missing)
        return b"".join(parts)

    def _more(self) -> bytes:
        left = self._deadline - self._clock()
        if left <= 0:
            raise TimeoutError
        if self._socket is not None:
            self._socket.settimeout(left)
        part = self._response.read1(65536)
        self._read += len(part)
        if self._read > MOST_BYTES:
            raise http.client.HTTPException(f"the reply is longer than {MOST_BYTES:,} bytes")
        return part


def _seconds(retry_after: str | None) -> float | None:
    """Retry-After is seconds or a date (RFC 9110, section 10.2.3)."""
    if retry_after is None:
        return None
    try:
        return max(0.0, float(retry_after))
    except ValueError:
        pass
    try:
        return max(0.0, parsedate_to_datetime(retry_after).timestamp() - time.time())
    except ValueError:
        return None
