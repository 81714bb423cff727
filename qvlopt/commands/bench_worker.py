"""The process in which bench runs one engine: a JSON object a line on stdin, one a line on stdout.

    {"do": "open", ...EngineSpec}             -> {"load_s", "fingerprint", "keeps", "gpu"}
    {"do": "call", "requests": [Request]}     -> CallTimes
    {"do": "probe", "dtypes", "device", "threads"} -> Limits
    {"do": "pace", "threads"}                 -> {"rates"}
    {"do": "close"}                           -> {"peak_rss_bytes", "anonymous_bytes", "peak_cuda_bytes"}

What a request breaks is answered with {"failed": {...}}; the process goes on until it is told to close or stdin ends.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

from qvlopt.errors import QvloptError, RunError
from qvlopt.recipe.load import LoadedRecipe, load_recipe
from qvlopt.recipe.schema import Attention
from qvlopt.report.plain import json_text
from qvlopt.timing.stages import Clock

MODULES = {"torch": "qvlopt.runtime.torch_engine", "onnx": "qvlopt.runtime.onnx_engine", "openai": "qvlopt.runtime.openai_engine"}
"""Imported before the clock of loading starts: reading Python files is no part of it."""


@dataclasses.dataclass(frozen=True)
class EngineSpec:
    """What to open: `kind` is torch, onnx or openai, `path` the checkpoint, artifact or URL#model, `dtype` as evaluate.dtype has it.

    `attention` and `compiled` are about torch's language model.
    """

    kind: str
    path: str
    dtype: str
    recipe: Mapping[str, Any]
    folder: str
    attention: Attention = "sdpa"
    compiled: bool = False

    def loaded(self) -> LoadedRecipe:
        """The recipe as `open_engine` reads it, for this engine's dtype."""
        evaluate = {**self.recipe["evaluate"], "engine": "auto", "dtype": self.dtype}
        return dataclasses.replace(load_recipe({**self.recipe, "evaluate": evaluate}), folder=Path(self.folder))


class Worker:
    """Answers requests about one engine. The clock is an argument."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._session: Any = None
        self._engine: Any = None
        self._device = "cpu"
        self.is_over = False

    def answer(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """The reply to one message; our own errors become {"failed": {message, hint, exit_code}}."""
        doing: dict[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
            "open": self._open,
            "call": self._call,
            "probe": self._probe,
            "pace": self._pace,
            "close": self._close,
        }
        try:
            return doing[message["do"]](message)
        except QvloptError as error:
            return {"failed": {"message": error.message, "hint": error.hint, "exit_code": error.exit_code}}
        except (RuntimeError, MemoryError, OSError) as error:
            return {"failed": {"message": f"{type(error).__name__}: {error}", "hint": None, "exit_code": RunError.exit_code}}

    def _open(self, message: Mapping[str, Any]) -> dict[str, Any]:
        spec = EngineSpec(**{name: message[name] for name in EngineSpec.__dataclass_fields__})
        loaded = spec.loaded()
        importlib.import_module(MODULES[spec.kind])
        if spec.kind == "openai":
            return self._open_server(spec, loaded)
        from qvlopt.runtime import open_engine
        from qvlopt.timing.session import Session

        began = self._clock()
        self._engine = open_engine(spec.path, loaded=loaded, attention=spec.attention, compiled=spec.compiled)
        seconds = self._clock() - began
        fingerprint = dict(self._engine.fingerprint)
        self._device = _device_of(self._engine)
        self._session = Session(self._engine, self._clock)
        return {"load_s": seconds, "fingerprint": fingerprint, "keeps": keeps(self._engine), "gpu": _gpu(self._device)}

    def _open_server(self, spec: EngineSpec, loaded: LoadedRecipe) -> dict[str, Any]:
        from qvlopt.runtime.openai_engine import OpenAIEngine
        from qvlopt.timing.streaming import ServerSession

        self._engine = OpenAIEngine.open(spec.path, loaded=loaded)
        self._session = ServerSession(self._engine, self._clock, count=_counter(loaded))
        return {"load_s": None, "fingerprint": dict(self._engine.fingerprint), "keeps": False, "gpu": None}

    def _call(self, message: Mapping[str, Any]) -> dict[str, Any]:
        from qvlopt.timing.session import request_from_json

        times = self._session.call([request_from_json(each) for each in message["requests"]])
        return dict(times.to_json())

    def _probe(self, message: Mapping[str, Any]) -> dict[str, Any]:
        import torch

        from qvlopt.timing.probes import measure_limits

        torch.set_num_threads(message["threads"])
        device = "cuda" if message["device"] == "cuda" and torch.cuda.is_available() else "cpu"
        return measure_limits(message["dtypes"], device=device, clock=self._clock).to_json()

    def _pace(self, message: Mapping[str, Any]) -> dict[str, Any]:
        import torch

        from qvlopt.timing.probes import measure_pace

        torch.set_num_threads(message["threads"])
        return {"rates": measure_pace(clock=self._clock)}

    def _close(self, _message: Mapping[str, Any]) -> dict[str, Any]:
        from qvlopt.artifact.process import peak_rss_bytes
        from qvlopt.timing.memory import resident_bytes

        self.is_over = True
        memory = {
            "peak_rss_bytes": resident_bytes("self", "VmHWM") or peak_rss_bytes(),
            "anonymous_bytes": resident_bytes("self", "RssAnon"),
            "peak_cuda_bytes": _peak_cuda(self._device),
        }
        if self._engine is not None:
            self._engine.close()
        return memory


def keeps(engine: Any) -> bool:
    """Whether an engine keeps something of pictures and prompts, so that a second request like the first is another case."""
    return hasattr(engine, "pictures") and hasattr(engine, "prompts")


def serve(incoming: IO[str], outgoing: IO[str], worker: Worker) -> None:
    """One reply a line until the worker is closed or nobody asks any more."""
    for line in incoming:
        outgoing.write(json_text(worker.answer(json.loads(line)), indent=None) + "\n")
        outgoing.flush()
        if worker.is_over:
            return


def main() -> None:
    """The process's own start: what any library prints goes to stderr, and Ctrl-C is for the parent to handle."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as replies:
        os.dup2(2, 1)
        sys.stdout = sys.stderr
        serve(sys.stdin, replies, Worker(time.perf_counter))


def _device_of(engine: Any) -> str:
    device = getattr(getattr(engine, "model", None), "device", None)
    return "cuda" if getattr(device, "type", "cpu") == "cuda" else "cpu"


def _gpu(device: str) -> dict[str, Any] | None:
    if device != "cuda":
        return None
    import torch

    from qvlopt.timing.environment import gpu_state

    properties = torch.cuda.get_device_properties(0)
    known = {"name": properties.name, "memory_bytes": properties.total_memory, "count": torch.cuda.device_count(), "cuda": torch.version.cuda}
    return {**known, **gpu_state()}


def _peak_cuda(device: str) -> int | None:
    if device != "cuda":
        return None
    import torch

    return int(torch.cuda.max_memory_allocated())


def _counter(loaded: LoadedRecipe) -> Callable[[str], int] | None:
    """Counts tokens as the recipe's own checkpoint does, when it is a folder here; a server's may differ, and is asked in the end."""
    from qvlopt.model.prompt import Prompter
    from qvlopt.recipe.paths import resolve_path
    from qvlopt.timing.session import PICTURE_MARKS

    folder = resolve_path(loaded.recipe.model.path, loaded.folder, kind="assets")
    if folder is None or not folder.is_dir():
        return None
    prompter = Prompter.from_folder(folder)
    return lambda text: len(prompter.encode(text)) + PICTURE_MARKS
