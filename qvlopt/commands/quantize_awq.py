"""quantize-awq: the linears of the vision tower become low-bit integers; everything else keeps its bytes, and that is proven.

The tower is calibrated and quantised stage by stage. What a stage became is kept beside the output at once, so that a run
that is killed goes on after the last finished stage and ends with the same bytes.
"""

from __future__ import annotations

import time
from math import prod
from pathlib import Path

import torch

import qvlopt
from qvlopt.artifact.digest import digest_of
from qvlopt.artifact.folder import existing_state, is_done, require_space, write_folder
from qvlopt.artifact.manifest import read_intact, read_manifest, write_manifest
from qvlopt.artifact.process import peak_rss_bytes
from qvlopt.artifact.unfinished import unfinished
from qvlopt.commands.awq_parts import scope_rows
from qvlopt.commands.awq_result import KIND, QuantizeResult, artifact_manifest, artifact_result, module_records
from qvlopt.commands.awq_stages import Statistics, quantise_stages
from qvlopt.commands.calibration_data import KIND as STATISTICS
from qvlopt.commands.calibration_data import Asked
from qvlopt.commands.forecast import awq_cost, lasting, sized
from qvlopt.commands.hardware import prepare
from qvlopt.commands.output import is_very_folder, output_folder
from qvlopt.commands.plan import Plan, PlanRow
from qvlopt.commands.self_check import self_check
from qvlopt.errors import RunError
from qvlopt.model.autoawq import AutoAwq
from qvlopt.model.awq_choice import Choice, choose
from qvlopt.model.cost import Cost
from qvlopt.model.quantize_tower import TowerQuantizer
from qvlopt.model.rewrite import check_values, other_files, write_rewritten
from qvlopt.model.source import Source
from qvlopt.model.stage_forward import linear_dtype
from qvlopt.recipe.load import LoadedRecipe
from qvlopt.recipe.paths import resolve_path
from qvlopt.recipe.schema import QuantizeAwqSection
from qvlopt.report.card import awq_card
from qvlopt.report.progress import Progress, SilentProgress

__all__ = ["KIND", "QuantizeResult", "quantize_awq"]

ALGORITHM = 2
"""Part of the digest: raised whenever the same inputs give other integers.
2: a layer's statistics see at most MOST_TOKENS tokens, gathered in larger pieces."""


def quantize_awq(
    loaded: LoadedRecipe, *, overwrite: bool = False, resume: bool = False, dry_run: bool = False, progress: Progress | None = None
) -> QuantizeResult | Plan:
    """Writes `<output>/awq`, self-checked. Does nothing when the same artifact is there; finished stages of a killed run are used.

    Raises UsageError for a recipe that does not fit the source, RunError for what breaks on the way.
    """
    del resume  # finished work on the same result is used in any case
    began, progress = time.monotonic(), progress or SilentProgress()
    asked = Asked.by(loaded)
    section, source = loaded.recipe.quantize_awq, asked.source
    choice = choose(source, section)
    other_files(source.folder)  # what cannot be copied is refused before the work
    if section.engine == "autoawq":
        AutoAwq.require()
    output, statistics = output_folder(loaded, KIND), _named_statistics(asked)
    digest = _digest(section, source, statistics.digest if statistics else asked.digest)
    if not dry_run and is_done(output, digest, overwrite=overwrite):
        return artifact_result(output, read_manifest(output), existed=True)
    quantizer = TowerQuantizer(source, section, choice, prepare(loaded))
    used = statistics or _found_statistics(asked)
    cost = awq_cost(asked, choice, quantizer.device, has_statistics=used is not None)
    if dry_run:
        return Plan(loaded, (*_plan_rows(source, section, choice, output), _takes(cost)))
    require_space(output, cost.disk_bytes)
    with (
        write_folder(output, digest=digest, overwrite=overwrite) as folder,
        unfinished(output, digest=digest, conditions=_conditions(source, quantizer.device), overwrite=overwrite) as parts,
    ):
        check_values(source, quantizer.rewrite({}))
        (rewrite, reports), coverage = quantise_stages(asked, quantizer, used, parts, progress)
        write_rewritten(folder, source, rewrite)
        check = self_check(folder, asked, rewrite, expected=choice.quantised, found=[report.name for report in reports])
        parent = used.digest if used else asked.digest
        manifest = artifact_manifest(asked, reports, coverage, digest=digest, statistics=parent, inner=choice.inner)
        manifest = manifest.model_copy(update={"modules": module_records(source, folder), "check": check, "peak_rss_bytes": peak_rss_bytes()})
        (folder / "README.md").write_text(awq_card(manifest.model_dump(mode="json")), encoding="utf-8")
        write_manifest(folder, manifest.model_copy(update={"seconds": time.monotonic() - began}))
    parts.remove()
    return artifact_result(output, read_manifest(output), existed=False)


def _takes(cost: Cost) -> PlanRow:
    said = f"about {sized(cost.rss_bytes)} of memory, {sized(cost.disk_bytes)} of disk, {lasting(cost.seconds)} here"
    return PlanRow("takes", f"{said}; qvlopt doctor says more")


def _digest(section: QuantizeAwqSection, source: Source, statistics: str) -> str:
    asked = section.model_dump(mode="json", exclude={"statistics"})
    return digest_of({"kind": KIND, "algorithm": ALGORITHM, "source": source.digest, "statistics": statistics, "section": asked})


def _conditions(source: Source, device: torch.device) -> dict[str, str]:
    """What else decides the bytes: another version, product or number of threads may add up in another order."""
    versions = {"qvlopt": qvlopt.__version__, "torch": torch.__version__, "threads": str(torch.get_num_threads())}
    return versions | {"device": str(device), "linears": str(linear_dtype(source, device))}


def _named_statistics(asked: Asked) -> Statistics | None:
    """The recipe's `statistics`; None where it names none. Raises RunError when they are missing or of another model."""
    named = asked.loaded.recipe.quantize_awq.statistics
    if named is None:
        return None
    folder = resolve_path(named, asked.loaded.folder)
    if folder is None:
        raise RunError(f"quantize_awq.statistics: there is no folder {named}", "give the output of qvlopt calibrate, or null")
    manifest = read_intact(folder)
    if manifest.kind != STATISTICS or manifest.source is None or manifest.source.digest != asked.source.digest:
        raise RunError(f"quantize_awq.statistics: {folder} was not calibrated on this source", "run qvlopt calibrate with this model.path")
    return Statistics(folder, manifest.coverage or {}, manifest.digest)


def _found_statistics(asked: Asked) -> Statistics | None:
    """Those that `calibrate` left in `<output>/calibrate`, if they are the ones that would be computed now and cover the scope."""
    recipe = asked.loaded.recipe
    if recipe.quantize_awq.scope == "vision+language" and recipe.calibrate.scope != "vision+language":
        return None
    folder = output_folder(asked.loaded, "calibrate")
    if recipe.quantize_awq.engine == "autoawq" or is_very_folder(asked.loaded) or existing_state(folder, asked.digest) != "same":
        return None
    return Statistics(folder, read_manifest(folder).coverage or {}, asked.digest)


def _plan_rows(source: Source, section: QuantizeAwqSection, choice: Choice, output: Path) -> tuple[PlanRow, ...]:
    weights = [source.tensors.entry(source.names[f"{name}.weight"]) for name in choice.quantised]
    numbers = sum(prod(entry.shape) for entry in weights)
    bits = section.bits + (16 + section.bits) / section.group_size
    whole = sum(entry.nbytes for entry in source.tensors.entries.values())
    saved = sum(entry.nbytes for entry in weights) - int(numbers * bits / 8) if section.format != "bf16" else 0
    rest = "everything outside it byte for byte" if section.dtype == "source" else f"everything outside it as {section.dtype}"
    return (
        PlanRow("source", f"{source.id}: {source.folder}, {whole:,} bytes of tensors"),
        PlanRow("quantises", f"{len(choice.quantised)} linears, {numbers:,} weights to {section.bits} bits in groups of {section.group_size}"),
        PlanRow("keeps", f"{len(choice.kept_vision) + len(choice.kept_language or ())} linears of the scope's parts, and {rest}"),
        *([] if choice.inner is None else [PlanRow("pads", f"the tower's MLPs to {choice.inner} inner channels, the new ones zero")]),
        PlanRow("writes", f"{output}: about {whole - saved:,} bytes as {section.format}"),
        *scope_rows(source, section),
        PlanRow("tells", "per layer the loss of plain rounding and of what was chosen; scores need qvlopt evaluate"),
    )
