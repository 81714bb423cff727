"""The worker in this process: what it answers, how it fails, and what it makes of each kind of engine."""

from __future__ import annotations

import io
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from qvlopt.commands.bench_inputs import BenchTarget, find_bench_targets, weight_bytes
from qvlopt.commands.bench_limits import with_limits
from qvlopt.commands.bench_worker import EngineSpec, Worker, serve
from qvlopt.recipe.load import LoadedRecipe, load_recipe
from qvlopt.timing.plan import Case
from qvlopt.timing.result import CaseResult, EngineResult, Iteration
from qvlopt.timing.roofline import Limits
from qvlopt.timing.stages import call_from_json
from qvlopt.timing.workload import write_picture
from tests.clock import FakeClock
from tests.tiny import build_tiny
from tests.tiny_onnx import build_onnx, with_twin

NEW = 3


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="module")
def exported(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_onnx(tiny, tmp_path_factory.mktemp("onnx") / "export")


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    """Opening an engine sets torch's threads; other tests keep theirs."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def loaded_recipe(tiny: Path) -> LoadedRecipe:
    return load_recipe({"name": "mine", "model": {"path": str(tiny)}, "hardware": {"device": "cpu", "threads": 1}})


def target(tiny: Path, candidate: str) -> BenchTarget:
    (found,) = find_bench_targets(loaded_recipe(tiny), [candidate])
    return found


def opened(spec: EngineSpec) -> tuple[Worker, dict[str, Any]]:
    worker = Worker(FakeClock())
    return worker, worker.answer({"do": "open", **json.loads(json.dumps(asdict(spec)))})


def request(folder: Path, number: int, **changes: Any) -> dict[str, Any]:
    path = write_picture(folder, 64, 64, (number,))
    return {"id": str(number), "picture": str(path), "prompt_seed": [number], "prompt_tokens": 30, "new_tokens": NEW, **changes}


@pytest.mark.parametrize(("dtype", "expected"), [("float32", "float32"), ("bfloat16", "bfloat16"), ("auto", "float32")])
def test_a_checkpoint_is_opened_by_torch_in_the_dtype_that_was_asked_for(tiny: Path, tmp_path: Path, dtype: str, expected: str) -> None:
    spec = target(tiny, "model").spec
    worker, reply = opened(EngineSpec(spec.kind, spec.path, dtype, spec.recipe, spec.folder))
    assert reply["fingerprint"]["dtype"] == expected
    assert (reply["keeps"], reply["gpu"]) == (False, None)
    times = call_from_json(worker.answer({"do": "call", "requests": [request(tmp_path, 0)]}))
    assert (times.tokens, times.error, len(times.stages["decode"])) == (NEW, None, NEW - 1)
    closed = worker.answer({"do": "close"})
    assert closed["peak_rss_bytes"] > 0
    assert worker.is_over


def test_the_language_model_attends_as_asked(tiny: Path) -> None:
    _, reply = opened(replace(target(tiny, "model").spec, attention="eager"))
    assert reply["fingerprint"]["attention"] == "eager"


def test_an_attention_that_is_not_installed_is_told(tiny: Path) -> None:
    _, reply = opened(replace(target(tiny, "model").spec, attention="flash_attention_2"))
    assert "attention flash_attention_2 cannot be used here" in reply["failed"]["message"]


def test_compiling_without_a_compiler_is_told_before_anything_is_measured(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qvlopt.runtime.torch_engine.COMPILER", "no-such-compiler")
    _, reply = opened(replace(target(tiny, "model").spec, compiled=True))
    assert reply["failed"]["message"] == "torch.compile needs a C++ compiler, there is no no-such-compiler"


def test_a_compiled_model_is_the_one_that_runs(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With torch's compiler replaced by one that only counts: the real one takes minutes."""
    runs: list[str] = []

    def counting(forward: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        def compiled(*args: Any, **named: Any) -> Any:
            runs.append("run")
            return forward(*args, **named)

        assert options["dynamic"] is True
        return compiled

    monkeypatch.setattr(torch, "compile", counting)
    monkeypatch.setattr("qvlopt.runtime.torch_engine.shutil.which", lambda _name: "/usr/bin/g++")
    worker, reply = opened(replace(target(tiny, "model").spec, compiled=True))
    assert reply["fingerprint"]["attention"] == "sdpa, compiled"
    assert worker.answer({"do": "call", "requests": [request(tmp_path, 0)]})["error"] is None
    assert len(runs) == NEW


def test_an_onnx_artifact_is_opened_by_its_own_engine_which_keeps_what_it_saw(tiny: Path, exported: Path, tmp_path: Path) -> None:
    found = target(tiny, str(exported))
    assert (found.name, found.kind) == ("export (onnx fp32)", "export")
    worker, reply = opened(found.spec)
    assert (reply["fingerprint"]["engine"], reply["keeps"]) == ("onnx", True)
    cold, picture, prompt = (
        call_from_json(worker.answer({"do": "call", "requests": [request(tmp_path, 0, prompt_seed=[seed], picture_last=seed == 1)]}))
        for seed in range(3)
    )
    assert [times.tokens for times in (cold, picture, prompt)] == [NEW] * 3
    assert [times.error for times in (cold, picture, prompt)] == [None] * 3
    assert "vision" in cold.stages
    # the prompt begins as the cold one did: its picture is not even looked for
    assert "vision" not in prompt.stages
    assert cold.prompt_tokens == picture.prompt_tokens == prompt.prompt_tokens


def test_several_requests_at_once_are_one_call(tiny: Path, tmp_path: Path) -> None:
    worker, _ = opened(target(tiny, "model").spec)
    times = call_from_json(worker.answer({"do": "call", "requests": [request(tmp_path, number) for number in range(3)]}))
    assert (times.requests, times.tokens, times.tpot) == (3, 3 * NEW, ())


def test_what_goes_wrong_is_told_and_the_worker_goes_on(tiny: Path, tmp_path: Path) -> None:
    spec = target(tiny, "model").spec
    worker, reply = opened(EngineSpec("torch", str(tmp_path / "nowhere"), "float32", spec.recipe, spec.folder))
    assert "nowhere" in reply["failed"]["message"]
    assert reply["failed"]["exit_code"] == 5
    assert not worker.is_over
    assert "fingerprint" in worker.answer({"do": "open", **asdict(spec)})


def test_the_machines_pace_is_told_by_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qvlopt.timing.probes.SIDE", {"cpu": 8})
    monkeypatch.setattr("qvlopt.timing.probes.PACE_READ_SIDE", 16)
    monkeypatch.setattr("qvlopt.timing.probes.PACE_SECONDS", 0.0)
    rates = Worker(time.perf_counter).answer({"do": "pace", "threads": torch.get_num_threads()})["rates"]
    assert set(rates) == {"float32", "bytes", "python"}
    assert min(rates.values()) > 0


def test_lines_are_answered_until_it_is_closed() -> None:
    incoming = io.StringIO('{"do": "close"}\n{"do": "close"}\n')
    outgoing = io.StringIO()
    serve(incoming, outgoing, Worker(FakeClock()))
    (line,) = outgoing.getvalue().splitlines()
    assert set(json.loads(line)) == {"peak_rss_bytes", "anonymous_bytes", "peak_cuda_bytes"}
    assert incoming.readline() == '{"do": "close"}\n'


def test_lines_are_answered_until_nobody_asks_any_more() -> None:
    outgoing = io.StringIO()
    serve(io.StringIO(""), outgoing, Worker(FakeClock()))
    assert outgoing.getvalue() == ""


def result_with(times: dict[str, Any], fingerprint: dict[str, Any]) -> EngineResult:
    case = CaseResult(Case(64, 64, 30, NEW), "cold", (Iteration(0, 0, call_from_json(times)),))
    return EngineResult("x", "x", (case,), fingerprint=fingerprint)


CALL = {
    "wall": 1.0, "requests": 1, "tokens": 3, "ttft": [0.8], "e2e": [1.0], "tpot": [0.1], "prompt_tokens": 34, "picture_tokens": 4,
    "stages": {"vision": [0.4], "prefill": [0.3], "decode": [0.1, 0.1]},
}  # fmt: skip


def test_a_steps_bytes_are_those_of_the_graph_that_makes_it(tiny: Path, exported: Path, tmp_path: Path) -> None:
    """The twin of layout `fast` is what a step reads; without one it is the decoder. Far slower arithmetic would bind instead."""
    limits = Limits({"float32": 1e30}, 1.0)
    twin = with_twin(exported, tmp_path / "twin")
    (twin / "decode.onnx").write_bytes(b"x" * 5)
    seconds = {}
    for folder in (exported, twin):
        engine = with_limits(target(tiny, str(folder)), result_with(CALL, {"dtype": "float32"}), limits)
        seconds[folder] = {stage: limit.seconds for stage, limit in engine.cases[0].limits.items()}
    decoder = sum((exported / name).stat().st_size for name in ("decoder.onnx", "decoder.onnx.data"))
    assert seconds[exported]["prefill"] == seconds[twin]["prefill"] == decoder
    assert seconds[exported]["decode"] - seconds[twin]["decode"] == decoder - 5
    assert weight_bytes(exported) == sum(
        (exported / name).stat().st_size for name in ("decoder.onnx", "decoder.onnx.data", "vision.onnx", "vision.onnx.data", "tables.safetensors")
    )


def test_an_engine_whose_dtype_is_not_known_has_no_limits(tiny: Path) -> None:
    engine = result_with(CALL, {})
    assert with_limits(target(tiny, "model"), engine, Limits({"float32": 1.0}, 1.0)) == engine
