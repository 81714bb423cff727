"""What evaluate works on: candidates with their bases, and the recipe's sets, checked before an engine is opened."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from qvlopt.artifact.manifest import MANIFEST, Manifest, read_intact, read_manifest
from qvlopt.commands.candidates import MODEL, artifacts_beside, candidate_folder, check_answers, check_named, finished_artifacts, served_model
from qvlopt.data.preflight import check_pictures
from qvlopt.data.samples import SampleSet, read_samples
from qvlopt.data.set_files import FORMATS, find_set
from qvlopt.errors import NotComparableError, RunError, UsageError
from qvlopt.model.hub import is_hub_id
from qvlopt.recipe.load import LoadedRecipe
from qvlopt.recipe.paths import resolve_path
from qvlopt.recipe.schema import DataEntry
from qvlopt.runtime import ONNX_KINDS
from qvlopt.runtime.openai_address import Address
from qvlopt.scoring.baseline import read_baseline
from qvlopt.scoring.evaluate import EvalSet, Target
from qvlopt.scoring.tasks import task_metrics

SOURCE = "source"
"""The baseline that stands for what a candidate was made from."""

NO_BASELINE = "give source, a checkpoint or artifact folder, or a file that evaluate.save_baseline wrote"


class ReadSets(NamedTuple):
    """The recipe's sets, and remarks about them that are worth a warning."""

    sets: tuple[EvalSet, ...]
    remarks: tuple[str, ...]


def find_targets(loaded: LoadedRecipe, candidates: Sequence[str]) -> tuple[Target, ...]:
    """Every candidate once, with its base.

    Raises UsageError for one that is not there or cannot answer, NotComparableError when its baseline is not there.
    """
    named = tuple(dict.fromkeys(candidates)) or _served_model(loaded) or _finished_artifacts(loaded) or (MODEL,)
    return tuple(_target(loaded, name) for name in named)


def find_exports(loaded: LoadedRecipe, targets: Sequence[Target]) -> dict[str, str]:
    """The finished export of the same source under the recipe's output, by the path of each candidate that is an INT8 artifact."""
    beside = artifacts_beside(loaded).items()
    exports = {found.source.digest: str(folder) for folder, found in beside if found.kind == "export" and found.source}
    by_path = {}
    for target in targets:
        manifest = read_manifest(Path(target.path)) if "://" not in target.path and (Path(target.path) / MANIFEST).is_file() else None
        if manifest is not None and manifest.kind == "int8" and manifest.source and manifest.source.digest in exports:
            by_path[target.path] = exports[manifest.source.digest]
    return by_path


def read_sets(loaded: LoadedRecipe, *, download: bool = True) -> ReadSets:
    """Reads every entry and the headers of its pictures. Raises UsageError or RunError naming the entry's file.

    Without `download` sets of the hub are read from the cache only.
    """
    sets: list[EvalSet] = []
    remarks: list[str] = []
    for entry in loaded.recipe.evaluate.data:
        each, said = _read_set(loaded, entry, download=download)
        sets.append(each)
        remarks += [f"{entry.name}: {remark}" for remark in said]
    _check_floors(loaded, sets)
    return ReadSets(tuple(sets), tuple(remarks))


def check_sets(loaded: LoadedRecipe) -> None:
    """Finds what is wrong with a recipe's evaluation before there are candidates. Raises UsageError or RunError."""
    read_sets(loaded)


def _finished_artifacts(loaded: LoadedRecipe) -> tuple[str, ...]:
    """Folders under the recipe's output that hold a finished artifact which can answer, by name."""
    engine = loaded.recipe.evaluate.engine
    return tuple(str(folder) for folder, found in finished_artifacts(loaded).items() if _engine_fits(engine, found.kind))


def _target(loaded: LoadedRecipe, name: str) -> Target:
    check_named(name)
    baseline = loaded.recipe.evaluate.baseline
    if "://" in name:
        Address.parse(name)
        return Target(name, name, loaded.recipe.model.path if baseline == SOURCE else _baseline(loaded, baseline))
    path, manifest = _opened(loaded, name)
    _check_engine(loaded, name, manifest.kind if manifest else "checkpoint")
    if baseline != SOURCE:
        return Target(name, path, _baseline(loaded, baseline))
    if name == MODEL or path == loaded.recipe.model.path:
        return Target(name, path, None)
    if manifest is None or manifest.source is None:
        return Target(name, path, loaded.recipe.model.path)
    source = manifest.source
    if resolve_path(source.path, loaded.folder, kind="assets") is None and not is_hub_id(source.path):
        raise NotComparableError(f"{name} was made from {source.path}, which is not there", "name another one with evaluate.baseline")
    return Target(name, path, source.path, source.digest)


def _engine_fits(engine: str, kind: str) -> bool:
    """Whether the recipe's engine answers for candidates of that kind; the base is answered by whatever can."""
    return engine not in ("torch", "onnx") or (engine == "onnx") == (kind in ONNX_KINDS)


def _check_engine(loaded: LoadedRecipe, name: str, kind: str) -> None:
    engine = loaded.recipe.evaluate.engine
    if not _engine_fits(engine, kind):
        raise UsageError(
            f"evaluate.engine: {engine} does not answer for {name}, which is {'a' if kind == 'checkpoint' else 'an artifact of kind'} {kind}",
            "use auto: ONNX artifacts are answered by onnxruntime, everything else by torch",
        )


def _opened(loaded: LoadedRecipe, name: str) -> tuple[str, Manifest | None]:
    """What to open for a candidate, and its manifest when it is one of our artifacts."""
    if name == MODEL:
        return loaded.recipe.model.path, None
    folder = candidate_folder(loaded, name)
    if not (folder / MANIFEST).exists():
        return (name if name.startswith("builtin:") else str(folder)), None
    manifest = read_intact(folder)
    check_answers(name, manifest)
    return str(folder), manifest


def _served_model(loaded: LoadedRecipe) -> tuple[str, ...]:
    """`URL#model` of evaluate.server, which is the candidate when none is named."""
    served = served_model(loaded)
    return (served,) if served is not None and loaded.recipe.evaluate.engine in ("auto", "openai") else ()


def _baseline(loaded: LoadedRecipe, baseline: str) -> str:
    if "://" in baseline:
        Address.parse(baseline)
        return baseline
    folder = resolve_path(baseline, loaded.folder, kind="assets")
    if folder is None:
        raise NotComparableError(f"evaluate.baseline: there is no file or folder {baseline}", NO_BASELINE)
    if not folder.is_dir():
        read_baseline(folder)
        return str(folder.absolute())
    if (folder / MANIFEST).exists():
        read_intact(folder)
    return baseline if baseline.startswith("builtin:") else str(folder.absolute())


def _read_set(loaded: LoadedRecipe, entry: DataEntry, *, download: bool) -> tuple[EvalSet, tuple[str, ...]]:
    chosen = _chosen(loaded, entry, download=download)
    metrics = task_metrics(entry.task, chosen.samples)
    for sample in chosen.samples:
        if not sample.answers:
            raise RunError(f"{sample.origin}: item {sample.id} has no answers, so it cannot be scored", "add answers, or remove the row")
    checked = check_pictures(chosen.samples)
    limit = entry.max_new_tokens or metrics.max_new_tokens
    each = EvalSet(entry.name, entry.task, chosen.samples, checked.skipped, checked.sizes, metrics, limit, chosen.digest)
    return each, checked.remarks


def _chosen(loaded: LoadedRecipe, entry: DataEntry, *, download: bool) -> SampleSet:
    """The entry's items, asked as its prompt says. The smaller limit counts, the entry's or that of all."""
    place = find_set(entry.path, loaded.folder, download=download)
    if place is None:
        raise RunError(f"evaluate.data {entry.name}: there is no set {entry.path}", f"give {FORMATS}, or builtin:nano-eval")
    limits = [limit for limit in (entry.limit, loaded.recipe.evaluate.limit) if limit is not None]
    seed, limit = loaded.recipe.seed, min(limits, default=None)
    chosen = read_samples(place, task=entry.task, limit=limit, split=entry.split, seed=seed, columns=entry.columns)
    if entry.prompt is None:
        return chosen
    if "{question}" not in entry.prompt:
        raise UsageError(
            f"evaluate.data {entry.name}: prompt has no {{question}}", "say where the question goes, such as '{question} Answer in one word.'"
        )
    asked = tuple(replace(sample, question=entry.prompt.replace("{question}", sample.question)) for sample in chosen.samples)
    return replace(chosen, samples=asked)


def _check_floors(loaded: LoadedRecipe, sets: Sequence[EvalSet]) -> None:
    """A floor that no metric has would hold for ever."""
    scored = {f"{each.name}.{metric.name}": metric for each in sets for metric in each.metrics.all}
    for floor in loaded.recipe.evaluate.gate.floors:
        if floor in {each.name for each in sets}:
            continue
        if floor not in scored:
            raise UsageError(f"evaluate.gate.floors: {floor} is no metric of this evaluation", f"there are {', '.join(scored)}")
        if scored[floor].is_error_rate:
            raise UsageError(f"evaluate.gate.floors: {floor} is an error rate, which has no floor", "use a score")
