"""The stages of the tower, calibrated and quantised one after the other; what a stage became is kept at once."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from qvlopt.artifact.header import read_header
from qvlopt.artifact.process import kept_memory, peak_rss_bytes, release_memory
from qvlopt.artifact.tensors import TensorEntry, TensorWriter, dtype_code
from qvlopt.artifact.unfinished import Parts
from qvlopt.commands.calibrated import Statistics
from qvlopt.commands.calibration_data import Asked, captured, coverage_of
from qvlopt.commands.calibration_prompts import captured_language
from qvlopt.errors import RunError
from qvlopt.model.input_sums import GramSum, InputSum
from qvlopt.model.names import LANGUAGE, Stage
from qvlopt.model.quantize import LayerReport
from qvlopt.model.quantize_tower import QuantizedTower, StoredStage, TowerQuantizer, progress_text
from qvlopt.model.rewrite import Added
from qvlopt.model.statistics import StatisticsFiles
from qvlopt.model.token_draw import HELD_OUT
from qvlopt.quant.objective import Gram
from qvlopt.report.progress import Progress

log = logging.getLogger(__name__)

COVERED = ("samples", "images", "tokens")


@kept_memory()
def quantise_stages(
    asked: Asked, quantizer: TowerQuantizer, statistics: Statistics | None, parts: Parts, progress: Progress
) -> tuple[QuantizedTower, dict[str, Any]]:
    """What becomes of the source and what it costs per layer, and the coverage of the statistics that it was made from.

    Stages that `parts` holds are taken from there. Without `statistics` they are computed stage by stage and dropped.
    """
    for name, reason in quantizer.choice.skipped.items():
        log.warning("%s stays as it is: %s", name, reason)
    stages = quantizer.stages
    done = {stage.name: kept for stage in stages if (kept := parts.record(_part(stage))) is not None}
    progress.start(len(quantizer.choice.quantised), "quantise")
    try:
        if done:
            log.info("going on after %d finished stages of %d", len(done), len(stages))
            progress.advance(sum(len(kept["reports"]) for kept in done.values()))
        new = _computed(asked, quantizer, parts, progress, done) if statistics is None else _read(quantizer, statistics, done)
        for stage, grams in new:
            stored = quantizer.quantized(stage, grams)
            done[stage.name] = _keep(parts, stage, stored, _tokens(grams, quantizer.wanted(stage)))
            release_memory()
            progress.advance(len(stored.reports), f"{progress_text(stage, stored.reports)}, peak {peak_rss_bytes() / 1e9:.2f} GB")
    finally:
        progress.finish()
    added: dict[str, Added] = {name: entry for stage in stages for name, entry in _stored(parts, stage).items()}
    reports = tuple(LayerReport(*values) for stage in stages for values in done[stage.name]["reports"])
    tokens = {name: count for stage in stages for name, count in done[stage.name]["tokens"].items()}
    coverage = statistics.coverage if statistics is not None else coverage_of(parts).to_json()
    return QuantizedTower(quantizer.rewrite(added), reports), {key: coverage[key] for key in COVERED} | {"tokens_per_layer": tokens}


def _tokens(grams: Mapping[str, Gram], layers: Collection[str]) -> dict[str, int]:
    """Tokens that entered every layer's statistics, held out or not."""
    return {name: sum(grams[part].count for part in (name, name + HELD_OUT) if part in grams) for name in layers}


def _computed(
    asked: Asked, quantizer: TowerQuantizer, parts: Parts, progress: Progress, done: Collection[str]
) -> Iterator[tuple[Stage, Mapping[str, Gram]]]:
    """Stages that are not `done`, with statistics that are computed now; those without a chosen linear are only run through."""
    wanted = {stage.name for stage in quantizer.stages}
    unwanted = {stage.name for stage in quantizer.all_stages if stage.name not in wanted}
    sums = InputSum if quantizer.section.engine == "autoawq" else GramSum
    yield from captured(asked, parts, quantizer.device, progress, done={*done, *unwanted}, sums=sums)
    if any(stage.root == LANGUAGE for stage in quantizer.stages):
        yield from captured_language(asked, parts, quantizer.device, progress, done={*done, *unwanted})


def _read(quantizer: TowerQuantizer, statistics: Statistics, done: Collection[str]) -> Iterator[tuple[Stage, Mapping[str, Gram]]]:
    files = StatisticsFiles(statistics.folder)
    for stage in quantizer.stages:
        if stage.name not in done:
            yield stage, dict(_stage_statistics(files, quantizer, stage))


def _stage_statistics(files: StatisticsFiles, quantizer: TowerQuantizer, stage: Stage) -> Iterator[tuple[str, Gram]]:
    """Of a stage's linears; those of held-out pictures apart where they are needed. Raises RunError where they are and there are none."""
    for name in quantizer.wanted(stage):
        if not quantizer.section.search.compensate:
            yield name, files.read(name)
            continue
        held_out = files.read_held_out(name)
        if held_out is None:
            raise RunError(
                f"{files.folder}: has no statistics of held-out pictures for {name}", "calibrate with quantize_awq.search.compensate: true"
            )
        yield name, files.read_fitted(name)
        yield name + HELD_OUT, held_out


def _keep(parts: Parts, stage: Stage, stored: StoredStage, tokens: dict[str, int]) -> dict[str, Any]:
    """Keeps a finished stage: its tensors as they will be stored, then its record."""
    path = _path(parts, stage)
    path.unlink(missing_ok=True)
    with TensorWriter(path, [(name, dtype_code(tensor.dtype), tuple(tensor.shape)) for name, tensor in stored.tensors.items()]) as writer:
        for name, tensor in stored.tensors.items():
            writer.write(name, tensor)
    fields = {"reports": [list(report) for report in stored.reports], "tokens": tokens}
    parts.keep(_part(stage), fields, [path.name])
    return fields


def _stored(parts: Parts, stage: Stage) -> dict[str, TensorEntry]:
    path = _path(parts, stage)
    if not path.is_file():
        raise RunError(f"{path} is gone", "it must not change during a run; run again")
    return read_header(path)


def _path(parts: Parts, stage: Stage) -> Path:
    return parts.path(f"{stage.name}.safetensors")


def _part(stage: Stage) -> str:
    return f"stage-{stage.name}"
