"""Every parameter of a Qwen3-VL by its canonical name, with its shape: what a checkpoint must hold, no more, no less.

Canonical names are those of transformers 5: `model.visual.*`, `model.language_model.*`, `lm_head.weight`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qvlopt.model import names
from qvlopt.model.vision import VisionConfig

VISION, LANGUAGE = f"{names.VISION}.", f"{names.LANGUAGE}."
EMBEDDING, HEAD = f"{names.EMBEDDING}.weight", f"{names.LM_HEAD}.weight"
Shape = tuple[int, ...]

_PREFIXES = (
    (VISION, VISION), (LANGUAGE, LANGUAGE), ("visual.", VISION), ("language_model.model.", LANGUAGE), ("language_model.lm_head.", "lm_head."),
    ("model.", LANGUAGE),
)  # fmt: skip
"""Spellings of prefixes, first match wins: transformers 5, Qwen2-VL's era, and vLLM's runtime names."""


def canonical_name(stored: str) -> str:
    """The canonical name of a stored tensor, its own when no known prefix fits."""
    for prefix, canonical in _PREFIXES:
        if stored.startswith(prefix):
            return canonical + stored.removeprefix(prefix)
    return stored


def vision_shapes(config: VisionConfig) -> dict[str, Shape]:
    """Parameters of the tower, names relative to it, in the order of computation."""
    width, inner, merged = config.hidden_size, config.intermediate_size, config.hidden_size * config.spatial_merge_size**2
    shapes: dict[str, Shape] = {
        "patch_embed.proj.weight": (width, config.in_channels, config.temporal_patch_size, config.patch_size, config.patch_size),
        "patch_embed.proj.bias": (width,),
        "pos_embed.weight": (config.num_position_embeddings, width),
    }
    for index in range(config.depth):
        block = f"blocks.{index}"
        shapes |= _norm(f"{block}.norm1", width) | _linear(f"{block}.attn.qkv", 3 * width, width) | _linear(f"{block}.attn.proj", width, width)
        shapes |= _norm(f"{block}.norm2", width) | _linear(f"{block}.mlp.linear_fc1", inner, width) | _linear(f"{block}.mlp.linear_fc2", width, inner)
    mergers = [(f"deepstack_merger_list.{index}", merged) for index in range(len(config.deepstack_visual_indexes))]
    for name, norm_width in [*mergers, ("merger", width)]:
        shapes |= _norm(f"{name}.norm", norm_width) | _linear(f"{name}.linear_fc1", merged, merged)
        shapes |= _linear(f"{name}.linear_fc2", config.out_hidden_size, merged)
    return shapes


def text_shapes(settings: Mapping[str, Any]) -> dict[str, Shape]:
    """Parameters of the language model without the head, names relative to it."""
    width, inner, head = settings["hidden_size"], settings["intermediate_size"], settings["head_dim"]
    queries, keys = settings["num_attention_heads"] * head, settings["num_key_value_heads"] * head
    shapes: dict[str, Shape] = {"embed_tokens.weight": (settings["vocab_size"], width)}
    for index in range(settings["num_hidden_layers"]):
        layer = f"layers.{index}"
        shapes |= {f"{layer}.{norm}.weight": (width,) for norm in ("input_layernorm", "post_attention_layernorm")}
        shapes |= {f"{layer}.self_attn.{norm}.weight": (head,) for norm in ("q_norm", "k_norm")}
        projections = {"q_proj": (queries, width), "k_proj": (keys, width), "v_proj": (keys, width), "o_proj": (width, queries)}
        shapes |= {f"{layer}.self_attn.{name}.weight": shape for name, shape in projections.items()}
        if settings["attention_bias"]:
            shapes |= {f"{layer}.self_attn.{name}.bias": shape[:1] for name, shape in projections.items()}
        shapes |= {f"{layer}.mlp.{name}.weight": (inner, width) for name in ("gate_proj", "up_proj")}
        shapes[f"{layer}.mlp.down_proj.weight"] = (width, inner)
    return {**shapes, "norm.weight": (width,)}


def parameter_shapes(vision: VisionConfig, text: Mapping[str, Any], *, tied: bool) -> dict[str, Shape]:
    """Everything that is stored, by canonical name; the head only when it is not the embedding."""
    shapes = {VISION + name: shape for name, shape in vision_shapes(vision).items()}
    shapes |= {LANGUAGE + name: shape for name, shape in text_shapes(text).items()}
    return shapes if tied else {**shapes, HEAD: (text["vocab_size"], text["hidden_size"])}


def _norm(name: str, width: int) -> dict[str, Shape]:
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}


def _linear(name: str, rows: int, columns: int) -> dict[str, Shape]:
    return {f"{name}.weight": (rows, columns), f"{name}.bias": (rows,)}
