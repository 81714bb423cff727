"""What is where in Qwen3-VL, as data: module names, linears of the vision tower, and which scales fold into what.

Everything that depends on the architecture's names lives here; the search and the commands only follow it.
Names are canonical (`model.visual.*`, `model.language_model.*`, `lm_head`) and without `.weight`.
"""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

from qvlopt.model.vision import VisionConfig

VISION = "model.visual"
LANGUAGE = "model.language_model"
LM_HEAD = "lm_head"
EMBEDDING = "model.language_model.embed_tokens"

BLOCK_LINEARS = ("attn.qkv", "attn.proj", "mlp.linear_fc1", "mlp.linear_fc2")
MERGER_LINEARS = ("linear_fc1", "linear_fc2")

Scope = Literal["vision", "vision.blocks", "vision+language"]


@dataclass(frozen=True)
class Fold:
    """Per-channel scales that divide the output of `producer` and multiply the columns of `consumer`, exactly.

    kind `norm`: `producer` is a LayerNorm; its weight and bias are divided. With `repeats` > 1 the consumer reads that
    many normalised vectors side by side (the final merger's 2 x 2 patches), so its scales repeat.
    kind `value_rows`: `producer` is the fused qkv; its last third of rows and of bias is divided. Attention mixes
    value rows over tokens only, so a scale per channel passes through it.
    Nothing folds through a GELU: blocks' `linear_fc2` and mergers' `linear_fc2` have no entry.
    """

    producer: str
    consumer: str
    kind: Literal["norm", "value_rows"]
    repeats: int = 1


@dataclass(frozen=True)
class Stage:
    """A part of the tower that is loaded, calibrated and quantised at once: a block or a merger."""

    name: str
    linears: tuple[str, ...]
    """In the order in which they must be searched: a fold's producer comes after its consumer."""
    folds: tuple[Fold, ...]


def vision_stages(config: VisionConfig) -> tuple[Stage, ...]:
    """The tower's stages in order of computation, names relative to the tower (`blocks.0`, `merger`, ...)."""
    stages = []
    for index in range(config.depth):
        stages.append(_block(f"blocks.{index}"))
        if index in config.deepstack_visual_indexes:
            stages.append(_merger(f"deepstack_merger_list.{config.deepstack_visual_indexes.index(index)}", repeats=1))
    stages.append(_merger("merger", repeats=config.spatial_merge_size**2))
    return tuple(stages)


def vision_linears(config: VisionConfig, scope: Scope = "vision") -> tuple[str, ...]:
    """Canonical names of the linears that `scope` asks for, in order of computation."""
    stages = vision_stages(config)
    if scope == "vision.blocks":
        stages = tuple(stage for stage in stages if stage.name.startswith("blocks."))
    return tuple(f"{VISION}.{name}" for stage in stages for name in stage.linears)


def unclipped_rows(linear: str, rows: int) -> int:
    """Leading rows of a linear whose ranges are never cut: the queries and keys of a fused qkv.

    Their product goes through a softmax, where the layer's output error says little; AutoAWQ leaves them out too, but
    by names (`q_`, `k_`) that a fused `attn.qkv` does not have.
    """
    return rows // 3 * 2 if linear.endswith("attn.qkv") else 0


def matching(patterns: tuple[str, ...], names: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    """For each glob, the canonical module names that it matches, whole or by the last dotted parts.

    `lm_head`, `model.visual.blocks.0.*`, `visual.merger*` and `attn.proj` all mean what they look like.
    """
    return {p: tuple(n for n in names if fnmatchcase(n, p) or fnmatchcase(n, f"*.{p}")) for p in patterns}


def _block(name: str) -> Stage:
    qkv, proj, fc1, fc2 = (f"{name}.{linear}" for linear in BLOCK_LINEARS)
    folds = (
        Fold(qkv, proj, "value_rows"),
        Fold(f"{name}.norm1", qkv, "norm"),
        Fold(f"{name}.norm2", fc1, "norm"),
    )
    return Stage(name, (proj, qkv, fc1, fc2), folds)


def _merger(name: str, *, repeats: int) -> Stage:
    fc1, fc2 = (f"{name}.{linear}" for linear in MERGER_LINEARS)
    return Stage(name, (fc1, fc2), (Fold(f"{name}.norm", fc1, "norm", repeats),))
