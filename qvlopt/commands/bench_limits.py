"""How near each engine's stages come to what the machine can do: the roofline line of bench."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from qvlopt.commands.bench_inputs import BenchTarget
from qvlopt.errors import RunError
from qvlopt.graphs import names
from qvlopt.model.config import ModelConfig, read_config
from qvlopt.timing.result import CaseResult, EngineResult
from qvlopt.timing.roofline import Attained, Limits, StoredBytes, attained, stage_needs, stored_bytes

log = logging.getLogger(__name__)

ITEMSIZE = {"float32": 4, "float16": 2, "bfloat16": 2}
COMPUTES = {"export": "float32", "int8": "int8"}
"""What the matrix products of an ONNX artifact are made in; of torch it is the engine's own dtype."""
ONNX_CACHE_ITEMSIZE = 4


def dtypes_of(results: Sequence[tuple[BenchTarget, EngineResult]]) -> tuple[str, ...]:
    """The dtypes whose matrix products have to be timed."""
    return tuple(dict.fromkeys(dtype for target, engine in results if (dtype := _dtype(target, engine)) is not None))


def with_limits(target: BenchTarget, engine: EngineResult, limits: Limits) -> EngineResult:
    """The engine with the least time of each stage of its cases; as it is where the model or its dtype is not known."""
    dtype = _dtype(target, engine)
    if dtype is None or target.folder is None or not engine.cases:
        return engine
    try:
        config = read_config(target.folder)
        stored = _stored(target, config, dtype)
    except (RunError, OSError) as error:
        log.info("%s: no limits (%s)", target.name, error)
        return engine
    return replace(engine, cases=tuple(replace(case, limits=_case_limits(case, config, stored, (limits, dtype))) for case in engine.cases))


def _case_limits(case: CaseResult, config: ModelConfig, stored: StoredBytes, rates: tuple[Limits, str]) -> Mapping[str, Attained]:
    times = case.good[0].times if case.good else None
    if times is None or times.prompt_tokens is None or times.picture_tokens is None or case.case.concurrency > 1 or case.state != "cold":
        return {}
    patches = times.picture_tokens * config.vision.spatial_merge_size**2
    needs = stage_needs(config, stored, patches=patches, prompt_tokens=times.prompt_tokens)
    found = {}
    for stage, need in needs.items():
        seconds = case.samples(stage).median
        reached = attained(need, seconds, *rates) if seconds else None
        if reached is not None:
            found[stage] = reached
    return found


def _dtype(target: BenchTarget, engine: EngineResult) -> str | None:
    said: Any = engine.fingerprint.get("dtype")
    return COMPUTES.get(target.kind) or (said if said in ITEMSIZE else None)


def _stored(target: BenchTarget, config: ModelConfig, dtype: str) -> StoredBytes:
    """Of torch every weight in its dtype, whatever the file holds; of ONNX what the graphs' files hold."""
    if target.spec.kind == "torch" or target.folder is None:
        return stored_bytes(config, ITEMSIZE[dtype])
    decoder = _graph_bytes(target.folder, names.DECODER_GRAPH)
    twin = _graph_bytes(target.folder, names.DECODE_GRAPH)
    return StoredBytes(_graph_bytes(target.folder, names.VISION_GRAPH), decoder, twin or decoder, ONNX_CACHE_ITEMSIZE)


def _graph_bytes(folder: Path, graph: str) -> int:
    return sum(path.stat().st_size for path in (folder / graph, folder / f"{graph}.data") if path.is_file())
