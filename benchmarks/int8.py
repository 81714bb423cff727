"""Speed, memory and size of the INT8 layouts on the shape of Qwen3-VL-2B, and how near the tower is to its products alone.

    python -m benchmarks.int8 FOLDER [--layouts int8 fast small] [--rounds 2] [--repeats 2] [--threads 2] [--blocks 24] [--layers 28]

FOLDER gets the checkpoint with random weights (4.3 GB) and an artifact of each layout (2.2, 3.0 and 1.6 GB), or has them from an
earlier call. One request is a picture of 640x480 and 128 tokens of text, answered with 32 tokens; every repeat has a new picture.
Then a second question on the last one, of 128 tokens and of 16. Layouts run in processes of their own, one at a time, in turns.
`products` is the time that the tower's integer products and attention take when nothing else runs: the limit without other
kernels.

Prints a table and one JSON line. Run it on an idle machine.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.random_checkpoint import build_pictures
from benchmarks.runtime import NEW, PICTURE, SHORT, TEXT, Seconds, prepare_checkpoint, question, sample
from qvlopt import api
from qvlopt.artifact.process import peak_rss_bytes
from qvlopt.graphs.quantised import QuantisedLinear
from qvlopt.graphs.writer import FLOAT, GraphWriter
from qvlopt.model.config import read_config
from qvlopt.runtime.onnx_engine import OnnxEngine

LAYOUTS = ("int8", "fast", "small")
STAGES = ("load", "vision", "prefill", "decode", "first_token", "second_first_token", "second_first_token_short")


def prepare(folder: Path, layouts: list[str], blocks: int, layers: int, threads: int) -> None:
    """The checkpoint, a few pictures, and the artifacts by the command itself."""
    prepare_checkpoint(folder / "model", blocks, layers)
    data = folder / "calibration"
    if not data.exists():
        build_pictures(data, count=8)
    for layout in layouts:
        recipe = {"name": layout, "model": {"path": str(folder / "model")}, "calibrate": {"data": str(data), "split": None, "samples": 4}}
        api.quantize_int8(recipe, output=folder / layout, quantize_int8={"layout": layout}, threads=threads)


def work(folder: Path, threads: int, repeats: int) -> dict[str, Any]:
    """One process: load, a request to warm up, those that are measured, and a second question on the last picture."""
    torch.set_num_threads(threads)
    began = time.perf_counter()
    engine = OnnxEngine.open(folder, threads=threads)
    loaded = time.perf_counter() - began
    engine.prompter = dataclasses.replace(engine.prompter, eos_ids=())
    pictures = folder.parent / "pictures"
    pictures.mkdir(exist_ok=True)

    def ask(item: Any) -> dict[str, float]:
        seconds = engine.on_stage = Seconds()
        answer = engine.generate([engine.prepare(item)], max_new_tokens=NEW)[0]
        assert answer.error is None, answer.error
        return {name: value / (seconds.entered[name] if name == "decode" else 1) for name, value in seconds.total.items()} | {
            "tokens": float(answer.prompt_tokens)
        }

    rows = []
    for seed in range(repeats + 1):
        asked = sample(pictures, engine.prompter, PICTURE, TEXT, seed)
        rows.append(ask(asked))
    stages = {name: [row[name] for row in rows[1:]] for name in ("vision", "prefill", "decode")}
    stages |= {"load": [loaded], "first_token": [row["vision"] + row["prefill"] for row in rows[1:]]}
    for name, tokens in (("second_first_token", TEXT), ("second_first_token_short", SHORT)):
        again = ask(dataclasses.replace(asked, id=name, question=question(engine.prompter, tokens, 99)))
        stages[name] = [again.get("vision", 0.0) + again["prefill"]]
    return {"stages": stages, "prompt_tokens": rows[-1]["tokens"], "peak_rss_bytes": peak_rss_bytes()}


def products(model: Path, folder: Path, threads: int, repeats: int = 5) -> float:
    """Seconds of the tower's integer products and attention alone, one picture of PICTURE; each is the least of some runs."""
    config = read_config(model).vision
    width, inner, merged = config.hidden_size, config.intermediate_size, config.hidden_size * config.spatial_merge_size**2
    patches = PICTURE[0] // config.patch_size * (PICTURE[1] // config.patch_size)
    tokens = patches // config.spatial_merge_size**2
    mergers = 1 + len(config.deepstack_visual_indexes)
    linears = [(patches, width, width, 4 * config.depth), (patches, width, inner, config.depth), (patches, inner, width, config.depth)]
    linears += [(tokens, merged, merged, mergers), (tokens, merged, config.out_hidden_size, mergers)]
    total = 0.0
    for rows, inputs, outputs, count in linears:
        weight = torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(0)) / inputs**0.5
        path = folder / "product.onnx"
        with GraphWriter(path) as graph:
            linear = QuantisedLinear({"a.weight": weight}.__getitem__, set(), {"a": "w8a8"})
            graph.output(linear(graph, ["a"], graph.input("x", FLOAT, ("rows", inputs)))[0], FLOAT, ("rows", outputs))
        total += count * _kernel_seconds(path, {"x": _normal(rows, inputs)}, "MatMulIntegerToFloat", threads, repeats)
    with GraphWriter(folder / "product.onnx") as graph:
        q, k, v = (graph.input(name, FLOAT, (1, "rows", width)) for name in "qkv")
        graph.output(graph.one("MultiHeadAttention", q, k, v, num_heads=config.num_heads), FLOAT, (1, "rows", width))
    inputs_of = {name: _normal(1, patches, width) for name in "qkv"}
    return total + config.depth * _kernel_seconds(folder / "product.onnx", inputs_of, "MultiHeadAttention", threads, repeats)


def _normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape, dtype=np.float32)


def _kernel_seconds(path: Path, inputs: dict[str, np.ndarray], operator: str, threads: int, repeats: int) -> float:
    """The least time of an operator in a graph, from onnxruntime's profile. The graph's files are removed."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.enable_profiling = True
    options.profile_file_prefix = str(path.with_suffix(""))
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    for _ in range(repeats):
        session.run(None, inputs)
    profile = Path(session.end_profiling())
    events = [event for event in json.loads(profile.read_text()) if event.get("args", {}).get("op_name") == operator]
    for left in (profile, path, path.with_name(f"{path.name}.data")):
        left.unlink()
    return float(min(event["dur"] for event in events)) / 1e6


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """All rounds: raw seconds, the largest peak of memory and the size of every layout."""
    found: dict[str, Any] = {}
    for layout in arguments.layouts:
        size = sum(path.stat().st_size for path in (arguments.folder / layout).iterdir())
        found[layout] = {"stages": defaultdict(list), "peak_rss_bytes": 0, "artifact_bytes": size}
    for number in range(arguments.rounds):
        for layout in arguments.layouts[number % len(arguments.layouts) :] + arguments.layouts[: number % len(arguments.layouts)]:
            words = [str(arguments.folder), "--worker", layout, "--threads", str(arguments.threads), "--repeats", str(arguments.repeats)]
            done = subprocess.run([sys.executable, "-m", "benchmarks.int8", *words], capture_output=True, text=True, check=False)
            if done.returncode:
                raise SystemExit(done.stderr)
            result = json.loads(done.stdout.splitlines()[-1])
            for stage, seconds in result["stages"].items():
                found[layout]["stages"][stage] += seconds
            found[layout]["prompt_tokens"] = result["prompt_tokens"]
            found[layout]["peak_rss_bytes"] = max(found[layout]["peak_rss_bytes"], result["peak_rss_bytes"])
    return found


def show(found: dict[str, Any], more: dict[str, Any]) -> None:
    table = Table("median", *found, title=f"one request: {PICTURE[0]}x{PICTURE[1]} and {TEXT} tokens, {NEW} new tokens")
    medians = {layout: {stage: statistics.median(each["stages"][stage]) for stage in STAGES} for layout, each in found.items()}
    for stage in STAGES:
        table.add_row(f"{stage}, s", *(f"{medians[layout][stage]:.3f}" for layout in found))
    table.add_row("prefill, tokens/s", *(f"{each['prompt_tokens'] / medians[layout]['prefill']:.0f}" for layout, each in found.items()))
    table.add_row("decode, tokens/s", *(f"{1 / medians[layout]['decode']:.1f}" for layout in found))
    table.add_row("products / vision", *(f"{more['products'] / medians[layout]['vision']:.0%}" for layout in found))
    table.add_row("artifact, GB", *(f"{each['artifact_bytes'] / 1e9:.2f}" for each in found.values()))
    table.add_row("peak memory, GB", *(f"{each['peak_rss_bytes'] / 1e9:.2f}" for each in found.values()))
    Console(width=100).print(table)
    print(json.dumps({"benchmark": "int8", "layouts": found, "onnxruntime": onnxruntime.__version__, **more}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    for name, default in (("rounds", 2), ("repeats", 2), ("threads", 2), ("blocks", 24), ("layers", 28)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--layouts", nargs="+", default=list(LAYOUTS), choices=LAYOUTS)
    parser.add_argument("--worker", choices=LAYOUTS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        print(json.dumps(work(arguments.folder / arguments.worker, arguments.threads, arguments.repeats)))
        return
    prepare(arguments.folder, arguments.layouts, arguments.blocks, arguments.layers, arguments.threads)
    shape = {"threads": arguments.threads, "blocks": arguments.blocks, "layers": arguments.layers}
    found = measure(arguments)
    show(found, shape | {"products": products(arguments.folder / "model", arguments.folder, arguments.threads)})


if __name__ == "__main__":
    main()
