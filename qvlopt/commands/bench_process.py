"""The other end of `bench_worker`: a process of its own for one engine, asked over pipes, its memory watched."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, Protocol

from qvlopt.errors import RunError
from qvlopt.report.plain import json_text
from qvlopt.timing.memory import PeakOfTree

START = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from qvlopt.commands.bench_worker import main; main()"
"""With this process's own import path, so that the engine is of the same qvlopt."""
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
"""Read when the libraries are loaded, so they are set before: torch's own setting comes too late for some of them."""
LAST_WORDS = 300
PATIENCE_S = 10.0
"""For a process that was told to close."""


class Asked(Protocol):
    """Something that answers the messages of `bench_worker`."""

    def ask(self, message: Mapping[str, Any]) -> dict[str, Any]: ...

    @property
    def peak_tree_bytes(self) -> int: ...


OpenProcess = Callable[[int], AbstractContextManager[Asked]]
"""Starts a process with so many threads."""


class EngineProcess:
    """A running worker. `ask` raises RunError when it has ended, with its last words, or says that it failed."""

    def __init__(self, process: subprocess.Popen[str], errors: Any, watch: PeakOfTree) -> None:
        self._process = process
        self._errors = errors
        self._watch = watch

    @property
    def peak_tree_bytes(self) -> int:
        """The most memory that the process and all below it were seen to have."""
        return self._watch.peak

    def ask(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Sends a message and waits for the reply."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json_text(message, indent=None) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except OSError:
            line = ""
        if not line:
            raise self._farewell()
        reply: dict[str, Any] = json.loads(line)
        if "failed" in reply:
            raise RunError(str(reply["failed"]["message"]), reply["failed"]["hint"])
        return reply

    def _farewell(self) -> RunError:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(PATIENCE_S)
        self._errors.seek(0)
        said = " ".join(self._errors.read().decode("utf-8", "replace").split())[-LAST_WORDS:]
        hint = None if said else "a process that runs out of memory is ended without a word; the limit is in the environment"
        return RunError(f"the engine's process ended with status {self._process.returncode}: {said or 'it said nothing'}", hint)


@contextmanager
def engine_process(threads: int, command: Sequence[str] = ()) -> Iterator[EngineProcess]:
    """Starts a worker with so many threads; whatever happens, it is gone afterwards. It has a cache of its own, which is empty.

    `command` is another program that answers the same messages.
    """
    with tempfile.TemporaryFile() as errors, tempfile.TemporaryDirectory(prefix="qvlopt-bench-") as cache:
        words = list(command) or [sys.executable, "-c", START, json.dumps(sys.path)]
        environment = {
            **os.environ,
            **dict.fromkeys(THREADS, str(threads)),
            "QVLOPT_CACHE": cache,
            "TORCHINDUCTOR_CACHE_DIR": cache,
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
        }
        process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, env=environment, text=True, encoding="utf-8")
        try:
            with PeakOfTree(process.pid) as watch:
                yield EngineProcess(process, errors, watch)
        except BaseException:  # nobody waits for what it is doing any more
            process.kill()
            raise
        finally:
            _end(process)


def _end(process: subprocess.Popen[str]) -> None:
    with suppress(OSError):
        if process.stdin is not None:
            process.stdin.close()
    try:
        process.wait(PATIENCE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    finally:
        if process.stdout is not None:
            process.stdout.close()
