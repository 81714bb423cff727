"""Real servers answer as our own engine does: the same prompts and visual tokens by count, the same texts, and streams with times.

A variable names the interpreter of each environment (docs/conformance.md); without it the server's tests are skipped.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from qvlopt.data.samples import read_samples
from qvlopt.recipe.load import load_recipe
from qvlopt.recipe.shipped import builtin
from qvlopt.runtime import open_engine
from qvlopt.runtime.openai_address import Address
from qvlopt.runtime.openai_client import Client, Reply
from qvlopt.runtime.openai_engine import OpenAIEngine

pytestmark = pytest.mark.conformance

TOOLS = Path(__file__).parents[2] / "tools" / "conformance"
ITEMS, NEW_TOKENS, START_S = 24, 64, 600
NANO = builtin("builtin:nano", "assets")

Server = Callable[[str, int], list[str]]


def transformers_serve(python: str, port: int) -> list[str]:
    return [python, str(TOOLS / "serve_transformers.py"), "--port", str(port), "--device", "cpu", "--dtype", "float32"]


def vllm_serve(python: str, port: int) -> list[str]:
    options = ["--dtype", "float32", "--max-model-len", "2048", "--generation-config", "vllm", "--port", str(port)]
    return [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(NANO), *options]


@pytest.mark.parametrize(("environment", "server"), [("serve", transformers_serve), ("vllm", vllm_serve)])
def test_a_real_server_says_what_our_engine_says(environment: str, server: Server, tmp_path: Path) -> None:
    loaded = load_recipe({"model": {"path": "builtin:nano"}, "evaluate": {"server": {"concurrency": 4}}})
    samples = [
        sample
        for task in ("ocr", "vqa", "doc")
        for sample in read_samples(builtin("builtin:nano-eval", "calib"), task=task, limit=ITEMS // 3).samples
    ]
    ours = open_engine("builtin:nano", loaded=loaded)
    prepared = [ours.prepare(sample) for sample in samples]
    expected = ours.generate(prepared, max_new_tokens=NEW_TOKENS)
    ours.close()
    with started(environment, server, tmp_path / "log") as url:
        engine = open_engine(f"{url}#{NANO}", loaded=loaded)
        assert isinstance(engine, OpenAIEngine)
        items = [engine.prepare(sample) for sample in samples]
        answers = engine.generate(items, max_new_tokens=NEW_TOKENS)
        streamed = [engine.stream(item, max_new_tokens=NEW_TOKENS) for item in items[:3]]
        engine.close()
    assert [answer.error for answer in answers] == [None] * ITEMS
    assert [answer.prompt_tokens for answer in answers] == [len(item.token_ids) for item in prepared]
    assert [answer.text for answer in answers] == [answer.text for answer in expected]
    assert [answer.new_tokens for answer in answers] == [len(answer.token_ids) for answer in expected]
    for timed, answer in zip(streamed, answers[:3], strict=True):
        assert timed.answer.text == answer.text
        assert timed.chunks_s
        assert 0 < timed.chunks_s[0] <= timed.chunks_s[-1] <= timed.seconds


@contextmanager
def started(environment: str, server: Server, log: Path) -> Iterator[str]:
    """The URL of a server that runs on this machine until the test is over."""
    variable = "QVLOPT_CONFORMANCE_" + environment.upper()
    python = os.environ.get(variable)
    if not python:
        pytest.skip(f"{variable} names no interpreter; tools/conformance/make_envs.sh makes the environment {environment}")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with log.open("wb") as output:
        process = subprocess.Popen(server(python, port), stdout=output, stderr=subprocess.STDOUT, env=os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1"})
    try:
        url = f"http://localhost:{port}/v1"
        client = Client(Address.parse(url), 10.0, 0)
        for _ in range(START_S):
            if isinstance(client.request("/models"), Reply):
                break
            assert process.poll() is None, log.read_text(encoding="utf-8", errors="replace")[-4000:]
            time.sleep(1)
        yield url
    finally:
        process.terminate()
        process.wait(timeout=60)
        sys.stderr.write(log.read_text(encoding="utf-8", errors="replace")[-2000:])
