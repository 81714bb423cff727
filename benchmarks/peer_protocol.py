"""The side of `peers.py` that runs in a peer's own environment: JSON lines over pipes, and times in bench's form. Standard library only."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Open = Callable[[Mapping[str, Any]], Callable[[str, str, int], dict[str, Any]]]
"""Takes {path, dtype, threads} and returns what answers (picture file, text, new tokens) with the result of `times`."""


def times(wall: float, tokens: int, first: float, stages: Mapping[str, Sequence[float]], prompt_tokens: int | None) -> dict[str, Any]:
    """One call as `qvlopt.timing.stages.CallTimes` in JSON; seconds, decode one a step. A stage that a peer does not show is left out."""
    return {
        "wall": wall,
        "requests": 1,
        "tokens": tokens,
        "ttft": [first],
        "e2e": [wall],
        "tpot": [(wall - first) / (tokens - 1)] if tokens > 1 else [],
        "stages": {name: list(seconds) for name, seconds in stages.items()},
        "prompt_tokens": prompt_tokens,
        "picture_tokens": None,
        "error": None if tokens else "an answer without a single token",
    }


def serve(open_engine: Open, versions: Mapping[str, str]) -> None:
    """Answers until told to close. What libraries print goes to stderr."""
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as replies:
        os.dup2(2, 1)
        answer: Callable[[str, str, int], dict[str, Any]] | None = None
        for line in sys.stdin:
            message = json.loads(line)
            if message["do"] == "open":
                began = time.perf_counter()
                answer = open_engine(message)
                reply = {"load_s": time.perf_counter() - began, "fingerprint": {"versions": dict(versions)}, "keeps": False, "gpu": None}
            elif message["do"] == "call" and answer is not None:
                (request,) = message["requests"]
                reply = answer(request["picture"], request["text"], request["new_tokens"])
                if reply["error"] is None and reply["tokens"] != request["new_tokens"]:
                    reply["error"] = f"an answer of {reply['tokens']} tokens, {request['new_tokens']} were asked for"
            else:
                reply = {"peak_rss_bytes": _peak(), "anonymous_bytes": None, "peak_cuda_bytes": None}
            replies.write(json.dumps(reply) + "\n")
            replies.flush()
            if message["do"] == "close":
                return


def _peak() -> int:
    """VmHWM, the peak of this program alone."""
    with open("/proc/self/status", encoding="utf-8") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM:"))
