"""Speed and memory of the ONNX engine on the shape of Qwen3-VL-2B, stage by stage, against transformers on the CPU.

    python -m benchmarks.runtime FOLDER [--rounds 3] [--repeats 3] [--threads 2] [--blocks 24] [--layers 28] [--cost COST.png]

FOLDER gets the checkpoint with random weights and its export (4.3 and 9 GB), or has them from an earlier call. One request is a
picture of 640x480 and 128 tokens of text, answered with 32 tokens, greedily, no end-of-sequence id. Engines run in processes of
their own, one at a time, in turns (round by round), so that a machine that changes its speed does so for all of them. Every
repeat has a new picture, so no cache helps; then a second question on the last picture, of 128 tokens and of 16, shows what the
caches are worth: seconds until its first token. Peak memory is the process's largest resident size; weights that are mapped from
files count. `--cost` draws how the ONNX engine's stages grow with the picture and the prompt.

Prints a table and one JSON line. Run it on an idle machine.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import shutil
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch
import transformers
from PIL import Image
from rich.console import Console
from rich.table import Table

from benchmarks.random_checkpoint import build_checkpoint
from qvlopt import api
from qvlopt.artifact.process import peak_rss_bytes
from qvlopt.data.samples import ImageRef, Sample
from qvlopt.model.preprocess import PictureProcessor
from qvlopt.model.prompt import Prompter
from qvlopt.recipe.shipped import builtin
from qvlopt.runtime.engine import Prepared, Stage
from qvlopt.runtime.onnx_engine import OnnxEngine
from qvlopt.runtime.preparer import Preparer

ENGINES = ("onnx", "hf-float32", "hf-bfloat16")
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
STAGES = ("load", "preprocess", "vision", "prefill", "decode", "first_token", "second_first_token", "second_first_token_short")
PICTURE, TEXT, SHORT, NEW = (640, 480), 128, 16, 32


def prepare_checkpoint(model: Path, blocks: int, layers: int) -> None:
    """The checkpoint unless it is there, with nano's tokenizer, since weights are random anyway."""
    if not model.exists():
        build_checkpoint(model, blocks=blocks, layers=layers)
        nano = builtin("builtin:nano", "assets")
        for name in TOKENIZER:
            shutil.copy(nano / name, model / name)
        config, ids = json.loads((model / "config.json").read_text()), json.loads((nano / "config.json").read_text())
        config |= {key: value for key, value in ids.items() if key.endswith("_token_id")}
        (model / "config.json").write_text(json.dumps(config, indent=2))


def prepare_models(folder: Path, blocks: int, layers: int, threads: int) -> None:
    """The checkpoint and its export."""
    model = folder / "model"
    prepare_checkpoint(model, blocks, layers)
    api.export({"name": "runtime", "model": {"path": str(model)}, "export": {"check": False}}, output=str(folder / "export"), threads=threads)


def question(prompter: Prompter, tokens: int, seed: int) -> str:
    """Words that are about so many tokens; the same seed gives the same words."""
    random = np.random.default_rng(seed)
    words: list[str] = []
    while (missing := tokens - len(prompter.encode(" ".join(words)))) > 0:
        words += ["".join(random.choice(list("abcdefgh"), 3)) for _ in range(max(1, missing // 8))]
    return " ".join(words)


def sample(folder: Path, prompter: Prompter, size: tuple[int, int] | None, tokens: int, seed: int) -> Sample:
    """A question on a picture of noise, or on none."""
    images: tuple[ImageRef, ...] = ()
    if size is not None:
        name = f"{size[0]}x{size[1]}-{seed}.png"
        pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / name, compress_level=1)
        images = (ImageRef(name, folder, name),)
    return Sample(f"s{seed}", images, question(prompter, tokens, seed), ("x",), "vqa", "c", "benchmark")


class Seconds:
    """Adds up the time spent in each stage; `entered` counts."""

    def __init__(self) -> None:
        self.total: dict[str, float] = defaultdict(float)
        self.entered: dict[str, int] = defaultdict(int)

    @contextmanager
    def __call__(self, name: Stage) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.total[name] += time.perf_counter() - began
        self.entered[name] += 1


class Onnx:
    """The engine under test."""

    def __init__(self, folder: Path, threads: int) -> None:
        self.engine = OnnxEngine.open(folder / "export", threads=threads)
        self.engine.prompter = dataclasses.replace(self.engine.prompter, eos_ids=())
        self.prompter = self.engine.prompter

    def ask(self, item: Sample, new: int = NEW) -> dict[str, float]:
        """Seconds of each stage; decode is that of one token."""
        seconds = self.engine.on_stage = Seconds()
        answer = self.engine.generate([self.engine.prepare(item)], max_new_tokens=new)[0]
        assert answer.error is None, answer.error
        assert len(answer.token_ids) == new
        return {name: value / (seconds.entered[name] if name == "decode" else 1) for name, value in seconds.total.items()}


class Transformers:
    """The model class of transformers with its own `generate`; our preprocessing, which is bit for bit its own."""

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        self.model = transformers.Qwen3VLForConditionalGeneration.from_pretrained(folder / "model", dtype=dtype)
        self.prompter = Prompter.from_folder(folder / "model")
        self.preparer = Preparer(self.prompter, PictureProcessor.from_folder(folder / "model"))
        self.calls: list[tuple[str, float]] = []
        self._time(self.model.model, "get_image_features", "vision")
        self._time(self.model, "forward", "forward")

    def _time(self, owner: Any, method: str, name: str) -> None:
        inner = getattr(owner, method)

        def timed(*args: Any, **more: Any) -> Any:
            began, before = time.perf_counter(), len(self.calls)
            result = inner(*args, **more)
            nested = sum(value for _, value in self.calls[before:])  # some versions encode within the first forward, some before it
            self.calls.append((name, time.perf_counter() - began - nested))
            return result

        setattr(owner, method, functools.wraps(inner)(timed))

    def ask(self, item: Sample, new: int = NEW) -> dict[str, float]:
        self.calls.clear()
        began = time.perf_counter()
        prepared = self.preparer.prepare(item)
        preprocess = time.perf_counter() - began
        with torch.inference_mode():
            made = self.model.generate(**self._inputs(prepared), do_sample=False, min_new_tokens=new, max_new_tokens=new)
        assert made.shape[1] == len(prepared.token_ids) + new
        vision = sum(value for name, value in self.calls if name == "vision")
        first, *steps = [value for name, value in self.calls if name == "forward"]
        return {"preprocess": preprocess, "vision": vision, "prefill": first, "decode": statistics.mean(steps) if steps else 0.0}

    def _inputs(self, item: Prepared) -> dict[str, Any]:
        ids = torch.tensor([item.token_ids])
        inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if item.pictures:
            inputs["pixel_values"] = torch.cat([picture.pixel_values for picture in item.pictures]).to(self.model.dtype)
            inputs["image_grid_thw"] = torch.tensor([(1, *picture.grid) for picture in item.pictures])
            inputs["mm_token_type_ids"] = (ids == self.prompter.image_token_id).int()
        return inputs


def opened(engine: str, folder: Path, threads: int) -> Onnx | Transformers:
    return Onnx(folder, threads) if engine == "onnx" else Transformers(folder, getattr(torch, engine.removeprefix("hf-")))


def work(engine: str, folder: Path, threads: int, repeats: int) -> dict[str, Any]:
    """One process: load, one request to warm up, `repeats` requests that are measured, a second question on the last picture."""
    torch.set_num_threads(threads)
    began = time.perf_counter()
    under_test = opened(engine, folder, threads)
    loaded = time.perf_counter() - began
    pictures = folder / "pictures"
    pictures.mkdir(exist_ok=True)
    rows = []
    for seed in range(repeats + 1):
        asked = sample(pictures, under_test.prompter, PICTURE, TEXT, seed)
        rows.append(under_test.ask(asked))
    stages: dict[str, list[float]] = {name: [row[name] for row in rows[1:]] for name in rows[0] if name in STAGES}
    stages |= {"load": [loaded], "first_token": [_first_token(row) for row in rows[1:]]}
    for name, tokens in (("second_first_token", TEXT), ("second_first_token_short", SHORT)):
        again = dataclasses.replace(asked, id=name, question=question(under_test.prompter, tokens, 99))
        stages[name] = [_first_token(under_test.ask(again, new=2))]
    return {"stages": stages, "peak_rss_bytes": peak_rss_bytes()}


def _first_token(row: dict[str, float]) -> float:
    """Seconds from a prepared request to its first token."""
    return row.get("vision", 0.0) + row["prefill"]


def cost(folder: Path, threads: int, path: Path) -> dict[str, list[list[float]]]:
    """Seconds of vision and prefill by side of a square picture, and of prefill by tokens of text; drawn into `path`."""
    under_test = Onnx(folder, threads)
    under_test.ask(sample(folder / "pictures", under_test.prompter, (256, 256), 16, 0), new=1)  # pages of the weights come in with the first run
    rows: dict[str, list[list[float]]] = {"side": [], "tokens": []}
    for side in (224, 448, 672, 896, 1120, 1344, 1632, 1920):
        row = under_test.ask(sample(folder / "pictures", under_test.prompter, (side, side), 16, side), new=1)
        rows["side"].append([side, row["vision"], row["prefill"]])
    for tokens in (128, 256, 512, 1024, 2048, 4096, 8192):
        row = under_test.ask(sample(folder / "pictures", under_test.prompter, None, tokens, tokens), new=1)
        rows["tokens"].append([tokens, row["prefill"]])
    draw_cost(rows, path)
    return rows


def draw_cost(rows: dict[str, list[list[float]]], path: Path) -> None:
    """Rows of (side, vision, prefill) and of (tokens, prefill)."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import NullFormatter, StrMethodFormatter

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4))
    sides, tokens = np.array(rows["side"]), np.array(rows["tokens"])
    left.plot(sides[:, 0], sides[:, 1], "o-", label="vision")
    left.plot(sides[:, 0], sides[:, 2], "s-", label="prefill")
    left.set(xlabel="side of a square picture, pixels", ylabel="seconds", xscale="log", xticks=sides[:, 0])
    left.legend()
    right.plot(*tokens.T, "s-")
    right.set(xlabel="prompt, tokens of text", ylabel="seconds of prefill", xscale="log", xticks=tokens[:, 0])
    for each in (left, right):
        each.set_yscale("log", base=2)
        each.tick_params(labelsize=7)
    for axis in (each for axes in (left, right) for each in (axes.xaxis, axes.yaxis)):
        axis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axis.set_minor_formatter(NullFormatter())
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def run_worker(arguments: Sequence[str]) -> dict[str, Any]:
    done = subprocess.run([sys.executable, "-m", "benchmarks.runtime", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """All rounds: for each engine its raw seconds and the largest peak of memory."""
    found: dict[str, Any] = {name: {"stages": defaultdict(list), "peak_rss_bytes": 0} for name in arguments.engines}
    for number in range(arguments.rounds):
        turn = arguments.engines[number % len(arguments.engines) :] + arguments.engines[: number % len(arguments.engines)]
        for name in turn:
            shared = ["--threads", str(arguments.threads), "--repeats", str(arguments.repeats)]
            result = run_worker([str(arguments.folder), "--worker", name, *shared])
            for stage, seconds in result["stages"].items():
                found[name]["stages"][stage] += seconds
            found[name]["peak_rss_bytes"] = max(found[name]["peak_rss_bytes"], result["peak_rss_bytes"])
    return found


def show(found: dict[str, Any], more: dict[str, Any]) -> None:
    table = Table("stage, seconds (median)", *found, title="one request: 640x480 and 128 tokens, 32 new tokens")
    for stage in STAGES:
        values = [statistics.median(each["stages"][stage]) for each in found.values()]
        table.add_row(stage + (" of one token" if stage == "decode" else ""), *(f"{value:.3f}" for value in values))
    table.add_row("peak memory, GB", *(f"{each['peak_rss_bytes'] / 1e9:.2f}" for each in found.values()))
    Console(width=120).print(table)
    versions = {"onnxruntime": onnxruntime.__version__, "torch": torch.__version__, "transformers": transformers.__version__}
    print(json.dumps({"benchmark": "runtime", "engines": found, "versions": versions, **more}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    for name, default in (("rounds", 3), ("repeats", 3), ("threads", 2), ("blocks", 24), ("layers", 28)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--engines", nargs="+", default=list(ENGINES), choices=ENGINES)
    parser.add_argument("--cost", type=Path, help="draw how cost grows into this picture, too")
    parser.add_argument("--worker", choices=ENGINES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        print(json.dumps(work(arguments.worker, arguments.folder, arguments.threads, arguments.repeats)))
        return
    prepare_models(arguments.folder, arguments.blocks, arguments.layers, arguments.threads)
    found = measure(arguments)
    shape = {"threads": arguments.threads, "blocks": arguments.blocks, "layers": arguments.layers}
    show(found, shape | ({"cost": cost(arguments.folder, arguments.threads, arguments.cost)} if arguments.cost else {}))


if __name__ == "__main__":
    main()
