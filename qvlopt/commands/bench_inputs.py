"""What bench measures: candidates as engines to open, the workload of the recipe, and a saved run to compare with."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from qvlopt.artifact.manifest import MANIFEST, WEIGHT_SUFFIXES, read_manifest
from qvlopt.commands.bench_worker import EngineSpec
from qvlopt.commands.candidates import MODEL, candidate_folder, check_answers, check_named, finished_artifacts, served_model
from qvlopt.errors import NotComparableError, RunError, UsageError
from qvlopt.model.hub import download, is_hub_id
from qvlopt.recipe.load import DEFAULT, LoadedRecipe
from qvlopt.recipe.paths import is_there, resolve_path, user_path
from qvlopt.runtime import ONNX_KINDS
from qvlopt.runtime.openai_address import Address
from qvlopt.timing.plan import Workload, cases_of
from qvlopt.timing.result import EngineResult, engine_from_json

DTYPE_WORDS = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "auto": ""}
COMPUTE = {"export": "fp32", "int8": "int8"}
"""How ONNX artifacts are shown beside torch's dtypes."""
SOURCE_DTYPES = ("float32", "bfloat16")
"""How the source is measured when nobody names a candidate or a dtype."""
REPORT = "report.json"


class BenchTarget(NamedTuple):
    """An engine to measure. `folder` is where its weights are, None for a server and before a download."""

    name: str
    candidate: str
    spec: EngineSpec
    folder: Path | None
    kind: str


class SavedRun(NamedTuple):
    """An earlier run: where it is, its engines, and what its machine and workload were."""

    path: str
    engines: tuple[EngineResult, ...]
    environment: Mapping[str, Any]
    workload: Mapping[str, Any]


def workload_of(loaded: LoadedRecipe) -> Workload:
    """The bench section's requests."""
    section = loaded.recipe.bench
    prompts = (section.prompt_tokens,) if isinstance(section.prompt_tokens, int) else section.prompt_tokens
    cases = cases_of(section.images, prompts, section.new_tokens, section.concurrency)
    return Workload(cases, section.repeats, section.warmup, loaded.recipe.seed)


def find_bench_targets(loaded: LoadedRecipe, candidates: Sequence[str], *, fetch: bool = True) -> tuple[BenchTarget, ...]:
    """Every engine to measure, under names that differ.

    Without candidates: the source in SOURCE_DTYPES, every finished artifact of the recipe, and its server if it has one. With `fetch` a source on the
    hub is downloaded now, so that no clock sees it. Raises UsageError for a candidate that is not there or cannot be run.
    """
    dtype = loaded.recipe.evaluate.dtype
    if candidates:
        found = [target for name in dict.fromkeys(candidates) for target in _targets(loaded, name, dtype, fetch)]
    else:
        dtypes = SOURCE_DTYPES if loaded.origins.get("evaluate.dtype", DEFAULT) == DEFAULT else (dtype,)
        found = [target for each in dtypes for target in _targets(loaded, MODEL, each, fetch)]
        found += [target for folder in finished_artifacts(loaded) for target in _targets(loaded, str(folder), dtype, fetch)]
        served = served_model(loaded)
        found += [_server(loaded, served)] if served else []
    names = [target.name for target in found]
    return tuple(target if names.count(target.name) == 1 else target._replace(name=f"{target.candidate}: {target.name}") for target in found)


def weight_bytes(folder: Path | None) -> int | None:
    """Bytes of the files that hold weights; None without a folder."""
    if folder is None:
        return None
    return sum(path.stat().st_size for path in folder.iterdir() if path.is_file() and path.name.endswith(WEIGHT_SUFFIXES))


def saved_run(loaded: LoadedRecipe) -> SavedRun | None:
    """The run that bench.compare names: a report, its folder, or what --json printed. None when the recipe names none.

    Raises NotComparableError when it is not there, UsageError when it is something else.
    """
    named = loaded.recipe.bench.compare
    if named is None:
        return None
    here = user_path(named)
    place = here if is_there(here) else resolve_path(named, loaded.folder)
    if place is None:
        raise NotComparableError(f"bench.compare: there is no {named}", "give the report.json of an earlier bench, or its folder")
    path = place / REPORT if place.is_dir() else place
    wrong = UsageError(f"bench.compare: {path} is no report of bench", "give the report.json of an earlier bench, or its folder")
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        engines = tuple(engine_from_json(engine) for engine in document["engines"])
        return SavedRun(str(path), engines, dict(document["environment"]), dict(document["workload"]))
    except OSError as error:
        raise NotComparableError(f"bench.compare: {path} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise wrong from error


def check_bench(loaded: LoadedRecipe) -> None:
    """Finds what is wrong with a recipe's bench section before there is anything to measure."""
    saved_run(loaded)


def _targets(loaded: LoadedRecipe, candidate: str, dtype: str, fetch: bool) -> list[BenchTarget]:
    """Every engine that a candidate is measured in: torch with each attention, and compiled besides where the recipe asks for it."""
    check_named(candidate)
    if "://" in candidate:
        return [_server(loaded, candidate)]
    folder = _folder(loaded, candidate, fetch)
    manifest = read_manifest(folder) if folder is not None and (folder / MANIFEST).exists() else None
    if manifest is not None:
        check_answers(candidate, manifest)
    kind = manifest.kind if manifest else "checkpoint"
    path = str(folder) if folder is not None else loaded.recipe.model.path
    short = candidate if candidate == MODEL or candidate.startswith("builtin:") else Path(path).name
    if kind in ONNX_KINDS:
        return [BenchTarget(f"{short} (onnx {COMPUTE[kind]})", candidate, _spec(loaded, "onnx", path, dtype), folder, kind)]
    section, spec = loaded.recipe.bench, _spec(loaded, "torch", path, dtype)
    specs = [
        replace(spec, attention=way, compiled=how)
        for way in dict.fromkeys(section.attention)
        for how in ((False, True) if section.compile else (False,))
    ]
    return [BenchTarget(f"{short} ({_torch_words(each)})", candidate, each, folder, kind) for each in specs]


def _torch_words(spec: EngineSpec) -> str:
    """How an engine of torch differs from torch's plain one."""
    parts = ("torch", DTYPE_WORDS[spec.dtype], "" if spec.attention == "sdpa" else spec.attention, "compiled" if spec.compiled else "")
    return " ".join(part for part in parts if part)


def _server(loaded: LoadedRecipe, candidate: str) -> BenchTarget:
    """A server by its URL, which holds no password: one that does is refused without being repeated."""
    address = Address.parse(candidate)
    short = (address.model or address.host).rstrip("/").rpartition("/")[2]
    return BenchTarget(f"{short} (server)", candidate, _spec(loaded, "openai", candidate, "auto"), None, "server")


def _spec(loaded: LoadedRecipe, engine: str, path: str, dtype: str) -> EngineSpec:
    return EngineSpec(engine, path, dtype, loaded.recipe.model_dump(mode="json"), str(loaded.folder))


def _folder(loaded: LoadedRecipe, candidate: str, fetch: bool) -> Path | None:
    """Where a candidate's weights are; None for a source on the hub that is not to be fetched."""
    if candidate != MODEL:
        return candidate_folder(loaded, candidate)
    path = loaded.recipe.model.path
    folder = resolve_path(path, loaded.folder, kind="assets")
    if folder is None and is_hub_id(path):
        return download(path, revision=loaded.recipe.model.revision) if fetch else None
    if folder is None or not folder.is_dir():
        raise RunError(f"no checkpoint at {path}", "give a folder, a hub id ORGANISATION/NAME or builtin:nano")
    return folder
