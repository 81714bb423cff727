"""Injects faults into a checkpoint and counts how often `evaluate`'s damage measurement names the faulty stage.

    python benchmarks/blame.py [--model builtin:nano] [--items 3] [--quantised]

Every fault is one change to a copy of the checkpoint: a tower block, a merger, a DeepStack tap or a language layer rounded to
INT2 or with noise, other preprocessing limits or colours, a tap left out. With --quantised every block and merger of the tower
is rounded to INT4 first, so that all of them differ and the fault has to stand out. Prints a table and one JSON line; status
1 unless every fault is named.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file, save_file

from qvlopt.commands.evaluate_damage import measure_damage, name_stages
from qvlopt.commands.evaluate_inputs import read_sets
from qvlopt.model.source import Source, open_source
from qvlopt.recipe.load import LoadedRecipe, load_recipe
from qvlopt.report.progress import SilentProgress
from qvlopt.runtime.torch_engine import TorchEngine
from qvlopt.scoring.damage import choose_items, look
from qvlopt.scoring.evaluate import EngineRun, ask_engine

Tensors = dict[str, torch.Tensor]


class Fault(NamedTuple):
    """`apply` changes a checkpoint folder; `stage` is what must be blamed."""

    name: str
    stage: str
    apply: Callable[[Path], None]


def int2(weight: torch.Tensor) -> torch.Tensor:
    """Rounded to four levels in groups of 64."""
    return rounded(weight, bits=2)


def int4(weight: torch.Tensor) -> torch.Tensor:
    """Rounded to sixteen levels in groups of 64."""
    return rounded(weight, bits=4)


def rounded(weight: torch.Tensor, *, bits: int) -> torch.Tensor:
    """To the nearest of 2**bits levels between the least and the largest value of each 64 along the last axis."""
    group = 64 if weight.shape[-1] % 64 == 0 else weight.shape[-1]
    blocks = weight.float().reshape(-1, group)
    low, high = blocks.amin(1, keepdim=True), blocks.amax(1, keepdim=True)
    step = ((high - low) / (2**bits - 1)).clamp(min=1e-12)
    return (((blocks - low) / step).round() * step + low).reshape(weight.shape).to(weight.dtype)


def noisy(weight: torch.Tensor, *, share: float = 0.3) -> torch.Tensor:
    """With Gaussian noise of `share` of its standard deviation."""
    source = torch.Generator().manual_seed(weight.numel())
    return (weight.float() + torch.randn(weight.shape, generator=source) * weight.float().std() * share).to(weight.dtype)


def weights_of(part: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Path], None]:
    """Changes every matrix whose name contains `part`."""

    def apply(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        chosen = [name for name, tensor in tensors.items() if part in name and tensor.ndim >= 2]
        assert chosen, part
        save_file(tensors | {name: change(tensors[name]).contiguous() for name in chosen}, folder / "model.safetensors", metadata={"format": "pt"})

    return apply


def preprocessing(**values: object) -> Callable[[Path], None]:
    """Replaces keys of preprocessor_config.json."""

    def apply(folder: Path) -> None:
        path = folder / "preprocessor_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return apply


def without_last_tap(folder: Path) -> None:
    """The checkpoint of an exporter that forgot the last DeepStack tap: config and tensors agree on it."""
    config = json.loads((folder / "config.json").read_text())
    indexes = config["vision_config"]["deepstack_visual_indexes"]
    dropped = f"deepstack_merger_list.{len(indexes) - 1}."
    config["vision_config"]["deepstack_visual_indexes"] = indexes[:-1]
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(folder / "model.safetensors")
    save_file({name: tensor for name, tensor in tensors.items() if dropped not in name}, folder / "model.safetensors", metadata={"format": "pt"})


def faults(source: Source) -> Iterator[Fault]:
    """One of every kind for each place of interest, in a checkpoint of this shape."""
    vision, layers = source.settings.vision, int(source.settings.text["num_hidden_layers"])
    for index in range(vision.depth):
        kind, change = (("INT2", int2), ("noise", noisy))[index % 2]
        yield Fault(f"{kind} in tower block {index}", f"tower block {index}", weights_of(f"visual.blocks.{index}.", change))
    yield Fault("noise in one matrix of tower block 2", "tower block 2", weights_of("visual.blocks.2.attn.proj.", noisy))
    yield Fault("INT2 in the merger", "merger", weights_of("visual.merger.", int2))
    yield Fault("noise in the merger", "merger", weights_of("visual.merger.", noisy))
    for tap in range(len(vision.deepstack_visual_indexes)):
        kind, change = (("INT2", int2), ("noise", noisy))[tap % 2]
        yield Fault(f"{kind} in DeepStack tap {tap}", f"deepstack tap {tap}", weights_of(f"deepstack_merger_list.{tap}.", change))
    last = len(vision.deepstack_visual_indexes) - 1
    yield Fault("the last DeepStack tap left out", f"deepstack tap {last}", without_last_tap)
    yield Fault("DeepStack tap 0 gives zeros", "deepstack tap 0", weights_of("deepstack_merger_list.0.linear_fc2", torch.zeros_like))
    for index in range(layers):
        kind, change = (("INT2", int2), ("noise", noisy))[index % 2]
        yield Fault(f"{kind} in language layer {index}", f"language layer {index}", weights_of(f"language_model.layers.{index}.", change))
    yield Fault("noise in the patch embedding", "tower embedding", weights_of("visual.patch_embed.", noisy))
    yield Fault("pictures at most 64x64", "preprocessing", preprocessing(size={"shortest_edge": 1024, "longest_edge": 4096}))
    yield Fault("pictures at least 512x512", "preprocessing", preprocessing(size={"shortest_edge": 262144, "longest_edge": 1048576}))
    yield Fault("colours of another family", "preprocessing", preprocessing(image_mean=[0.48, 0.46, 0.41], image_std=[0.27, 0.26, 0.28]))
    yield Fault("nearest neighbour resizing", "preprocessing", preprocessing(resample=0, size={"shortest_edge": 65536, "longest_edge": 65536}))


def quantised(folder: Path) -> None:
    """Every block and merger of the tower in INT4."""
    for part in ("visual.blocks.", "visual.merger.", "visual.deepstack_merger_list."):
        weights_of(part, int4)(folder)


def run(path: str, loaded: LoadedRecipe, count: int, *, is_quantised: bool) -> int:
    """Prints a row a fault. Returns how many were named wrongly."""
    sets = read_sets(loaded).sets
    base = open_source(path, folder=loaded.folder)
    engine = TorchEngine.open(base, dtype=torch.float32, device="cpu")
    answers = ask_engine(engine, sets, batch=16, progress=SilentProgress(), label="base")
    chosen = choose_items(sets, answers, count, seed=0)
    base_look, wrong, rows = look(engine, chosen, SilentProgress()), 0, []
    with tempfile.TemporaryDirectory() as place:
        for number, fault in enumerate(faults(base)):
            folder = Path(shutil.copytree(base.folder, Path(place) / f"{number}"))
            if is_quantised:
                quantised(folder)
            fault.apply(folder)
            began = time.monotonic()
            candidate = open_source(str(folder), folder=folder)
            damaged = TorchEngine.open(candidate, dtype=torch.float32, device="cpu")
            looks = (base_look, look(damaged, chosen, SilentProgress()))
            found = name_stages(measure_damage(looks, (answers, EngineRun({}, {}))), looks, (path, str(folder)), loaded)
            blamed = found.blame.stage if found.blame else "nothing"
            wrong += blamed != fault.stage
            rows.append({"fault": fault.name, "blamed": blamed, "right": blamed == fault.stage, "kl_mean": found.kl_mean})
            shown = "-" if found.kl_mean is None else f"{found.kl_mean:.3g}"
            print(f"{'ok   ' if blamed == fault.stage else 'WRONG'} {fault.name:42} {blamed:18} KL {shown:8} {time.monotonic() - began:.1f} s")
            shutil.rmtree(folder)
    print(json.dumps({"benchmark": "blame", "model": path, "quantised": is_quantised, "faults": len(rows), "named": len(rows) - wrong, "rows": rows}))
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="builtin:nano")
    parser.add_argument("--items", type=int, default=3, help="items of every set that are looked at")
    parser.add_argument("--quantised", action="store_true", help="inject into an INT4 tower instead of the checkpoint as it is")
    arguments = parser.parse_args()
    recipe = load_recipe({"model": {"path": arguments.model}, "evaluate": {"limit": arguments.items * 2, "damage": {"stages": arguments.items}}})
    return 1 if run(arguments.model, recipe, arguments.items, is_quantised=arguments.quantised) else 0


if __name__ == "__main__":
    sys.exit(main())
