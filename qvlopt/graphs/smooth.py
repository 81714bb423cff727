"""Scales that move outliers of activations into weights, exactly: what may be divided, and what is multiplied for it.

SmoothQuant (Xiao et al. 2023, eq. 4): s_j = max|x_j|^a / max|w_j|^(1 - a). Here the division is not computed at run time; it is
folded into what gives x: a norm, the value rows (attention mixes tokens, not channels), or the rows of `up` (the gate
multiplies channel by channel). Nothing folds through a GELU.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from qvlopt.graphs.weights import Weights, qkv_part
from qvlopt.model.names import LANGUAGE, VISION, Fold, Stage
from qvlopt.model.vision import VisionConfig

STRENGTHS = (0.35, 0.5, 0.65, 0.8)
"""Exponents that are tried beside no smoothing at all."""


class Divided(NamedTuple):
    """A parameter whose rows (or values) from `start` are divided by the scale of their channel."""

    parameter: str
    start: int = 0


class Group(NamedTuple):
    """Linears that read one input, and what gives that input.

    `channel` int64 [K]: the channel of the producers that each input of the consumers is. Empty `producers`: no fold. `is_kept`:
    what the producers give stays in the key-value buffers, so all graphs over the same buffers must fold the same scale.
    """

    consumers: tuple[str, ...]
    producers: tuple[Divided, ...] = ()
    channel: torch.Tensor | None = None
    is_kept: bool = False


def vision_groups(stage: Stage, config: VisionConfig) -> tuple[Group, ...]:
    """Every linear of a stage of the tower, by canonical name, with its fold if there is one."""
    folds = {consumer: fold for fold in stage.folds for consumer in fold.consumers}
    return tuple(_vision_group(linear, folds.get(linear), config) for linear in stage.linears)


def text_groups(settings: Mapping[str, Any], layer: int) -> tuple[Group, ...]:
    """The linears of a layer of the language model."""
    name = f"{LANGUAGE}.layers.{layer}"
    heads, kv_heads, head_dim = settings["num_attention_heads"], settings["num_key_value_heads"], settings["head_dim"]
    value = torch.arange(kv_heads * head_dim).view(kv_heads, 1, head_dim).expand(-1, heads // kv_heads, -1).reshape(-1)
    values = [Divided(f"{name}.self_attn.v_proj.weight")]
    if settings["attention_bias"]:
        values.append(Divided(f"{name}.self_attn.v_proj.bias"))
    width, inner = torch.arange(settings["hidden_size"]), torch.arange(settings["intermediate_size"])
    return (
        Group(tuple(f"{name}.self_attn.{linear}" for linear in ("q_proj", "k_proj", "v_proj")), (Divided(f"{name}.input_layernorm.weight"),), width),
        Group((f"{name}.self_attn.o_proj",), tuple(values), value, is_kept=True),
        Group((f"{name}.mlp.gate_proj", f"{name}.mlp.up_proj"), (Divided(f"{name}.post_attention_layernorm.weight"),), width),
        Group((f"{name}.mlp.down_proj",), (Divided(f"{name}.mlp.up_proj.weight"),), inner),
    )


def scale_of(largest_x: torch.Tensor, weights: Sequence[torch.Tensor], group: Group, strength: float) -> torch.Tensor:
    """float32 [P]: SmoothQuant's scale of every channel of the producers; 1 where input or weights are zero.

    `largest_x` [K] are the largest magnitudes of the inputs. Channels that several inputs share take the largest of them.
    """
    assert group.channel is not None, "only a group with producers is smoothed"
    largest_w = torch.stack([weight.abs().amax(0) for weight in weights]).amax(0).float()
    x, w = _by_channel(largest_x.float(), group.channel), _by_channel(largest_w, group.channel)
    scale = x**strength / w ** (1 - strength)
    return torch.where((x > 0) & (w > 0), scale, 1.0)


class FoldedWeights:
    """`Weights` with scales folded in: exact but for float32 rounding. Folded parameters come in float32."""

    def __init__(self, weights: Weights) -> None:
        self._weights = weights
        self._columns: dict[str, torch.Tensor] = {}
        self._rows: dict[str, tuple[int, torch.Tensor]] = {}

    def fold(self, group: Group, scale: torch.Tensor) -> None:
        """Divides the producers by `scale` [P] and multiplies the consumers' columns."""
        assert group.channel is not None, "only a group with producers is smoothed"
        for consumer in group.consumers:
            self._columns[f"{consumer}.weight"] = scale[group.channel]
        for parameter, start in group.producers:
            self._rows[parameter] = (start, scale)

    def __call__(self, parameter: str) -> torch.Tensor:
        part = qkv_part(parameter, self)
        if part is not None:
            return part
        tensor = self._weights(parameter)
        if parameter in self._columns:
            tensor = tensor.float() * self._columns[parameter]
        if parameter in self._rows:
            start, scale = self._rows[parameter]
            tensor = tensor.float().clone()
            part = tensor[start : start + len(scale)]
            part /= scale.view(-1, *[1] * (tensor.ndim - 1))
        return tensor


def _vision_group(linear: str, fold: Fold | None, config: VisionConfig) -> Group:
    consumers = (f"{VISION}.{linear}",)
    if fold is None:
        return Group(consumers)
    width = config.hidden_size
    if fold.kind == "rows":  # the values of the fused qkv
        rows = tuple(Divided(f"{VISION}.{fold.producer}.{leaf}", 2 * width) for leaf in ("weight", "bias"))
        return Group(consumers, rows, torch.arange(width))
    wide = width * config.spatial_merge_size**2 if linear.startswith("deepstack") else width
    norm = tuple(Divided(f"{VISION}.{fold.producer}.{leaf}") for leaf in ("weight", "bias"))
    return Group(consumers, norm, torch.arange(wide).repeat(fold.repeats))


def _by_channel(values: torch.Tensor, channel: torch.Tensor) -> torch.Tensor:
    """The largest value of every channel: [K] to [P]."""
    return torch.zeros(int(channel.max()) + 1).scatter_reduce_(0, channel, values, "amax")
