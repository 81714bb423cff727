"""What each step of quantize-awq buys on the built-in checkpoint: tower error on held-out pictures, and scores.

    python benchmarks/nano_accuracy.py [--scores] [--bits 4 3]

Trained weights, so accuracy is real; nothing here is about speed. Prints a table and one JSON line.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from qvlopt import api
from qvlopt.damage.tensors import encode, tower_errors
from qvlopt.data.samples import read_samples
from qvlopt.model.load_tower import load_vision
from qvlopt.model.preprocess import PictureProcessor
from qvlopt.model.source import open_source
from qvlopt.recipe.shipped import builtin

METHODS = {
    "rounding": {"scale": False, "clip": False, "bias": False},
    "scale": {"scale": True, "clip": False, "bias": False},
    "scale+clip": {"scale": True, "clip": True, "bias": False},
    "rounding+bias": {"scale": False, "clip": False, "bias": True},
    "scale+clip+bias": {"scale": True, "clip": True, "bias": True},
}
SCORED = ("rounding", "scale+clip+bias")
HELD_OUT = 200
"""Pictures of nano-eval, by seeded hash: none of them calibrated anything."""


def tower_error(artifact: Path) -> dict[str, float]:
    """Relative error of each output of the artifact's tower against the source's."""
    source = open_source("builtin:nano", folder=Path.cwd())
    processor = PictureProcessor.from_folder(source.folder)
    samples = read_samples(builtin("builtin:nano-eval", "calib"), limit=HELD_OUT, seed=0).samples
    pictures = [processor.process(image.load()) for sample in samples for image in sample.images]
    towers = [load_vision(open_source(path, folder=Path.cwd()), dtype=torch.float32, device="cpu") for path in ("builtin:nano", str(artifact))]
    base, candidate = (encode(tower, pictures) for tower in towers)
    return {row.output: row.relative_error for row in tower_errors(base, candidate)}


def measure(bits: int, method: str, folder: Path, scores: bool) -> dict[str, Any]:
    output = folder / f"{bits}-{method}"
    section = {"bits": bits, "format": "bf16", "search": METHODS[method], "statistics": str(folder / "statistics")}
    done = api.quantize_awq("demo", output=str(output), quantize_awq=section).to_json()
    row: dict[str, Any] = {
        "bits": bits,
        "method": method,
        "rounding_loss": sum(layer["rounding_loss"] for layer in done["layers"]),
        "loss": sum(layer["loss"] for layer in done["layers"]),
        "tower_error": tower_error(output),
    }
    if scores and method in SCORED:
        data = [{"name": task, "path": "builtin:nano-eval", "task": task} for task in ("ocr", "vqa", "doc")]
        report = api.evaluate("demo", [str(output)], output=str(folder / f"report-{bits}-{method}"), evaluate={"data": data, "batch": 32}).to_json()
        metrics = report["results"][0]["metrics"]
        row["scores"] = {m["name"]: [m["base"], m["candidate"], m["ci_low"], m["ci_high"], m["n"]] for m in metrics if m["primary"]}
    return row


def show(rows: list[dict[str, Any]]) -> None:
    table = Table(
        "bits", "method", "sum of layer losses", "tower error, merged", "worst DeepStack tap", "ocr, vqa, doc: change in points", title="nano"
    )
    for row in rows:
        taps = [value for name, value in row["tower_error"].items() if name != "merged"]
        scores = ", ".join(f"{100 * (s[1] - s[0]):+.2f}" for s in row.get("scores", {}).values())
        table.add_row(str(row["bits"]), row["method"], f"{row['loss']:.4f}", f"{row['tower_error']['merged']:.4f}", f"{max(taps):.4f}", scores)
    Console(width=140).print(table)
    print(json.dumps({"benchmark": "nano_accuracy", "rows": rows}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bits", type=int, nargs="+", default=[4, 3])
    parser.add_argument("--scores", action="store_true", help="evaluate rounding and the full search on all of nano-eval")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        api.calibrate("demo", output=str(folder / "statistics"))
        show([measure(bits, method, folder, args.scores) for bits in args.bits for method in METHODS])


if __name__ == "__main__":
    main()
