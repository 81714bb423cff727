"""How the engines of `peers.py` are started and asked: our worker, a script in a peer's own environment, or llama-server."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.peer_llama import llama_server
from qvlopt.commands.bench_process import Asked, engine_process
from qvlopt.model.prompt import Prompter
from qvlopt.recipe.load import LoadedRecipe
from qvlopt.timing.session import PICTURE_MARKS
from qvlopt.timing.workload import prompt_of

HERE = Path(__file__).resolve().parent


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
    "qvlopt small": Peer("onnx", None, "small"),
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
