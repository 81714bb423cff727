"""Lets every engine of an evaluation do its work, one open at a time: answers, the A/A check, a closer look for damage."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from qvlopt.commands.evaluate_damage import measure_damage, measure_steps, name_stages
from qvlopt.errors import QvloptError
from qvlopt.recipe.load import LoadedRecipe
from qvlopt.report.progress import Progress
from qvlopt.runtime.engine import Engine, LocalEngine
from qvlopt.scoring.baseline import read_baseline
from qvlopt.scoring.compare import Comparison, Rule, compare
from qvlopt.scoring.damage import Damage, Look, choose_items, look
from qvlopt.scoring.evaluate import EngineRun, EvalSet, OpenEngine, Reuse, Target, ask_engine
from qvlopt.scoring.noise import Noise, measure_noise

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Asking:
    """What is asked of whom, and how."""

    loaded: LoadedRecipe
    targets: Sequence[Target]
    sets: Sequence[EvalSet]
    progress: Progress
    reuse: Reuse | None = None
    exports: Mapping[str, str] = field(default_factory=dict)
    """The unquantised export of the same source, by the path of a quantised one; it is looked at, not scored."""


@dataclass
class Work:
    """What the engines did, by the path that they were opened with; `looks` by path and the base whose answers were given."""

    runs: dict[str, EngineRun] = field(default_factory=dict)
    looks: dict[tuple[str, str], Look] = field(default_factory=dict)
    noise: dict[str, Noise] = field(default_factory=dict)


def do_work(open_engine: OpenEngine, asking: Asking) -> Work:
    """Bases go first, for candidates are looked at with their answers. A saved baseline is read instead of asked."""
    work = Work()
    try:
        for path in _in_order(asking.targets):
            if is_saved(path):
                work.runs[path], noise = read_baseline(Path(path))
                work.noise |= {path: noise} if noise else {}
                continue
            engine = open_engine(path)
            try:
                _ask(engine, path, asking, work)
            finally:
                engine.close()
        for target in asking.targets:
            _look_at_export(open_engine, target, asking, work)
    finally:
        asking.progress.finish()
    return work


def compare_all(asking: Asking, work: Work) -> tuple[Comparison, ...]:
    """Every candidate against its base, damage included."""
    return tuple(_compared(target, asking, work) for target in asking.targets)


def is_saved(path: str) -> bool:
    """Whether a base is a saved baseline: engines are opened from folders, hub ids and servers, never from a file."""
    return "://" not in path and Path(path).is_file()


def _in_order(targets: Sequence[Target]) -> list[str]:
    bases = [target.base for target in targets if target.base is not None]
    return list(dict.fromkeys([*bases, *(target.path for target in targets)]))


def _ask(engine: Engine, path: str, asking: Asking, work: Work) -> None:
    section = asking.loaded.recipe.evaluate
    how = {"progress": asking.progress, "label": f"evaluate {path}", "reuse": asking.reuse}
    work.runs[path] = ask_engine(engine, asking.sets, batch=section.batch, **how)  # type: ignore[arg-type]
    is_base = any(target.base == path for target in asking.targets)
    if section.gate.self_check and (is_base or section.save_baseline is not None):
        again = ask_engine(engine, asking.sets, batch=1 if section.batch > 1 else 2, **how)  # type: ignore[arg-type]
        work.noise[path] = measure_noise((work.runs[path], again), asking.sets, margin=section.gate.margin, alpha=section.gate.alpha)
    if not section.damage.items or not isinstance(engine, LocalEngine):
        return
    bases = [path] if is_base else []
    bases += [target.base for target in asking.targets if target.path == path and target.base in work.runs and not is_saved(target.base)]
    for base in dict.fromkeys(bases):
        _look(engine, path, base, asking, work)


def _look_at_export(open_engine: OpenEngine, target: Target, asking: Asking, work: Work) -> None:
    exported = asking.exports.get(target.path)
    if exported is None or target.base is None or (exported, target.base) in work.looks or (target.base, target.base) not in work.looks:
        return
    try:
        engine = open_engine(exported)
    except QvloptError as error:  # it only explains the candidate's damage
        log.warning("%s is left out of the damage: %s", exported, error)
        return
    try:
        if isinstance(engine, LocalEngine):
            _look(engine, exported, target.base, asking, work)
    finally:
        engine.close()


def _look(engine: LocalEngine, path: str, base: str, asking: Asking, work: Work) -> None:
    recipe = asking.loaded.recipe
    chosen = choose_items(asking.sets, work.runs[base], recipe.evaluate.damage.items, recipe.seed)
    asking.progress.start(len(chosen), f"look at {path}")
    work.looks[path, base] = look(engine, chosen, asking.progress)


def _compared(target: Target, asking: Asking, work: Work) -> Comparison:
    gate = asking.loaded.recipe.evaluate.gate
    rule = Rule(margin=gate.margin, alpha=gate.alpha, max_failed=gate.max_failed, floors=gate.floors)
    base = work.runs[target.base] if target.base else None
    noise = work.noise.get(target.base) if target.base else None
    damage = _damage(target, asking, work)
    return compare(target, (base, work.runs[target.path]), asking.sets, rule, noise=noise, damage=damage)


def _damage(target: Target, asking: Asking, work: Work) -> Damage | None:
    looks = [work.looks.get((path, target.base)) for path in (target.base, target.path)] if target.base else []
    ours, theirs = looks or (None, None)
    if target.base is None or ours is None or theirs is None:
        return None
    found = measure_damage((ours, theirs), (work.runs[target.base], work.runs[target.path]))
    exported = asking.exports.get(target.path)
    between = work.looks.get((exported, target.base)) if exported else None
    if between is not None:
        found = replace(found, steps=measure_steps((ours, between, theirs), ("source", "export", "candidate")))
    if found.is_none or found.is_rounding or not asking.loaded.recipe.evaluate.damage.stages:
        return found
    asking.progress.start(1, f"look for the stage that damages {target.name}")
    try:
        return name_stages(found, (ours, theirs), (target.base, target.path), asking.loaded)
    finally:
        asking.progress.finish()
