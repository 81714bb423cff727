"""How the engines of `peers.py` are started and asked: our worker, a script in a peer's own environment, or llama-server."""

from __future__ import annotations

import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qvlopt.commands.bench_process import Asked, engine_process
from qvlopt.errors import RunError
from qvlopt.model.prompt import Prompter
from qvlopt.recipe.load import LoadedRecipe
from qvlopt.runtime.openai_engine import OpenAIEngine
from qvlopt.timing.memory import PeakOfTree, resident_bytes
from qvlopt.timing.session import PICTURE_MARKS, request_from_json
from qvlopt.timing.streaming import ServerSession
from qvlopt.timing.workload import prompt_of

HERE = Path(__file__).resolve().parent
READY_S = 600.0
CONTEXT = 8192


@dataclass(frozen=True)
class Peer:
    """One engine of the table: what runs it, the environment it needs, and the folder or file under FOLDER that it opens."""

    kind: str
    environment: str | None
    files: str
    dtype: str = "auto"


PEERS = {
    "transformers fp32": Peer("hf", "serve", "model", "float32"),
    "transformers bf16": Peer("hf", "serve", "model", "bfloat16"),
    "llama.cpp Q8_0": Peer("llama", "llama", "llama/q8_0.gguf"),
    "llama.cpp Q4_0": Peer("llama", "llama", "llama/q4_0.gguf"),
    "openvino int8": Peer("openvino", "optimum", "openvino-int8"),
    "openvino int4": Peer("openvino", "optimum", "openvino-int4"),
    "qvlopt fp32": Peer("onnx", None, "export"),
    "qvlopt int8": Peer("onnx", None, "int8"),
    "qvlopt fast": Peer("onnx", None, "fast"),
}
SHORT = {name: name.replace("transformers", "hf").replace("llama.cpp", "llama").replace("qvlopt", "ours").replace(" ", "-").lower() for name in PEERS}
"""What --engines calls them."""


class PeerProcess:
    """Answers bench's messages by whatever runs the engine that is opened: our worker, a peer's script, or a server."""

    def __init__(self, stack: ExitStack, threads: int, environments: Path, loaded: LoadedRecipe) -> None:
        self._stack, self._threads, self._environments, self._loaded = stack, threads, environments, loaded
        self._prompter = Prompter.from_folder(Path(loaded.recipe.model.path))
        self._process: Asked | None = None
        self._is_ours = False

    @property
    def peak_tree_bytes(self) -> int:
        return self._process.peak_tree_bytes if self._process else 0

    def ask(self, message: Mapping[str, Any]) -> dict[str, Any]:
        if message["do"] == "open":
            self._process = self._start(message)
        assert self._process is not None
        if message["do"] == "call" and not self._is_ours:
            message = {**message, "requests": [{**request, "text": self._text(request)} for request in message["requests"]]}
        return self._process.ask({**message, "threads": self._threads})

    def _start(self, message: Mapping[str, Any]) -> Asked:
        self._is_ours = message["kind"] == "onnx"
        if self._is_ours:
            return self._stack.enter_context(engine_process(self._threads))
        if message["kind"] == "llama":
            return self._stack.enter_context(llama_server(self._environments / "llama", self._threads, self._loaded))
        python = self._environments / ("serve" if message["kind"] == "hf" else "optimum") / "bin" / "python"
        return self._stack.enter_context(engine_process(self._threads, [str(python), str(HERE / f"peer_{message['kind']}.py")]))

    def _text(self, request: Mapping[str, Any]) -> str:
        return prompt_of(request["prompt_tokens"], lambda text: len(self._prompter.encode(text)) + PICTURE_MARKS, tuple(request["prompt_seed"]))


class LlamaServer:
    """llama-server on a port of its own, timed by its streams; its memory is the server's alone."""

    def __init__(self, programs: Path, threads: int, loaded: LoadedRecipe) -> None:
        self._programs, self._threads, self._loaded = programs, threads, loaded
        self.process: subprocess.Popen[bytes] | None = None
        self._session: ServerSession | None = None
        self._watch: PeakOfTree | None = None
        self._peak = 0

    @property
    def peak_tree_bytes(self) -> int:
        return self._watch.peak if self._watch else 0

    def ask(self, message: Mapping[str, Any]) -> dict[str, Any]:
        if message["do"] == "open":
            return self._open(Path(message["path"]))
        if message["do"] == "call" and self._session is not None:
            return self._session.call([request_from_json({k: v for k, v in each.items() if k != "text"}) for each in message["requests"]]).to_json()
        pid = self.process.pid if self.process else 0
        return {"peak_rss_bytes": resident_bytes(pid, "VmHWM") or 0, "anonymous_bytes": resident_bytes(pid, "RssAnon"), "peak_cuda_bytes": None}

    def close(self) -> None:
        if self._watch is not None:
            self._watch.__exit__(None, None, None)
        if self.process is not None:
            self.process.terminate()
            self.process.wait()

    def _open(self, model: Path) -> dict[str, Any]:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        program = [str(self._programs / "build" / "bin" / "llama-server"), "-m", str(model), "--mmproj", str(model.with_name("mmproj.gguf"))]
        options = ["-t", str(self._threads), "-c", str(CONTEXT), "--host", "127.0.0.1", "--port", str(port), "--parallel", "1", "--cache-ram", "0"]
        began = time.perf_counter()
        self.process = subprocess.Popen([*program, *options], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
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
                raise RunError(f"llama-server ended with status {self.process.returncode}")
            try:
                with urllib.request.urlopen(url, timeout=5):
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(0.2)
        raise RunError(f"llama-server was not ready after {READY_S:.0f} s")


@contextmanager
def llama_server(programs: Path, threads: int, loaded: LoadedRecipe) -> Iterator[LlamaServer]:
    server = LlamaServer(programs, threads, loaded)
    try:
        yield server
    finally:
        server.close()
