"""quantize-int8: a checkpoint becomes ONNX graphs in integers, layer by layer with a measured error, proven on held-out pictures."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch

from qvlopt.artifact.digest import digest_of
from qvlopt.artifact.folder import is_done, require_space, write_folder
from qvlopt.artifact.manifest import CheckRecord, LayerRecord, Manifest, ParentRecord, read_manifest, write_manifest
from qvlopt.artifact.process import peak_rss_bytes, thread_count
from qvlopt.commands.calibrated import Statistics, found_statistics, named_statistics
from qvlopt.commands.calibration_data import KIND as STATISTICS
from qvlopt.commands.calibration_data import Asked
from qvlopt.commands.export import copy_files, graph_linears, graphs_manifest, write_card
from qvlopt.commands.forecast import forecast, hidden_bytes, takes
from qvlopt.commands.graph_modules import module_records
from qvlopt.commands.graphs_result import GraphsResult
from qvlopt.commands.hardware import prepare
from qvlopt.commands.int8_prompts import CHECKED, MEASURED, held_out_prompts, measured_prompts
from qvlopt.commands.int8_statistics import Magnitudes, magnitudes
from qvlopt.commands.output import output_folder
from qvlopt.commands.plan import Plan, PlanRow, planned
from qvlopt.errors import RunError, UsageError
from qvlopt.graphs.int8_check import LEAST_COSINE, MOST_KL, GraphDamage, measure_damage
from qvlopt.graphs.int8_graphs import LAYOUTS, Linears, variants_of, write_graphs
from qvlopt.graphs.layer_errors import Wanted
from qvlopt.graphs.measure import Variant, measure_text, measure_vision, with_features
from qvlopt.graphs.names import DECODE_GRAPH, VISION_GRAPH
from qvlopt.graphs.quantised import BLOCK, BLOCK4
from qvlopt.graphs.rounding import LEVELS
from qvlopt.graphs.saturation import largest_weight
from qvlopt.graphs.torch_layers import Prompt
from qvlopt.graphs.weights import biased_layers, weights_of
from qvlopt.model.names import LM_HEAD, VISION, matching
from qvlopt.model.prompt import Prompter
from qvlopt.model.rewrite import other_files
from qvlopt.model.shapes import EMBEDDING, parameter_shapes
from qvlopt.model.source import Source
from qvlopt.recipe.command_line import command_line
from qvlopt.recipe.load import LoadedRecipe
from qvlopt.report.progress import Progress, SilentProgress

log = logging.getLogger(__name__)

KIND = "int8"
ALGORITHM = 2
"""Part of the digest: raised whenever the same inputs give other integers.
2: smoothing always sees the calibration set's magnitudes, which are found now where no calibrate output is there."""
PARTS = ("vision", "decoder")
LARGEST_LOSS = 1e9
"""What stands in the manifest for a loss that is not finite."""


class _Job(NamedTuple):
    """What a recipe asks for, opened and checked. `named` are the statistics that it names."""

    asked: Asked
    prompter: Prompter
    named: Statistics | None
    wanted: Wanted

    @classmethod
    def by(cls, loaded: LoadedRecipe, *, cached: bool = False) -> _Job:
        """With `cached` nothing is fetched from a hub. Raises UsageError or RunError for what is wrong or not there."""
        asked, section = Asked.by(loaded, cached=cached), loaded.recipe.quantize_int8
        keep = _kept(asked.source, section.keep)
        other_files(asked.source.folder)  # what cannot be copied is refused before the work
        wanted = Wanted("w8a8", section.max_layer_error, section.smooth, largest_weight(), keep)
        return cls(asked, Prompter.from_folder(asked.source.folder), named_statistics(asked, "quantize_int8"), wanted)

    @property
    def statistics(self) -> str | None:
        """Digest of the statistics that smoothing looks at, found already or not. Reads all weights the first time."""
        if not self.wanted.smooth:
            return None
        return self.asked.digest if self.named is None else self.named.digest

    def scratch_bytes(self, device: torch.device) -> int:
        """Hidden states on disk while smoothing looks at the samples; they are gone before anything is written."""
        is_seen = self.wanted.smooth and (self.named or found_statistics(self.asked)) is None
        return hidden_bytes(self.asked, device) if is_seen else 0

    @property
    def digest(self) -> str:
        """Identifies the result."""
        section = self.asked.loaded.recipe.quantize_int8.model_dump(mode="json", exclude={"statistics"})
        used = {"data": self.asked.digest, "statistics": self.statistics, "largest": self.wanted.largest}
        return digest_of({"kind": KIND, "algorithm": ALGORITHM, "source": self.asked.source.digest, "section": section, **used})


def quantize_int8(
    loaded: LoadedRecipe, *, overwrite: bool = False, resume: bool = False, dry_run: bool = False, progress: Progress | None = None
) -> GraphsResult | Plan:
    """Writes `<output>/int8`, self-checked. Does nothing when the same artifact is there; `resume` changes nothing.

    Raises UsageError for a recipe that does not fit the source, RunError for what breaks on the way.
    """
    del resume
    if dry_run:
        return planned(loaded, lambda: _plan_rows(loaded))
    began = time.monotonic()
    job, output = _Job.by(loaded), output_folder(loaded, KIND)
    if is_done(output, job.digest, overwrite=overwrite):
        return GraphsResult.of(output, read_manifest(output), existed=True)
    device = prepare(loaded)
    require_space(output, max(_bytes_written(job.asked.source, loaded.recipe.quantize_int8.layout), job.scratch_bytes(device)))
    if job.wanted.largest < LEVELS:
        log.warning("this processor adds 8-bit products with saturation (no VNNI): W8A8 weights keep 7 bits")
    with write_folder(output, digest=job.digest, overwrite=overwrite) as folder:
        manifest = _write(folder, job, device, progress or SilentProgress())
        write_card(folder, manifest, command_line(loaded, "quantize-int8", sections=("calibrate", "quantize_int8")))
        write_manifest(folder, manifest.model_copy(update={"seconds": time.monotonic() - began}))
    return GraphsResult.of(output, read_manifest(output), existed=False)


def _write(folder: Path, job: _Job, device: torch.device, progress: Progress) -> Manifest:
    """Decides, writes and checks the graphs; gives what there is to say of them."""
    asked, source = job.asked, job.asked.source
    prompts = measured_prompts(asked, job.prompter)
    largest = magnitudes(asked, job.named, folder, device, progress) if job.wanted.smooth else {}
    variants = _decide(asked, prompts, largest, job.wanted, progress)
    made = write_graphs(folder, source.settings, weights_of(source), variants, Linears(biased_layers(source), source.tied))
    copy_files(folder, source)
    check = _check(folder, asked, held_out_prompts(asked, job.prompter))
    return graphs_manifest(asked.loaded, source, kind=KIND, digest=job.digest).model_copy(
        update={
            "parents": (ParentRecord(kind=STATISTICS, digest=job.statistics),) if job.statistics else (),
            "modules": module_records(source, folder, made.written, PARTS, labels=made.labels),
            "layers": _layers(variants),
            "coverage": _coverage(prompts, largest),
            "check": check,
            "peak_rss_bytes": peak_rss_bytes(),
        }
    )


def _kept(source: Source, patterns: tuple[str, ...]) -> frozenset[str]:
    """Linears that stay float32. Raises UsageError for a pattern that matches none."""
    found = matching(patterns, graph_linears(source, PARTS))
    empty = [pattern for pattern, names in found.items() if not names]
    if empty:
        raise UsageError(f"quantize_int8.keep: {empty[0]} matches no linear layer of {source.id}", "qvlopt inspect lists the modules")
    return frozenset(name for names in found.values() for name in names)


def _decide(asked: Asked, prompts: list[Prompt], largest: Magnitudes, wanted: Wanted, progress: Progress) -> dict[str, Variant]:
    """Measures every linear on the prompts and decides how it is stored in each graph."""
    settings, weights = asked.source.settings, weights_of(asked.source)
    variants = variants_of(asked.loaded.recipe.quantize_int8.layout, weights, wanted)
    decoders = [variant for graph, variant in variants.items() if graph != VISION_GRAPH]
    pictures = list(dict.fromkeys(picture for prompt in prompts for picture in prompt.pictures))
    progress.start(settings.vision.depth + 1 + len(settings.vision.deepstack_visual_indexes) + settings.text["num_hidden_layers"], "measure")

    def seen(stage: str) -> None:
        progress.advance(1, f"measure {stage}")

    try:
        features = measure_vision(settings.vision, weights, pictures, variants[VISION_GRAPH], largest=largest.get, seen=seen)
        inputs = list(with_features(prompts, dict(zip(pictures, features, strict=True)), weights, settings.image_token_id))
        measure_text(settings, weights, inputs, decoders, largest=largest.get, seen=seen)
    finally:
        progress.finish()
    for graph, variant in variants.items():
        for layer in variant.chosen:
            if "would be off" in layer.method:
                log.warning("%s of %s: %s", layer.name, graph, layer.method)
    return variants


def _check(folder: Path, asked: Asked, prompts: list[Prompt]) -> CheckRecord:
    """Raises RunError where a graph is broken rather than coarse."""
    threads = thread_count(asked.loaded.recipe.hardware.threads)
    damage = measure_damage(folder, asked.source.settings, weights_of(asked.source), prompts, threads=threads)
    lowest = min(damage.cosines, key=damage.cosines.__getitem__)
    if not damage.cosines[lowest] >= LEAST_COSINE:
        fault = f"self-check failed: the tower's {lowest} has cosine {damage.cosines[lowest]:.4f} to torch's, expected at least {LEAST_COSINE}"
        raise RunError(fault, "lower quantize_int8.max_layer_error, or keep the worst layers")
    for graph, kl in damage.kl.items():
        if not kl <= MOST_KL:
            fault = f"self-check failed: {graph} is {kl:.3g} nats from torch, expected at most {MOST_KL}"
            raise RunError(fault, "lower quantize_int8.max_layer_error, or use layout int8")
    return CheckRecord(passed=True, worst=max(damage.kl.values()), detail=_detail(damage, len(prompts)))


def _detail(damage: GraphDamage, prompts: int) -> str:
    logits = "; ".join(f"{graph} KL {kl:.4f} nats, top-1 agreement {damage.agreement[graph]:.2%}" for graph, kl in damage.kl.items())
    cosines = ", ".join(f"{name} {value:.5f}" for name, value in damage.cosines.items())
    return f"against torch float32 on {prompts} held-out prompts ({damage.positions} positions): {logits}; lowest cosine of the tower: {cosines}"


def _layers(variants: Mapping[str, Variant]) -> tuple[LayerRecord, ...]:
    """Every layer of every graph; of a twin's it is said where they are."""
    return tuple(
        LayerRecord(
            name=layer.name,
            rounding_loss=min(layer.plain, LARGEST_LOSS),
            loss=min(layer.error, LARGEST_LOSS),
            method=layer.method + (f", in {graph}" if graph == DECODE_GRAPH else ""),
        )
        for graph, variant in variants.items()
        for layer in variant.chosen
    )


def _coverage(prompts: list[Prompt], largest: Magnitudes) -> dict[str, Any]:
    """What the decisions rest on."""
    return {
        "prompts": len(prompts),
        "images": sum(len(prompt.pictures) for prompt in prompts),
        "patches": sum(len(picture.pixel_values) for prompt in prompts for picture in prompt.pictures),
        "tokens": sum(len(prompt.ids) for prompt in prompts),
        "calibrated_layers": len(largest),
    }


def _plan_rows(loaded: LoadedRecipe) -> Iterator[PlanRow]:
    job, output = _Job.by(loaded, cached=True), output_folder(loaded, KIND)
    section, source, data = loaded.recipe.quantize_int8, job.asked.source, job.asked.data.name
    whole = sum(entry.nbytes for entry in source.tensors.entries.values())
    there = job.named or found_statistics(job.asked)
    seen = f"the calibrate output {there.folder}" if there else f"{loaded.recipe.calibrate.samples} samples, found now"
    yield PlanRow("source", f"{source.id}: {source.folder}, {whole:,} bytes of tensors")
    yield PlanRow("quantises", f"{len(graph_linears(source, PARTS))} linears into layout {section.layout}: {', '.join(LAYOUTS[section.layout])}")
    yield PlanRow(
        "measures", f"every layer's error on {MEASURED} samples of {data}; {f'smoothing sees {seen}' if section.smooth else 'no smoothing'}"
    )
    yield PlanRow("checks", f"cosines, KL and top-1 agreement against torch float32 on {CHECKED} held-out samples")
    yield PlanRow("writes", f"{output}: about {_bytes_written(source, section.layout):,} bytes, if no layer stays float32")
    yield takes(forecast(loaded, "quantize_int8", prepare(loaded)))


def _bytes_written(source: Source, layout: str) -> int:
    """Bytes of the linears as the layout stores them, of the head, which is the embedding when tied, and of what stays float32."""
    settings = source.settings
    shapes = parameter_shapes(settings.vision, settings.text, tied=source.tied)
    linears = {name: prod(shapes[f"{name}.weight"]) for name in graph_linears(source, PARTS) if name != LM_HEAD}
    rest = sum(4 * prod(shape) for name, shape in shapes.items() if name.startswith(VISION) and name.removesuffix(".weight") not in linears)
    table = prod(shapes[EMBEDDING])
    total = rest + table + table * 4 // BLOCK + (0 if source.tied else source.tensors.entry(source.names[EMBEDDING]).nbytes)
    for graph, scheme in LAYOUTS[layout].items():
        inside = sum(count for name, count in linears.items() if name.startswith(VISION) == (graph == VISION_GRAPH))
        total += inside if scheme == "w8a8" else inside // 2 + inside * 4 // BLOCK4
    return total
