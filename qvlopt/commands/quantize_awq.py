"""quantize-awq: the linears of the vision tower become low-bit integers; everything else keeps its bytes, and that is proven.

The tower is calibrated and quantised stage by stage. What a stage became is kept beside the output at once, so that a run
that is killed goes on after the last finished stage and ends with the same bytes.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from math import prod

from qvlopt.artifact.digest import digest_of
from qvlopt.artifact.folder import is_done, require_space, write_folder
from qvlopt.artifact.manifest import read_manifest, write_manifest
from qvlopt.artifact.process import peak_rss_bytes
from qvlopt.artifact.unfinished import unfinished
from qvlopt.commands.awq_parts import scope_rows
from qvlopt.commands.awq_result import KIND, QuantizeResult, artifact_manifest, artifact_result, module_records
from qvlopt.commands.awq_stages import quantise_stages
from qvlopt.commands.calibrated import Statistics, found_statistics, named_statistics
from qvlopt.commands.calibration_data import Asked
from qvlopt.commands.forecast import awq_cost, takes
from qvlopt.commands.hardware import prepare
from qvlopt.commands.output import output_folder
from qvlopt.commands.plan import Plan, PlanRow, planned
from qvlopt.commands.self_check import self_check
from qvlopt.model.autoawq import AutoAwq
from qvlopt.model.awq_choice import Choice, choose
from qvlopt.model.quantize_tower import TowerQuantizer
from qvlopt.model.rewrite import check_values, other_files, write_rewritten
from qvlopt.model.source import Source
from qvlopt.recipe.command_line import command_line
from qvlopt.recipe.load import LoadedRecipe
from qvlopt.recipe.schema import QuantizeAwqSection
from qvlopt.report.card import awq_card
from qvlopt.report.progress import Progress, SilentProgress

__all__ = ["KIND", "QuantizeResult", "quantize_awq"]

ALGORITHM = 4
"""Part of the digest: raised whenever the same inputs give other integers.
2: a layer's statistics see at most MOST_TOKENS tokens, gathered in larger pieces.
3: with compensation, dead channels do not weigh in on scales and clips.
4: losses come from one triangle of the statistics, which are gathered in larger pieces still."""


def quantize_awq(
    loaded: LoadedRecipe, *, overwrite: bool = False, resume: bool = False, dry_run: bool = False, progress: Progress | None = None
) -> QuantizeResult | Plan:
    """Writes `<output>/awq`, self-checked. Does nothing when the same artifact is there; finished stages of a killed run are used.

    Raises UsageError for a recipe that does not fit the source, RunError for what breaks on the way.
    """
    del resume  # finished work on the same result is used in any case
    if dry_run:
        return planned(loaded, lambda: _plan_rows(loaded))
    began, progress = time.monotonic(), progress or SilentProgress()
    asked, choice, statistics = _opened(loaded)
    section, source, output = loaded.recipe.quantize_awq, asked.source, output_folder(loaded, KIND)
    digest = _digest(section, source, statistics.digest if statistics else asked.digest)
    if is_done(output, digest, overwrite=overwrite):
        return artifact_result(output, read_manifest(output), existed=True)
    quantizer = TowerQuantizer(source, section, choice, prepare(loaded))
    used = statistics or _found_statistics(asked)
    require_space(output, awq_cost(asked, choice, quantizer.device, has_statistics=used is not None).disk_bytes)
    with (
        write_folder(output, digest=digest, overwrite=overwrite) as folder,
        unfinished(output, digest=digest, conditions=asked.conditions(quantizer.device), overwrite=overwrite) as parts,
    ):
        check_values(source, quantizer.rewrite({}))
        (rewrite, reports), coverage = quantise_stages(asked, quantizer, used, parts, progress)
        write_rewritten(folder, source, rewrite)
        check = self_check(folder, asked, rewrite, expected=choice.quantised, found=[report.name for report in reports])
        parent = used.digest if used else asked.digest
        manifest = artifact_manifest(asked, reports, coverage, digest=digest, statistics=parent, inner=choice.inner)
        manifest = manifest.model_copy(update={"modules": module_records(source, folder), "check": check, "peak_rss_bytes": peak_rss_bytes()})
        command = command_line(loaded, "quantize-awq", sections=("calibrate", "quantize_awq"))
        (folder / "README.md").write_text(awq_card(manifest.model_dump(mode="json"), command), encoding="utf-8")
        write_manifest(folder, manifest.model_copy(update={"seconds": time.monotonic() - began}))
    parts.remove()
    return artifact_result(output, read_manifest(output), existed=False)


def _opened(loaded: LoadedRecipe, *, cached: bool = False) -> tuple[Asked, Choice, Statistics | None]:
    """What is asked, the linears to quantise, and the statistics that the recipe names; what cannot be done is refused before the work."""
    asked, section = Asked.by(loaded, cached=cached), loaded.recipe.quantize_awq
    choice = choose(asked.source, section)
    other_files(asked.source.folder)
    if section.engine == "autoawq":
        AutoAwq.require()
    return asked, choice, named_statistics(asked, "quantize_awq")


def _digest(section: QuantizeAwqSection, source: Source, statistics: str) -> str:
    asked = section.model_dump(mode="json", exclude={"statistics"})
    return digest_of({"kind": KIND, "algorithm": ALGORITHM, "source": source.digest, "statistics": statistics, "section": asked})


def _found_statistics(asked: Asked) -> Statistics | None:
    """Those that `calibrate` left, if they cover the scope and the engine does not need the inputs themselves."""
    recipe = asked.loaded.recipe
    is_covered = recipe.quantize_awq.scope != "vision+language" or recipe.calibrate.scope == "vision+language"
    return found_statistics(asked) if is_covered and recipe.quantize_awq.engine != "autoawq" else None


def _plan_rows(loaded: LoadedRecipe) -> Iterator[PlanRow]:
    asked, choice, statistics = _opened(loaded, cached=True)
    source, section, output = asked.source, loaded.recipe.quantize_awq, output_folder(loaded, KIND)
    has_statistics = (statistics or _found_statistics(asked)) is not None
    weights = [source.tensors.entry(source.names[f"{name}.weight"]) for name in choice.quantised]
    numbers = sum(prod(entry.shape) for entry in weights)
    bits = section.bits + (16 + section.bits) / section.group_size
    whole = sum(entry.nbytes for entry in source.tensors.entries.values())
    saved = sum(entry.nbytes for entry in weights) - int(numbers * bits / 8) if section.format != "bf16" else 0
    rest = "everything outside it byte for byte" if section.dtype == "source" else f"everything outside it as {section.dtype}"
    yield PlanRow("source", f"{source.id}: {source.folder}, {whole:,} bytes of tensors")
    yield PlanRow("quantises", f"{len(choice.quantised)} linears, {numbers:,} weights to {section.bits} bits in groups of {section.group_size}")
    yield PlanRow("keeps", f"{len(choice.kept_vision) + len(choice.kept_language or ())} linears of the scope's parts, and {rest}")
    if choice.inner is not None:
        yield PlanRow("pads", f"the tower's MLPs to {choice.inner} inner channels, the new ones zero")
    yield PlanRow("writes", f"{output}: about {whole - saved:,} bytes as {section.format}")
    yield from scope_rows(source, section)
    yield PlanRow("tells", "per layer the loss of plain rounding and of what was chosen; scores need qvlopt evaluate")
    yield takes(awq_cost(asked, choice, prepare(loaded), has_statistics=has_statistics))
