"""What is where in Qwen3-VL, as data: module names, linears of the vision tower, and which scales fold into what.

Everything that depends on the architecture's names lives here; the search and the commands only follow it.
Names are canonical (`model.visual.*`, `model.language_model.*`, `lm_head`) and without `.weight`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, Literal

from qvlopt.model.vision import VisionConfig

VISION = "model.visual"
LANGUAGE = "model.language_model"
LM_HEAD = "lm_head"
EMBEDDING = "model.language_model.embed_tokens"

BLOCK_LINEARS = ("attn.qkv", "attn.proj", "mlp.linear_fc1", "mlp.linear_fc2")
MERGER_LINEARS = ("linear_fc1", "linear_fc2")
FUSED = (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("mlp.gate_proj", "mlp.up_proj"))
"""Linears of a decoder layer that read the same inputs and that engines join into one: quantised together or not at all."""

Scope = Literal["vision", "vision.blocks", "vision+language"]


@dataclass(frozen=True)
class Fold:
    """Per-channel scales that divide the output of `producer` and multiply the columns of all `consumers`, exactly.

    kind `norm`: `producer` is a norm; its weight, and its bias where it has one, are divided. With `repeats` > 1 the
    consumer reads that many normalised vectors side by side (the final merger's 2 x 2 patches), so its scales repeat.
    kind `rows`: `producer` is a linear whose last rows, as many as there are channels, are divided: the values of a fused
    qkv or a v_proj, since attention mixes values over tokens only, and an up_proj, which its gate multiplies. With `head`
    > 0 every run of `head` channels is read `repeats` times in a row: the heads that share a key and value head.
    Nothing folds through a GELU: blocks' `linear_fc2` and mergers' `linear_fc2` have no entry.
    """

    producer: str
    consumers: tuple[str, ...]
    kind: Literal["norm", "rows"]
    repeats: int = 1
    head: int = 0

    def under(self, root: str) -> Fold:
        """The same fold by canonical names, for names relative to `root`."""
        return replace(self, producer=f"{root}.{self.producer}", consumers=tuple(f"{root}.{name}" for name in self.consumers))


@dataclass(frozen=True)
class Stage:
    """A part of the model that is loaded, calibrated and quantised at once: a block, a merger, a decoder layer.

    All names are relative to `root`.
    """

    name: str
    linears: tuple[str, ...]
    """In the order in which they must be searched: a fold's producer comes after its consumers, which stand together."""
    folds: tuple[Fold, ...]
    root: str = VISION


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


def language_stages(text: Mapping[str, Any]) -> tuple[Stage, ...]:
    """The decoder layers, names relative to the language model; `text` is a ModelConfig's."""
    return tuple(_decoder_layer(f"layers.{index}", text) for index in range(text["num_hidden_layers"]))


def language_linears(text: Mapping[str, Any]) -> tuple[str, ...]:
    """Canonical names of the decoder layers' linears."""
    return tuple(f"{LANGUAGE}.{name}" for stage in language_stages(text) for name in stage.linears)


def unclipped_rows(linear: str, rows: int) -> int:
    """Leading rows of a linear whose ranges are never cut: queries and keys, fused with the values or not.

    Their product goes through a softmax, where the layer's output error says little; AutoAWQ leaves them out too, but
    by names (`q_`, `k_`) that a fused `attn.qkv` does not have.
    """
    if linear.endswith(("self_attn.q_proj", "self_attn.k_proj")):
        return rows
    return rows // 3 * 2 if linear.endswith("attn.qkv") else 0


def matching(patterns: tuple[str, ...], names: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    """For each glob, the canonical module names that it matches, whole or by the last dotted parts.

    `lm_head`, `model.visual.blocks.0.*`, `visual.merger*` and `attn.proj` all mean what they look like.
    """
    return {p: tuple(n for n in names if fnmatchcase(n, p) or fnmatchcase(n, f"*.{p}")) for p in patterns}


def _block(name: str) -> Stage:
    qkv, proj, fc1, fc2 = (f"{name}.{linear}" for linear in BLOCK_LINEARS)
    folds = (
        Fold(qkv, (proj,), "rows"),
        Fold(f"{name}.norm1", (qkv,), "norm"),
        Fold(f"{name}.norm2", (fc1,), "norm"),
    )
    return Stage(name, (proj, qkv, fc1, fc2), folds)


def _merger(name: str, *, repeats: int) -> Stage:
    fc1, fc2 = (f"{name}.{linear}" for linear in MERGER_LINEARS)
    return Stage(name, (fc1, fc2), (Fold(f"{name}.norm", (fc1,), "norm", repeats),))


def _decoder_layer(name: str, text: Mapping[str, Any]) -> Stage:
    """Values pass through attention head by head, each read by several query heads; gate(x) * up(x) leaves up's scales alone."""
    q, k, v, o = (f"{name}.self_attn.{part}_proj" for part in "qkvo")
    gate, up, down = (f"{name}.mlp.{part}_proj" for part in ("gate", "up", "down"))
    shared = text["num_attention_heads"] // text["num_key_value_heads"]
    folds = (
        Fold(v, (o,), "rows", repeats=shared, head=text["head_dim"]),
        Fold(f"{name}.input_layernorm", (q, k, v), "norm"),
        Fold(up, (down,), "rows"),
        Fold(f"{name}.post_attention_layernorm", (gate, up), "norm"),
    )
    return Stage(name, (o, q, k, v, down, gate, up), folds, LANGUAGE)
