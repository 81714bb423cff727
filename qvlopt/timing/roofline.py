"""What a stage needs at least, and how near to that it comes: Williams, Waterman and Patterson's roofline (2009).

Counted are the multiplications of the linear layers and of attention (an addition each) and the weights, each read once;
activations, norms and the picture's pixels are left out, so the limit is a little too good and no stage reaches it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import prod
from typing import Any, NamedTuple

from qvlopt.model.config import ModelConfig
from qvlopt.model.shapes import text_shapes, vision_shapes

LOOKED_UP = ("pos_embed.weight", "embed_tokens.weight")
"""Tables of which a call reads some rows; they multiply nothing."""


class Need(NamedTuple):
    """Floating-point (or integer) operations and bytes from memory; decode is for one token."""

    operations: int
    bytes: int


@dataclass(frozen=True)
class StoredBytes:
    """Weights as the engine holds them in memory: the tower, the decoder as prefill and as a step read it, a value of its cache."""

    vision: int
    prefill: int
    decode: int
    cache_value: int


@dataclass(frozen=True)
class Limits:
    """What the machine was seen to do: operations/s of a matrix product by dtype, bytes/s of reading. None where not measured."""

    operations_per_s: Mapping[str, float]
    bytes_per_s: float | None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class Attained(NamedTuple):
    """A stage against its limit: `seconds` is the least it could take, `share` that over what it took, `bound` what limits it."""

    seconds: float
    share: float
    bound: str


class Weights(NamedTuple):
    """Values that multiply, counted: for every patch, for every merged token, for every token, and the head's."""

    patch: int
    merged: int
    token: int
    head: int


def count_weights(config: ModelConfig) -> Weights:
    """From the shapes of the config, biases and norms left out."""
    merged = sum(prod(shape) for name, shape in vision_shapes(config.vision).items() if "merger" in name and len(shape) > 1)
    tower = sum(prod(shape) for name, shape in vision_shapes(config.vision).items() if len(shape) > 1 and name not in LOOKED_UP)
    layers = sum(prod(shape) for name, shape in text_shapes(config.text).items() if len(shape) > 1 and name not in LOOKED_UP)
    return Weights(tower - merged, merged, layers, config.text["vocab_size"] * config.text["hidden_size"])


def stored_bytes(config: ModelConfig, itemsize: int) -> StoredBytes:
    """For an engine that holds every weight in one dtype of `itemsize` bytes."""
    weights = count_weights(config)
    language = (weights.token + weights.head) * itemsize
    return StoredBytes((weights.patch + weights.merged) * itemsize, language, language, itemsize)


def stage_needs(config: ModelConfig, stored: StoredBytes, *, patches: int, prompt_tokens: int) -> dict[str, Need]:
    """Needs of the stages that a model has, for one picture of so many patches and a prompt of so many tokens, picture included."""
    weights, text, vision = count_weights(config), config.text, config.vision
    merged = patches // vision.spatial_merge_size**2
    queries = text["num_attention_heads"] * text["head_dim"] * text["num_hidden_layers"]
    cached = 2 * text["num_key_value_heads"] * text["head_dim"] * text["num_hidden_layers"] * stored.cache_value
    tower = 2 * patches * weights.patch + 2 * merged * weights.merged + 4 * patches**2 * vision.hidden_size * vision.depth
    prefill = 2 * prompt_tokens * weights.token + 2 * weights.head + 2 * prompt_tokens**2 * queries  # half of the square is masked
    step = 2 * (weights.token + weights.head) + 4 * prompt_tokens * queries
    needs = {"vision": Need(tower, stored.vision)} if patches else {}
    return {**needs, "prefill": Need(prefill, stored.prefill), "decode": Need(step, stored.decode + prompt_tokens * cached)}


def attained(need: Need, seconds: float, limits: Limits, dtype: str) -> Attained | None:
    """How near a stage that took `seconds` is to its limit; None where a limit was not measured."""
    rate = limits.operations_per_s.get(dtype)
    if not rate or not limits.bytes_per_s or seconds <= 0:
        return None
    computing, reading = need.operations / rate, need.bytes / limits.bytes_per_s
    least = max(computing, reading)
    return Attained(least, least / seconds, "arithmetic" if computing >= reading else "memory")
