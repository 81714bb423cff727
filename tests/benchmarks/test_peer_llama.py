"""llama.cpp's server as an engine: what its log tells of the picture, and how it is started, asked and ended."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from benchmarks.peer_llama import llama_server, vision_seconds, with_stages
from qvlopt.errors import RunError
from qvlopt.recipe.load import LoadedRecipe, load_recipe
from qvlopt.recipe.shipped import builtin
from qvlopt.timing.session import Request
from qvlopt.timing.stages import CallTimes
from qvlopt.timing.workload import write_picture

LOG = """\
0.09.000.000 I slot launch_slot_: id  0 | task 0 | processing task
0.10.250.000 I slot encode_mtmd_: id  0 | task 0 | encoding mtmd batch from idx = 4, n_chunks = 1
1.02.500.500 I decoding image batch 1/1, n_tokens_batch = 300
1.03.000.000 I image decoded (batch 1/1) in 500 ms
"""
SERVER = '''#!{python}
"""Answers as llama-server does: its log on stderr, its chunks as events."""
import json, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.reply(json.dumps({{"data": [{{"id": "q8_0.gguf"}}]}}).encode(), "application/json")

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        print("0.01.000.000 I encoding mtmd batch", "0.01.000.250 I decoding image batch", sep="\\n", file=sys.stderr, flush=True)
        new = asked["max_tokens"]
        events = [{{"choices": [{{"index": 0, "delta": {{"content": "x"}}, "finish_reason": None}}]}} for _ in range(new)]
        events.append({{"choices": [], "usage": {{"prompt_tokens": 30, "completion_tokens": new}}}})
        self.reply("".join(f"data: {{json.dumps(event)}}\\n\\n" for event in events).encode() + b"data: [DONE]\\n\\n", "text/event-stream")

    def reply(self, data, kind):
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass

assert "--mmproj" in sys.argv
HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
'''
BROKEN = "#!/bin/sh\necho 'unknown model architecture' >&2\nexit 3\n"


def programs(folder: Path, script: str) -> Path:
    """The environment's folder with a program in place of llama-server."""
    (folder / "bin").mkdir(parents=True)
    (folder / "version").write_text("b1\n")
    program = folder / "bin" / "llama-server"
    program.write_text(script.format(python=sys.executable))
    program.chmod(0o755)
    return folder


@pytest.fixture(scope="module")
def nano() -> LoadedRecipe:
    return load_recipe({"model": {"path": str(builtin("builtin:nano", "assets"))}})


def test_the_log_tells_the_towers_time() -> None:
    assert vision_seconds(LOG) == pytest.approx(52.2505)


@pytest.mark.parametrize("log", ["", "no stamp: encoding mtmd batch\n", LOG.splitlines()[1], LOG.splitlines()[2]])
def test_a_log_without_both_moments_tells_nothing(log: str) -> None:
    assert vision_seconds(log) is None


def test_stages_add_up_to_the_call() -> None:
    times = with_stages(CallTimes(10.0, 1, 5, (6.0,), (10.0,), (1.0,)), 4.0)
    assert times.stages == {"vision": (4.0,), "prefill": (2.0,), "decode": (1.0,) * 4}
    assert times.coverage == 1.0


def test_a_failed_call_has_no_stages() -> None:
    failed = CallTimes(10.0, 1, 0, (), (), error="gone")
    assert with_stages(failed, 4.0) is failed


@pytest.mark.slow
def test_a_server_is_started_asked_and_ended(tmp_path: Path, nano: LoadedRecipe) -> None:
    request = Request("0", str(write_picture(tmp_path, 64, 64, (0,))), (0,), 20, 4)
    with llama_server(programs(tmp_path / "llama", SERVER), 1, nano) as server:
        opened = server.ask({"do": "open", "path": str(tmp_path / "q8_0.gguf")})
        assert opened["fingerprint"]["versions"] == {"llama.cpp": "b1"}
        times = server.ask({"do": "call", "requests": [{**asdict(request), "text": "for the peers that take text"}]})
        assert (times["tokens"], times["error"], times["stages"]["vision"]) == (4, None, [pytest.approx(0.00025)])
        assert server.ask({"do": "close"})["peak_rss_bytes"] > 0
        process = server.process
    assert process is not None
    assert process.poll() is not None


def test_a_server_that_ends_says_why(tmp_path: Path, nano: LoadedRecipe) -> None:
    with (
        llama_server(programs(tmp_path / "llama", BROKEN), 1, nano) as server,
        pytest.raises(RunError, match=r"status 3: unknown model architecture"),
    ):
        server.ask({"do": "open", "path": "q8_0.gguf"})
