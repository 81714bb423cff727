"""Which engines bench compares with which: an earlier run, two named candidates, or all of them side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from qvlopt.commands.bench_inputs import SavedRun
from qvlopt.timing.comparison import TOLERANCE, Comparison, Pace, Ratio, compare_engines, unlike, verdict_of
from qvlopt.timing.environment import SAME_MACHINE, comparable
from qvlopt.timing.plan import Workload
from qvlopt.timing.result import EngineResult

SAME_WORK = ("cases", "warm-up")
"""What of a workload must be the same; more repeats only make the answer surer."""


def compare_run(
    engines: Sequence[EngineResult], workload: Workload, environment: Mapping[str, Any], *, saved: SavedRun | None, named: int, gate: float | None
) -> Comparison:
    """`named` is how many candidates the user named: two of them are compared, the second with the first."""
    tolerance = TOLERANCE if gate is None else gate
    if saved is not None:
        return _with_saved(engines, workload, environment, saved, tolerance)
    if len(engines) < 2:
        return Comparison(None, None, (), tolerance)
    base, *others = engines
    if base.error is not None:
        return Comparison(base.name, "not_comparable", (), tolerance, (f"{base.name} did not finish: {base.error}",))
    ratios = [ratio for other in others for ratio in compare_engines(other.name, base.series(), other.series(), tolerance=tolerance)]
    if named == len(engines) == 2:
        return Comparison(base.name, verdict_of(ratios), tuple(ratios), tolerance)
    return Comparison(base.name, None, tuple(_without_verdict(ratio) for ratio in ratios), tolerance)


def _with_saved(engines: Sequence[EngineResult], workload: Workload, environment: Mapping[str, Any], saved: SavedRun, tolerance: float) -> Comparison:
    """Every engine with the earlier one of its name; a lone engine with a lone one whatever they are called."""
    differ = unlike(comparable(saved.environment), comparable(environment), SAME_MACHINE)
    differ += unlike(_work(saved.workload), _work(workload.to_json()), SAME_WORK)
    earlier = {engine.name: engine for engine in saved.engines}
    pairs = [(earlier[engine.name], engine) for engine in engines if engine.name in earlier]
    if not pairs and len(engines) == len(saved.engines) == 1:
        pairs = [(saved.engines[0], engines[0])]
    missing = [f"{engine.name} is not in {saved.path}" for engine in engines if not any(engine is new for _, new in pairs)]
    differ += tuple(
        f"{base.name}: {base.fingerprint.get(key)} then, {new.fingerprint.get(key)} now" for base, new in pairs for key in _changed(base, new)
    )
    if differ or not pairs:
        return Comparison(saved.path, "not_comparable", (), tolerance, (*differ, *missing))
    ratios: list[Ratio] = []
    for base, new in pairs:
        pace = Pace.between(base.paces, new.paces)
        ratios += compare_engines(new.name, base.series(), new.series(), tolerance=tolerance, pace=pace)
    return Comparison(saved.path, verdict_of(ratios), tuple(ratios), tolerance, tuple(missing))


def _work(workload: Mapping[str, Any]) -> dict[str, Any]:
    """The requests of a run in words."""
    cases = [f"{case.get('name')}, {case.get('new_tokens')} new" for case in workload.get("cases") or ()]
    return {"cases": "; ".join(cases), "warm-up": workload.get("warmup")}


def _changed(base: EngineResult, new: EngineResult) -> tuple[str, ...]:
    """Conditions of an engine that make it another one: what it computes in, on what, with which pictures."""
    keys = ("engine", "dtype", "device", "threads", "pixels")
    return tuple(key for key in keys if key in base.fingerprint and key in new.fingerprint and base.fingerprint[key] != new.fingerprint[key])


def _without_verdict(ratio: Ratio) -> Ratio:
    return replace(ratio, verdict=None)
