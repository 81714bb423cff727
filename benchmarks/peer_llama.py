"""llama.cpp's llama-server on a port of its own, for `peers.py`: timed by its streams, the picture's part by its own log.

Its stages are `vision` (the tower, from the log's times), `prefill` (the rest until the first chunk, the reading and resizing of
the picture included) and `decode` (the mean of all further tokens).
"""

from __future__ import annotations

import re
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

from qvlopt.errors import RunError
from qvlopt.model.prompt import Prompter
from qvlopt.recipe.load import LoadedRecipe
from qvlopt.runtime.openai_engine import OpenAIEngine
from qvlopt.timing.memory import PeakOfTree, resident_bytes
from qvlopt.timing.session import PICTURE_MARKS, request_from_json
from qvlopt.timing.stages import CallTimes
from qvlopt.timing.streaming import ServerSession

READY_S = 600.0
CONTEXT = 8192
LAST_WORDS = 300
TRACED = ["-lv", "4", "--log-timestamps", "--log-colors", "off"]
ENCODING, DECODING = "encoding mtmd batch", "decoding image batch"
"""What the log says when the tower begins and when its features go into the language model."""
STAMP = re.compile(r"(\d+)\.(\d\d)\.(\d{3})\.(\d{3}) ")
"""Minutes, seconds, milliseconds and microseconds since the server's start."""


def vision_seconds(log: str) -> float | None:
    """Seconds in the tower by the log of one call; None where it does not say."""
    began, seconds, seen = None, 0.0, False
    for line in log.splitlines():
        if (stamp := STAMP.match(line)) is None:
            continue
        minutes, whole, milli, micro = map(int, stamp.groups())
        now = minutes * 60 + whole + milli / 1e3 + micro / 1e6
        if ENCODING in line:
            began = now
        elif DECODING in line and began is not None:
            seconds, began, seen = seconds + now - began, None, True
    return seconds if seen else None


def with_stages(times: CallTimes, vision: float | None) -> CallTimes:
    """The call of a lone request with what its time went into; as it is where that is not known."""
    if vision is None or not times.ttft or not times.tpot:
        return times
    steps = times.tpot * (times.tokens - 1)
    return replace(times, stages={"vision": (vision,), "prefill": (times.ttft[0] - vision,), "decode": steps})


class LlamaServer:
    """Answers bench's messages; its memory is the server's alone."""

    def __init__(self, programs: Path, threads: int, loaded: LoadedRecipe, log: IO[bytes]) -> None:
        self._programs, self._threads, self._loaded, self._log = programs, threads, loaded, log
        self.process: subprocess.Popen[bytes] | None = None
        self._session: ServerSession | None = None
        self._watch: PeakOfTree | None = None

    @property
    def peak_tree_bytes(self) -> int:
        return self._watch.peak if self._watch else 0

    def ask(self, message: Mapping[str, Any]) -> dict[str, Any]:
        if message["do"] == "open":
            return self._open(Path(message["path"]))
        if message["do"] == "call" and self._session is not None:
            self._said()
            times = self._session.call([request_from_json({k: v for k, v in each.items() if k != "text"}) for each in message["requests"]])
            return with_stages(times, vision_seconds(self._said())).to_json()
        pid = self.process.pid if self.process else 0
        return {"peak_rss_bytes": resident_bytes(pid, "VmHWM") or 0, "anonymous_bytes": resident_bytes(pid, "RssAnon"), "peak_cuda_bytes": None}

    def close(self) -> None:
        if self._watch is not None:
            self._watch.__exit__(None, None, None)
        if self.process is not None:
            self.process.terminate()
            self.process.wait()

    def _said(self) -> str:
        """What came into the log since the last time."""
        return self._log.read().decode("utf-8", "replace")

    def _open(self, model: Path) -> dict[str, Any]:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        program = [str(self._programs / "bin" / "llama-server"), "-m", str(model), "--mmproj", str(model.with_name("mmproj.gguf"))]
        options = ["-t", str(self._threads), "-c", str(CONTEXT), "--host", "127.0.0.1", "--port", str(port), "--parallel", "1", "--cache-ram", "0"]
        began = time.perf_counter()
        with open(self._log.name, "ab") as written:
            self.process = subprocess.Popen([*program, *options, *TRACED], stdout=subprocess.DEVNULL, stderr=written)
        self._watch = PeakOfTree(self.process.pid).__enter__()
        self._wait(f"http://127.0.0.1:{port}/health")
        seconds = time.perf_counter() - began
        engine = OpenAIEngine.open(f"http://127.0.0.1:{port}/v1#{model.name}", loaded=self._loaded)
        prompter = Prompter.from_folder(Path(self._loaded.recipe.model.path))
        self._session = ServerSession(engine, time.perf_counter, count=lambda text: len(prompter.encode(text)) + PICTURE_MARKS)
        version = (self._programs / "version").read_text(encoding="utf-8").strip()
        return {"load_s": seconds, "fingerprint": {"versions": {"llama.cpp": version}}, "keeps": False, "gpu": None}

    def _wait(self, url: str) -> None:
        ends = time.monotonic() + READY_S
        while time.monotonic() < ends:
            if self.process is not None and self.process.poll() is not None:
                last = " ".join(self._said().split())[-LAST_WORDS:]
                raise RunError(f"llama-server ended with status {self.process.returncode}: {last or 'it said nothing'}")
            try:
                with urllib.request.urlopen(url, timeout=5):
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(0.2)
        raise RunError(f"llama-server was not ready after {READY_S:.0f} s")


@contextmanager
def llama_server(programs: Path, threads: int, loaded: LoadedRecipe) -> Iterator[LlamaServer]:
    with tempfile.NamedTemporaryFile() as log:
        server = LlamaServer(programs, threads, loaded, log)
        try:
            yield server
        finally:
            server.close()
