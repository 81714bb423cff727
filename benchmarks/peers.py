"""The same work, in the shape of Qwen3-VL-2B, through transformers, llama.cpp, OpenVINO GenAI and ours, each in its own environment.

    benchmarks/peer_envs.sh ENVS                   once; see there
    python -m benchmarks.peers FOLDER --environments ENVS [--engines ours-int8,llama-q4_0] [--threads 2] [--repeats 10]
                               [--image 640x480] [--prompt-tokens 128] [--new-tokens 32] [--blocks 24] [--layers 28] [--prepare]

FOLDER gets the checkpoint with random weights and every engine's own files (about 31 GB for all), or has them from an earlier call
(those of `benchmarks/int8.py` and `benchmarks/runtime.py` are the same), and `report`: bench's tables, plots and raw values. The
requests are bench's: a new drawn picture and a new prompt each, a fixed number of new tokens, greedy, no end of sequence. The
engines take turns in processes of their own, one alive at a time (docs/bench.md). An engine whose environment or files cannot be
had is listed as not run, with the reason.

Prints the tables and one JSON line. Speed and memory only: weights are random, so nothing is said about answers. llama.cpp is
its llama-server, seen from outside and by its log; its load is the time until it says that it is ready. `--prepare` makes the
files and measures nothing. Run it on an idle machine.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from pathlib import Path

from rich.console import Console

from benchmarks.peer_engines import PEERS, SHORT, PeerProcess
from benchmarks.peer_files import files_bytes, prepare
from qvlopt.commands.bench_compare import compare_run
from qvlopt.commands.bench_inputs import BenchTarget
from qvlopt.commands.bench_measure import Bench, engine_result
from qvlopt.commands.bench_page import html_page, machine, markdown_page
from qvlopt.commands.bench_plots import draw_plots
from qvlopt.commands.bench_probe import machine_probe
from qvlopt.commands.bench_process import engine_process
from qvlopt.commands.bench_tables import bench_tables, remarks
from qvlopt.commands.bench_worker import EngineSpec
from qvlopt.recipe.load import LoadedRecipe, load_recipe
from qvlopt.report.plain import json_text
from qvlopt.report.progress import RichProgress
from qvlopt.report.tables import to_rich
from qvlopt.report.write import new_folder, write_report
from qvlopt.timing.environment import environment_record
from qvlopt.timing.plan import Case, Workload
from qvlopt.timing.result import BenchFindings


def targets_of(folder: Path, wanted: Sequence[str], loaded: LoadedRecipe) -> tuple[BenchTarget, ...]:
    recipe = loaded.recipe.model_dump(mode="json")
    specs = {name: EngineSpec(PEERS[name].kind, str(folder / PEERS[name].files), PEERS[name].dtype, recipe, str(folder)) for name in wanted}
    return tuple(BenchTarget(name, PEERS[name].files, spec, None, PEERS[name].kind) for name, spec in specs.items())


def measure(folder: Path, environments: Path, wanted: Sequence[str], asked: argparse.Namespace) -> BenchFindings:
    width, height = map(int, asked.image.split("x"))
    workload = Workload((Case(width, height, asked.prompt_tokens, asked.new_tokens),), asked.repeats, asked.warmup, seed=0)
    loaded = load_recipe({"name": "peers", "model": {"path": str(folder / "model")}, "hardware": {"device": "cpu", "threads": asked.threads}})

    @contextmanager
    def open_process(threads: int) -> Iterator[PeerProcess]:
        with ExitStack() as stack:
            yield PeerProcess(stack, threads, environments, loaded)

    environment = environment_record(threads=asked.threads)
    targets = targets_of(folder, wanted, loaded)
    with tempfile.TemporaryDirectory() as pictures, machine_probe(engine_process, asked.threads) as speed:
        progress = RichProgress(Console(stderr=True))
        records = Bench(targets, workload, Path(pictures), asked.threads, open_process, speed.pace, progress).run()
    results = [engine_result(target, record, workload.cases) for target, record in zip(targets, records, strict=True)]
    sized = [replace(result, artifact_bytes=files_bytes(folder, PEERS[result.name])) for result in results]
    return BenchFindings(workload, tuple(sized), compare_run(sized, workload, environment, saved=None, named=0, gate=None), environment, None)


def report(folder: Path, findings: BenchFindings, missing: Mapping[str, str]) -> Path:
    plots = draw_plots(findings, {})
    document = {**findings.to_json(), "not_run": dict(missing), "peers": {name: asdict(peer) for name, peer in PEERS.items()}}
    place = new_folder(folder / "report", time.strftime("%Y%m%dT%H%M%SZ", time.gmtime()))
    files: dict[str, str | bytes] = {"report.json": json_text(document), "report.md": markdown_page(findings, plots)}
    files |= {"report.html": html_page(findings, plots)} | {f"{plot.name}.svg": plot.svg for plot in plots}
    write_report(place, {**files, **{f"{plot.name}.png": plot.png for plot in plots}})
    return place


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--environments", type=Path, required=True)
    parser.add_argument("--engines", default=",".join(SHORT.values()), help=f"of {', '.join(SHORT.values())}")
    parser.add_argument("--image", default="640x480")
    for name, default in (("threads", 2), ("repeats", 10), ("warmup", 1), ("prompt-tokens", 128), ("new-tokens", 32), ("blocks", 24), ("layers", 28)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--prepare", action="store_true", help="make the files, measure nothing")
    return parser.parse_args()


def main() -> None:
    asked = arguments()
    names = {short: name for name, short in SHORT.items()}
    wanted = [names[short] for short in asked.engines.split(",")]
    folder, environments = asked.folder.absolute(), asked.environments.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    missing = prepare(folder, environments, wanted, asked)
    runnable = [name for name in wanted if name not in missing]
    console = Console(width=150)
    for name, reason in missing.items():
        console.print(f"not run: {name}: {reason}", highlight=False, soft_wrap=True)
    if not runnable:
        sys.exit(1)
    if asked.prepare:
        return
    findings = measure(folder, environments, runnable, asked)
    place = report(folder, findings, missing)
    for table in bench_tables(findings):
        console.print(to_rich(table))
    for line in (*remarks(findings), machine(findings.environment), f"report: {place}"):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    summary = {
        engine.name: {
            "e2e": engine.cases[0].samples("e2e").median,
            "ttft": engine.cases[0].samples("ttft").median,
            "tokens_per_s": engine.cases[0].rate("tokens"),
        }
        for engine in findings.engines
        if engine.cases
    }
    print(json.dumps({"engines": summary, "not_run": missing, "report": str(place)}))


if __name__ == "__main__":
    main()
