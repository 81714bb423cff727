"""Damage of a candidate: what both engines showed on the same items is joined, and the stage that is to blame is looked for."""

from __future__ import annotations

import math
from dataclasses import replace
from statistics import fmean

import torch

from qvlopt.artifact.manifest import MANIFEST, read_manifest
from qvlopt.damage.features import Featured, swap_features
from qvlopt.damage.logits import kl_divergence
from qvlopt.damage.stages import compare_stages
from qvlopt.damage.tally import StageDamage, shares
from qvlopt.errors import QvloptError
from qvlopt.model.source import Source, open_source
from qvlopt.recipe.load import LoadedRecipe
from qvlopt.recipe.paths import resolve_path
from qvlopt.runtime import ONNX_KINDS
from qvlopt.runtime.engine import Encoded
from qvlopt.scoring.damage import Blame, Damage, Key, Look, Step, blame_stages, measure
from qvlopt.scoring.evaluate import EngineRun

WORST_STAGES = 10
"""Stages that a report names."""


def measure_damage(looks: tuple[Look, Look], runs: tuple[EngineRun, EngineRun]) -> Damage:
    """The damage of a candidate, both tuples being (base, candidate)."""
    return measure(*looks, runs)


def measure_steps(looks: tuple[Look, Look, Look], names: tuple[str, str, str]) -> tuple[Step, ...]:
    """The distances from the base to its export, and from there to the candidate: so that export is not blamed on quantisation."""
    nothing = (EngineRun({}, {}), EngineRun({}, {}))
    steps = []
    for index in range(2):
        found = measure(looks[index], looks[index + 1], nothing)
        steps.append(Step(f"{names[index]} -> {names[index + 1]}", found.kl_mean, found.top1_agreement, found.vision_cosine_min))
    return tuple(steps)


def name_stages(damage: Damage, looks: tuple[Look, Look], paths: tuple[str, str], loaded: LoadedRecipe) -> Damage:
    """The damage with the stages that do it, worst first. What goes wrong in the search is noted: it is no reason to lose the report."""
    try:
        base, candidate = (_checkpoint(path, loaded) for path in paths)
        if base is None:
            return replace(damage, notes=(*damage.notes, "stages are compared only where the base is a checkpoint folder"))
        count, device = loaded.recipe.evaluate.damage.stages, _device(loaded)
        sources = (base, candidate) if candidate else None
        stages = compare_checkpoints(sources, looks, count, device) if sources else compare_graphs(base, looks, damage, count, device)
    except (ValueError, QvloptError) as error:
        return replace(damage, notes=(*damage.notes, f"stages were not compared: {error}"))
    blame = blame_stages(stages) if stages else Blame("runtime", 1.0, "stage by stage both compute the same; the engines' settings differ")
    return replace(damage, stages=tuple(stages[:WORST_STAGES]), blame=replace(blame, cause=_cause(damage, paths[1], loaded)) if blame else None)


def _cause(damage: Damage, path: str, loaded: LoadedRecipe) -> str | None:
    """Whether exporting or quantising damaged an ONNX artifact: the step with the larger distance."""
    if _checkpoint_folder(path, loaded) is not None or "://" in path:
        return None
    if not damage.steps:
        folder = resolve_path(path, loaded.folder, kind="assets")
        return "export" if folder is not None and read_manifest(folder).kind == "export" else None
    exported, quantised = (step.kl_mean or 0.0 for step in damage.steps)
    return "export" if exported >= quantised else "quantisation"


def compare_checkpoints(sources: tuple[Source, Source], looks: tuple[Look, Look], count: int, device: torch.device) -> list[StageDamage]:
    """Two checkpoints stage by stage, on `count` of the items that were looked at."""
    items = [(looks[0].items[key], looks[1].items[key]) for key in _telling(looks, count)]
    return compare_stages(*sources, items, dtype=torch.float32, device=device, vocabulary=_vocabulary(looks[0]))


def _checkpoint(path: str, loaded: LoadedRecipe) -> Source | None:
    """The checkpoint at a path; None for ONNX artifacts and servers, whose stages cannot be seen."""
    if _checkpoint_folder(path, loaded) is None:
        return None
    return open_source(path, revision=loaded.recipe.model.revision if path == loaded.recipe.model.path else None, folder=loaded.folder)


def _checkpoint_folder(path: str, loaded: LoadedRecipe) -> str | None:
    """The path itself where it is a checkpoint's, on the hub too."""
    folder = None if "://" in path else resolve_path(path, loaded.folder, kind="assets")
    is_graphs = folder is not None and (folder / MANIFEST).is_file() and read_manifest(folder).kind in ONNX_KINDS
    return None if "://" in path or is_graphs else path


def _device(loaded: LoadedRecipe) -> torch.device:
    """In float32 on a GPU where there is one, whatever dtype the engines ran in: the stages are compared, not the engines."""
    return torch.device("cuda" if torch.cuda.is_available() and loaded.recipe.hardware.device != "cpu" else "cpu")


def _vocabulary(look: Look) -> int | None:
    """How many ids the tokenizer has, by the logits of the engine."""
    return next((logits.shape[1] for logits in look.logits.values()), None)


def _telling(looks: tuple[Look, Look], count: int) -> list[Key]:
    """Of the half with fewer tokens, since every stage that differs is followed through the rest of the model, the items furthest off."""
    shared = [key for key in looks[0].items if key in looks[1].items]
    shared.sort(key=lambda key: (len(looks[0].items[key].ids), key))
    distance = {key: float(kl_divergence(looks[0].logits[key], looks[1].logits[key]).mean()) for key in shared if _are_comparable(looks, key)}
    return sorted(shared[: max(count, len(shared) // 2)], key=lambda key: -distance.get(key, 0.0))[:count]


def _are_comparable(looks: tuple[Look, Look], key: Key) -> bool:
    ours, theirs = (side.logits.get(key) for side in looks)
    return ours is not None and theirs is not None and ours.shape == theirs.shape


def compare_graphs(base: Source, looks: tuple[Look, Look], damage: Damage, count: int, device: torch.device) -> list[StageDamage]:
    """A candidate of which only features and distributions can be seen: preprocessing, its vision graph, its decoder graph.

    What its features do by themselves is found with the base's language model; the rest of the distance is the decoder's.
    """
    ours, theirs = looks
    keys = [key for key in _telling(looks, count) if _are_comparable(looks, key)]
    total = fmean(float(kl_divergence(ours.logits[key], theirs.logits[key]).mean()) for key in keys) if keys else 0.0
    if damage.inputs_changed:
        return [StageDamage("preprocessing", math.inf, 0.0, -math.inf, total)]
    taps = base.settings.vision.deepstack_visual_indexes
    shown = [Featured(ours.items[key], *(_joined(side.encoded[key], len(taps)) for side in looks)) for key in keys if ours.encoded[key]]
    features = swap_features(base, shown, dtype=torch.float32, device=device, vocabulary=_vocabulary(ours)) if shown else None
    left = max(0.0, total - (features.kl if features else 0.0))
    decoder = StageDamage("decoder graph", math.nan, math.nan, math.nan, left)
    stages = [*([features] if features else []), *([decoder] if left else [])]
    effects = shares({stage.stage: {0: stage.kl} for stage in stages})
    return sorted((replace(stage, share=effects[stage.stage]) for stage in stages), key=lambda stage: -stage.kl)


def _joined(encoded: tuple[Encoded, ...], taps: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Features of all pictures of an item, one behind the other; zeros for taps that the engine does not have."""
    embeds, found = torch.cat([each.image_embeds for each in encoded]), torch.cat([each.deepstack for each in encoded], dim=1)
    return embeds, torch.cat((found, found.new_zeros((max(0, taps - len(found)), *embeds.shape))))
