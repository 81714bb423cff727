"""quantize-int8: a checkpoint becomes ONNX graphs in integers, layer by layer with a measured error, proven on held-out pictures."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch

from qvlopt.artifact.digest import digest_of
from qvlopt.artifact.folder import is_done, require_space, write_folder
from qvlopt.artifact.manifest import CheckRecord, LayerRecord, Manifest, ParentRecord, read_intact, read_manifest, write_manifest
from qvlopt.artifact.process import peak_rss_bytes, thread_count
from qvlopt.commands.calibration_data import KIND as STATISTICS
from qvlopt.commands.calibration_data import Asked
from qvlopt.commands.export import copy_files, graphs_manifest, write_card
from qvlopt.commands.graph_modules import module_records
from qvlopt.commands.graphs_result import GraphsResult
from qvlopt.commands.hardware import prepare
from qvlopt.commands.int8_prompts import CHECKED, MEASURED, held_out_prompts, measured_prompts
from qvlopt.commands.output import is_very_folder, output_folder
from qvlopt.commands.plan import Plan, PlanRow
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
from qvlopt.model.names import LANGUAGE, LM_HEAD, VISION, matching, vision_linears
from qvlopt.model.prompt import Prompter
from qvlopt.model.rewrite import other_files
from qvlopt.model.shapes import EMBEDDING, parameter_shapes, text_shapes
from qvlopt.model.source import Source
from qvlopt.model.statistics import StatisticsFiles
from qvlopt.recipe.load import LoadedRecipe
from qvlopt.recipe.paths import resolve_path
from qvlopt.report.progress import Progress, SilentProgress

log = logging.getLogger(__name__)

KIND = "int8"
ALGORITHM = 1
"""Part of the digest: raised whenever the same inputs give other integers."""
LARGEST_LOSS = 1e9
"""What stands in the manifest for a loss that is not finite."""


class _Statistics(NamedTuple):
    """Largest magnitudes from a calibrate output, and its digest; both None where there is none."""

    files: StatisticsFiles | None
    digest: str | None

    def largest(self, name: str) -> torch.Tensor | None:
        """Of every input of a linear [K]; None where it was not calibrated."""
        return self.files.read(name).abs_max if self.files is not None and name in self.files.layers else None


class _Job(NamedTuple):
    """What a recipe asks for, opened and checked."""

    asked: Asked
    prompter: Prompter
    statistics: _Statistics
    wanted: Wanted
    digest: str

    @classmethod
    def by(cls, loaded: LoadedRecipe) -> _Job:
        """Raises UsageError or RunError for what is wrong or not there."""
        asked, section = Asked.by(loaded), loaded.recipe.quantize_int8
        keep = _kept(asked.source, section.keep)
        other_files(asked.source.folder)  # what cannot be copied is refused before the work
        statistics = _statistics(asked)
        wanted = Wanted("w8a8", section.max_layer_error, section.smooth, largest_weight(), keep)
        return cls(asked, Prompter.from_folder(asked.source.folder), statistics, wanted, _digest(asked, statistics, wanted.largest))


def quantize_int8(
    loaded: LoadedRecipe, *, overwrite: bool = False, resume: bool = False, dry_run: bool = False, progress: Progress | None = None
) -> GraphsResult | Plan:
    """Writes `<output>/int8`, self-checked. Does nothing when the same artifact is there; `resume` changes nothing.

    Raises UsageError for a recipe that does not fit the source, RunError for what breaks on the way.
    """
    del resume
    began = time.monotonic()
    job, output = _Job.by(loaded), output_folder(loaded, KIND)
    if dry_run:
        return Plan(loaded, _plan_rows(job.asked, job.statistics, output))
    if is_done(output, job.digest, overwrite=overwrite):
        return GraphsResult.of(output, read_manifest(output), existed=True)
    require_space(output, _bytes_written(job.asked.source, loaded.recipe.quantize_int8.layout))
    prepare(loaded)
    if job.wanted.largest < LEVELS:
        log.warning("this processor adds 8-bit products with saturation (no VNNI): W8A8 weights keep 7 bits")
    with write_folder(output, digest=job.digest, overwrite=overwrite) as folder:
        manifest = _write(folder, job, progress or SilentProgress())
        write_card(folder, manifest)
        write_manifest(folder, manifest.model_copy(update={"seconds": time.monotonic() - began}))
    return GraphsResult.of(output, read_manifest(output), existed=False)


def _write(folder: Path, job: _Job, progress: Progress) -> Manifest:
    """Decides, writes and checks the graphs; gives what there is to say of them."""
    asked, source, statistics = job.asked, job.asked.source, job.statistics
    prompts = measured_prompts(asked, job.prompter)
    variants = _decide(asked, prompts, statistics, job.wanted, progress)
    made = write_graphs(folder, source.settings, weights_of(source), variants, Linears(biased_layers(source), source.tied))
    copy_files(folder, source)
    check = _check(folder, asked, held_out_prompts(asked, job.prompter))
    return graphs_manifest(asked.loaded, source, kind=KIND, digest=job.digest).model_copy(
        update={
            "parents": (ParentRecord(kind=STATISTICS, digest=statistics.digest),) if statistics.digest else (),
            "modules": module_records(source, folder, made.written, ("vision", "decoder"), labels=made.labels),
            "layers": _layers(variants),
            "coverage": _coverage(prompts, statistics),
            "check": check,
            "peak_rss_bytes": peak_rss_bytes(),
        }
    )


def _kept(source: Source, patterns: tuple[str, ...]) -> frozenset[str]:
    """Linears that stay float32. Raises UsageError for a pattern that matches none."""
    found = matching(patterns, _linears(source))
    empty = [pattern for pattern, names in found.items() if not names]
    if empty:
        raise UsageError(f"quantize_int8.keep: {empty[0]} matches no linear layer of {source.id}", "qvlopt inspect lists the modules")
    return frozenset(name for names in found.values() for name in names)


def _linears(source: Source) -> tuple[str, ...]:
    text = [name.removesuffix(".weight") for name in text_shapes(source.settings.text) if name.endswith("proj.weight")]
    return (*vision_linears(source.settings.vision), *(f"{LANGUAGE}.{name}" for name in text), LM_HEAD)


def _statistics(asked: Asked) -> _Statistics:
    """The named calibrate output, else that of this recipe if it is there. Raises RunError when the named one does not fit."""
    loaded = asked.loaded
    named = loaded.recipe.quantize_int8.statistics
    if named is None:
        folder = output_folder(loaded, "calibrate")
        if is_very_folder(loaded) or not (folder / "qvlopt.json").is_file() or read_manifest(folder).digest != asked.digest:
            return _Statistics(None, None)
        return _Statistics(StatisticsFiles(folder), asked.digest)
    place = resolve_path(named, loaded.folder)
    if place is None:
        raise RunError(f"quantize_int8.statistics: there is no folder {named}", "give the output of qvlopt calibrate, or null")
    manifest = read_intact(place)
    if manifest.kind != STATISTICS or manifest.source is None or manifest.source.digest != asked.source.digest:
        raise RunError(f"quantize_int8.statistics: {place} was not calibrated on this source", "run qvlopt calibrate with this model.path")
    return _Statistics(StatisticsFiles(place), manifest.digest)


def _digest(asked: Asked, statistics: _Statistics, largest: int) -> str:
    section = asked.loaded.recipe.quantize_int8.model_dump(mode="json", exclude={"statistics"})
    used = {"data": asked.digest, "statistics": statistics.digest, "largest": largest}
    return digest_of({"kind": KIND, "algorithm": ALGORITHM, "source": asked.source.digest, "section": section, **used})


def _decide(asked: Asked, prompts: list[Prompt], statistics: _Statistics, wanted: Wanted, progress: Progress) -> dict[str, Variant]:
    """Measures every linear on the prompts and decides how it is stored in each graph."""
    settings, weights = asked.source.settings, weights_of(asked.source)
    variants = variants_of(asked.loaded.recipe.quantize_int8.layout, weights, wanted)
    decoders = [variant for graph, variant in variants.items() if graph != VISION_GRAPH]
    pictures = list(dict.fromkeys(picture for prompt in prompts for picture in prompt.pictures))
    progress.start(settings.vision.depth + 1 + len(settings.vision.deepstack_visual_indexes) + settings.text["num_hidden_layers"], "measure")

    def seen(stage: str) -> None:
        progress.advance(1, f"measure {stage}")

    try:
        features = measure_vision(settings.vision, weights, pictures, variants[VISION_GRAPH], largest=statistics.largest, seen=seen)
        inputs = list(with_features(prompts, dict(zip(pictures, features, strict=True)), weights, settings.image_token_id))
        measure_text(settings, weights, inputs, decoders, largest=statistics.largest, seen=seen)
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


def _coverage(prompts: list[Prompt], statistics: _Statistics) -> dict[str, Any]:
    """What the decisions rest on."""
    return {
        "prompts": len(prompts),
        "images": sum(len(prompt.pictures) for prompt in prompts),
        "patches": sum(len(picture.pixel_values) for prompt in prompts for picture in prompt.pictures),
        "tokens": sum(len(prompt.ids) for prompt in prompts),
        "calibrated_layers": len(statistics.files.layers) if statistics.files else 0,
    }


def _plan_rows(asked: Asked, statistics: _Statistics, output: Path) -> tuple[PlanRow, ...]:
    section, source = asked.loaded.recipe.quantize_int8, asked.source
    whole = sum(entry.nbytes for entry in source.tensors.entries.values())
    seen = f"the calibrate output ({len(statistics.files.layers)} layers) and from these" if statistics.files else "these alone, no calibrate output"
    return (
        PlanRow("source", f"{source.id}: {source.folder}, {whole:,} bytes of tensors"),
        PlanRow("quantises", f"{len(_linears(source))} linears into layout {section.layout}: {', '.join(LAYOUTS[section.layout])}"),
        PlanRow("measures", f"every layer's error on {MEASURED} samples of {asked.data.name}; magnitudes from {seen}"),
        PlanRow("checks", f"cosines, KL and top-1 agreement against torch float32 on {CHECKED} held-out samples"),
        PlanRow("writes", f"{output}: about {_bytes_written(source, section.layout):,} bytes, if no layer stays float32"),
    )


def _bytes_written(source: Source, layout: str) -> int:
    """Bytes of the linears as the layout stores them, of the head, which is the embedding when tied, and of what stays float32."""
    settings = source.settings
    shapes = parameter_shapes(settings.vision, settings.text, tied=source.tied)
    linears = {name: prod(shapes[f"{name}.weight"]) for name in _linears(source) if name != LM_HEAD}
    rest = sum(4 * prod(shape) for name, shape in shapes.items() if name.startswith(VISION) and name.removesuffix(".weight") not in linears)
    table = prod(shapes[EMBEDDING])
    total = rest + table + table * 4 // BLOCK + (0 if source.tied else source.tensors.entry(source.names[EMBEDDING]).nbytes)
    for graph, scheme in LAYOUTS[layout].items():
        inside = sum(count for name, count in linears.items() if name.startswith(VISION) == (graph == VISION_GRAPH))
        total += inside if scheme == "w8a8" else inside // 2 + inside * 4 // BLOCK4
    return total
