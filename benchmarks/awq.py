"""Time and memory of quantising blocks of the 2B tower: plain rounding, our search, and AutoAWQ 0.2.9's own, on the same inputs.

    python -m benchmarks.random_checkpoint FOLDER
    python -m benchmarks.awq FOLDER --autoawq PYTHON [--blocks 4] [--tokens 16384] [--threads 2] [--repeats 1]

FOLDER is what `random_checkpoint` made. PYTHON is the interpreter of an environment that has qvlopt's packages and autoawq
0.2.9; without it AutoAWQ is left out. Every measurement is a process of its own, one at a time, engines in turn; blocks are
spread over the tower. Ours includes the products X^T X, AutoAWQ's searches run on the inputs. Both fold, round and report by
the same code, which is part of neither's advantage. Weights are random: losses say that both searches work on the same
problem, not how good a real checkpoint becomes. Prints every measurement as it is made, then a table and one JSON line.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from qvlopt.artifact.process import peak_rss_bytes
from qvlopt.artifact.tensors import TensorFiles, TensorWriter
from qvlopt.artifact.unfinished import Parts
from qvlopt.data.samples import read_samples
from qvlopt.model.autoawq_stage import quantize_stage_by_autoawq
from qvlopt.model.capture import Capture
from qvlopt.model.input_sums import GramWithInputs, InputSum
from qvlopt.model.names import VISION, vision_stages
from qvlopt.model.preprocess import PictureProcessor
from qvlopt.model.quantize import Search, quantize_stage
from qvlopt.model.source import Source, open_source
from qvlopt.model.stage_forward import linear_dtype
from qvlopt.quant.objective import Gram
from qvlopt.quant.rounding import QuantSpec

ENGINES = ("rounding", "native", "autoawq")
SPEC = QuantSpec(4, 128)
CPU = torch.device("cpu")
FILE = "inputs.safetensors"


def spread(blocks: int, depth: int) -> list[int]:
    """So many blocks, evenly over the tower."""
    return [round((index + 0.5) * depth / blocks - 0.5) for index in range(blocks)]


def save_inputs(source: Source, pictures: Path, folder: Path, blocks: list[int], tokens: int) -> None:
    """Every linear's inputs, float32 [tokens, K], of the chosen blocks: the same for all engines."""
    processor = PictureProcessor.for_tower(source.folder, source.settings.vision)
    read = [processor.process(image.load()) for sample in read_samples(pictures).samples for image in sample.images]
    wanted = {f"blocks.{index}" for index in blocks}
    done = {stage.name for stage in vision_stages(source.settings.vision)} - wanted
    capture = Capture(source, Parts(folder / "parts"), CPU, most_tokens=tokens, dtype=linear_dtype(source, CPU), sums=InputSum)
    for stage, grams in capture.stages(lambda: ((p.pixel_values[None], p.grid) for p in read), done=done):
        (folder / stage.name).mkdir()
        found = {name: gram.inputs for name, gram in grams.items() if isinstance(gram, GramWithInputs)}
        with TensorWriter(folder / stage.name / FILE, [(name, "F32", tuple(x.shape)) for name, x in found.items()]) as writer:
            for name, x in found.items():
                writer.write(name, x)
    capture.parts.remove()


def measure(engine: str, source: Source, folder: Path, block: int) -> dict[str, Any]:
    """One block by one engine, in this process."""
    stage = next(stage for stage in vision_stages(source.settings.vision) if stage.name == f"blocks.{block}")
    files = TensorFiles.open(folder / stage.name, weights=FILE)
    inputs = {name: files.read(name) for name in files.entries}
    prefix = f"{VISION}.{stage.name}."
    weights = {name: source.tensors.read(stored) for name, stored in source.names.items() if name.startswith(prefix)}
    before = peak_rss_bytes()
    began, cpu = time.perf_counter(), time.process_time()
    grams = {name: Gram.of(x) for name, x in inputs.items()}
    chosen = frozenset(inputs)
    if engine == "autoawq":
        began, cpu = time.perf_counter(), time.process_time()  # the losses are taken from the statistics, its search is not
        seen = {name: GramWithInputs(g.count, g.sum, g.centred, g.abs_sum, g.abs_max, inputs[name]) for name, g in grams.items()}
        done = quantize_stage_by_autoawq(stage, weights, seen, SPEC, dtype=torch.float16, chosen=chosen)
    else:
        search = Search(torch.float16) if engine == "native" else Search(torch.float16, scale=False, clip=False, bias=False)
        done = quantize_stage(stage, weights, grams, SPEC, search=search, chosen=chosen)
    seconds, used = time.perf_counter() - began, time.process_time() - cpu
    losses = {report.name.removeprefix(prefix): report.loss for report in done.reports}
    return {
        "engine": engine,
        "block": block,
        "seconds": seconds,
        "cpu_seconds": used,
        "rss_before": before,
        "rss": peak_rss_bytes(),
        "losses": losses,
    }


def in_own_process(python: str, engine: str, asked: argparse.Namespace, folder: Path, block: int) -> dict[str, Any]:
    words = [python, "-m", "benchmarks.awq", str(asked.folder), "--only", engine, "--inputs", str(folder), "--block", str(block)]
    done = subprocess.run([*words, "--threads", str(asked.threads)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{engine}, block {block}:\n{done.stderr[-2000:]}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    print(json.dumps(result), file=sys.stderr, flush=True)  # a run that is stopped has what it measured
    return result


def show(rows: list[dict[str, Any]]) -> None:
    table = Table("engine", "seconds a block", "CPU seconds", "peak memory", "sum of losses", title="per block, median")
    for engine in dict.fromkeys(row["engine"] for row in rows):
        own = [row for row in rows if row["engine"] == engine]
        middle = {key: sorted(row[key] for row in own)[len(own) // 2] for key in ("seconds", "cpu_seconds", "rss")}
        loss = sum(sum(row["losses"].values()) for row in own) / len(own)
        table.add_row(engine, f"{middle['seconds']:.1f}", f"{middle['cpu_seconds']:.1f}", f"{middle['rss'] / 1e9:.2f} GB", f"{loss:.5f}")
    Console(stderr=True).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--autoawq", metavar="PYTHON")
    for name, default in (("blocks", 4), ("tokens", 16_384), ("threads", 2), ("repeats", 1), ("block", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--only", choices=ENGINES, help=argparse.SUPPRESS)
    parser.add_argument("--inputs", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    source = open_source(str(asked.folder / "model"), folder=asked.folder)
    if asked.only:
        print(json.dumps(measure(asked.only, source, asked.inputs, asked.block)))
        return
    pythons = {"rounding": sys.executable, "native": sys.executable} | ({"autoawq": asked.autoawq} if asked.autoawq else {})
    blocks, rows = spread(asked.blocks, source.settings.vision.depth), []
    with tempfile.TemporaryDirectory(dir=asked.folder) as folder:
        save_inputs(source, asked.folder / "pictures", Path(folder), blocks, asked.tokens)
        for turn in range(asked.repeats):
            for place, block in enumerate(blocks):
                order = [*pythons][(turn + place) % len(pythons) :] + [*pythons][: (turn + place) % len(pythons)]
                rows += [in_own_process(pythons[engine], engine, asked, Path(folder), block) for engine in order]
    show(rows)
    print(json.dumps({"blocks": blocks, "tokens": asked.tokens, "threads": asked.threads, "rows": rows}))


if __name__ == "__main__":
    main()
