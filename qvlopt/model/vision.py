"""Qwen3-VL's vision tower as functions of its weights by name: one forward for training, calibration and inference.

Written against the weights and config alone, so that a block can run before the next is loaded and any linear layer can
be observed or replaced. `transformers`' own module is the oracle in the tests. Letters in shapes:
B pictures of equal size, N patches a picture, D hidden width, H heads, M = N / merge**2 merged tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

Linear = Callable[[str, torch.Tensor], torch.Tensor]
"""Applies the linear layer of that name (relative to the tower, such as `blocks.0.attn.qkv`) to activations [..., K]."""

LAYER_NORM_EPS = 1e-6
"""modeling_qwen3_vl.py: every LayerNorm of the tower is built with eps=1e-6; the config has no key for it."""


@dataclass(frozen=True)
class VisionConfig:
    """The shape of a vision tower, from `vision_config` of a checkpoint's config.json."""

    depth: int
    hidden_size: int
    num_heads: int
    intermediate_size: int
    out_hidden_size: int
    patch_size: int
    temporal_patch_size: int
    spatial_merge_size: int
    num_position_embeddings: int
    deepstack_visual_indexes: tuple[int, ...]
    in_channels: int = 3
    hidden_act: str = "gelu_pytorch_tanh"
    rope_theta: float = 10000.0

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> VisionConfig:
        """Reads the keys it knows and ignores the rest; raises KeyError on a missing one."""
        rope = config.get("rope_parameters") or {}
        return cls(
            depth=config["depth"],
            hidden_size=config["hidden_size"],
            num_heads=config["num_heads"],
            intermediate_size=config["intermediate_size"],
            out_hidden_size=config["out_hidden_size"],
            patch_size=config["patch_size"],
            temporal_patch_size=config["temporal_patch_size"],
            spatial_merge_size=config["spatial_merge_size"],
            num_position_embeddings=config["num_position_embeddings"],
            deepstack_visual_indexes=tuple(config["deepstack_visual_indexes"]),
            in_channels=config.get("in_channels", 3),
            hidden_act=config.get("hidden_act", "gelu_pytorch_tanh"),
            rope_theta=rope.get("rope_theta", 10000.0),
        )

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def patch_dim(self) -> int:
        """Width of a flattened patch, as in `pixel_values`."""
        return self.in_channels * self.temporal_patch_size * self.patch_size**2


@dataclass(frozen=True)
class VisionOutput:
    """`merged` [B, M, out_hidden_size] and one such tensor for each DeepStack tap, from the first block to the last."""

    merged: torch.Tensor
    deepstack: tuple[torch.Tensor, ...]


def patch_positions(grid: tuple[int, int], merge: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Row and column of every patch, int64 [N], in the order of `pixel_values`: merge x merge blocks, row by row."""
    height, width = grid
    rows = torch.arange(height).view(height // merge, 1, merge, 1).expand(-1, width // merge, -1, merge)
    cols = torch.arange(width).view(1, width // merge, 1, merge).expand(height // merge, -1, merge, -1)
    return rows.reshape(-1), cols.reshape(-1)


def _axis_weights(length: int, side: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Lower index, upper index and weight of the upper for `length` points spread over [0, side - 1], ends included."""
    at = torch.linspace(0, side - 1, length, dtype=torch.float32)
    low = at.floor().long()
    return low, (low + 1).clamp(max=side - 1), at - low


def position_embedding(table: torch.Tensor, grid: tuple[int, int], merge: int) -> torch.Tensor:
    """The learned square table [S*S, D] resampled bilinearly (align_corners) to a grid of patches: [N, D]."""
    side = round(table.shape[0] ** 0.5)
    rows, cols = patch_positions(grid, merge)
    row_low, row_high, row_weight = (t[rows] for t in _axis_weights(grid[0], side))
    col_low, col_high, col_weight = (t[cols] for t in _axis_weights(grid[1], side))
    row_weight, col_weight = row_weight[:, None].to(table.device), col_weight[:, None].to(table.device)

    def at(row: torch.Tensor, col: torch.Tensor) -> torch.Tensor:
        return table[(row * side + col).to(table.device)]

    return (
        at(row_low, col_low) * ((1 - row_weight) * (1 - col_weight))
        + at(row_low, col_high) * ((1 - row_weight) * col_weight)
        + at(row_high, col_low) * (row_weight * (1 - col_weight))
        + at(row_high, col_high) * (row_weight * col_weight)
    )


def rotary(config: VisionConfig, grid: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine of the 2-D rotary embedding, float32 [N, head_dim] each: rows turn one half, columns the other."""
    rows, cols = patch_positions(grid, config.spatial_merge_size)
    half = config.head_dim // 2
    inverse = 1.0 / (config.rope_theta ** (torch.arange(0, half, 2, dtype=torch.float32) / half))
    angles = torch.cat((rows[:, None] * inverse, cols[:, None] * inverse), dim=-1)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding in float32; x [B, H, N, head_dim]."""
    low, high = x.float().chunk(2, dim=-1)
    return (x.float() * cos + torch.cat((-high, low), dim=-1) * sin).to(x.dtype)


def _activation(kind: str, x: torch.Tensor) -> torch.Tensor:
    if kind == "gelu_pytorch_tanh":
        return F.gelu(x, approximate="tanh")
    if kind == "gelu":
        return F.gelu(x)
    raise ValueError(f"vision_config.hidden_act: got {kind!r}, expected gelu_pytorch_tanh or gelu")


class VisionTower:
    """A tower over a mapping of its weights (names relative to the tower, such as `blocks.0.norm1.weight`).

    The mapping may load lazily. `linear` replaces how linear layers are applied; the default multiplies with the
    weights as they are. Nothing is modified.
    """

    def __init__(self, config: VisionConfig, weights: Mapping[str, torch.Tensor], linear: Linear | None = None) -> None:
        self.config = config
        self.weights = weights
        self.linear = linear or self._linear

    def _linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weights[f"{name}.weight"], self.weights[f"{name}.bias"])

    def _norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        weight = self.weights[f"{name}.weight"]
        return F.layer_norm(x, (x.shape[-1],), weight, self.weights[f"{name}.bias"], LAYER_NORM_EPS)

    def embed(self, pixel_values: torch.Tensor, grid: tuple[int, int]) -> torch.Tensor:
        """Patches [B, N, patch_dim] to the first block's input [B, N, D]. The convolution's stride equals its kernel."""
        weight = self.weights["patch_embed.proj.weight"]
        x = F.linear(pixel_values.to(weight.dtype), weight.flatten(1), self.weights["patch_embed.proj.bias"])
        positions = position_embedding(self.weights["pos_embed.weight"], grid, self.config.spatial_merge_size)
        return x + positions.to(x.dtype)

    def block(self, index: int, x: torch.Tensor, cos_sin: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """Block `index` on x [B, N, D]; attention is over each picture's own patches, without a mask."""
        batch, patches, width = x.shape
        name = f"blocks.{index}"
        qkv = self.linear(f"{name}.attn.qkv", self._norm(f"{name}.norm1", x))
        q, k, v = qkv.view(batch, patches, 3, self.config.num_heads, -1).permute(2, 0, 3, 1, 4)
        cos, sin = cos_sin
        attended = F.scaled_dot_product_attention(_rotate(q, cos, sin), _rotate(k, cos, sin), v)
        x = x + self.linear(f"{name}.attn.proj", attended.transpose(1, 2).reshape(batch, patches, width))
        inner = self.linear(f"{name}.mlp.linear_fc1", self._norm(f"{name}.norm2", x))
        return x + self.linear(f"{name}.mlp.linear_fc2", _activation(self.config.hidden_act, inner))

    def merge(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """`merger` (norm, then merge) or a `deepstack_merger_list.I` (merge, then norm): [B, N, D] to [B, M, out]."""
        batch, patches, width = x.shape
        unit = self.config.spatial_merge_size**2
        if name == "merger":
            x = self._norm(f"{name}.norm", x).reshape(batch, patches // unit, unit * width)
        else:
            x = self._norm(f"{name}.norm", x.reshape(batch, patches // unit, unit * width))
        return self.linear(f"{name}.linear_fc2", F.gelu(self.linear(f"{name}.linear_fc1", x)))

    def stages(self, pixel_values: torch.Tensor, grid: tuple[int, int]) -> Iterator[tuple[str, torch.Tensor]]:
        """(`embed` | `blocks.I` | `deepstack_merger_list.I` | `merger`, output) in order of computation."""
        x = self.embed(pixel_values, grid)
        yield "embed", x
        cos, sin = rotary(self.config, grid)
        cos_sin = (cos.to(x.device), sin.to(x.device))
        for index in range(self.config.depth):
            x = self.block(index, x, cos_sin)
            yield f"blocks.{index}", x
            if index in self.config.deepstack_visual_indexes:
                tap = f"deepstack_merger_list.{self.config.deepstack_visual_indexes.index(index)}"
                yield tap, self.merge(tap, x)
        yield "merger", self.merge("merger", x)

    def __call__(self, pixel_values: torch.Tensor, grid: tuple[int, int]) -> VisionOutput:
        """Encodes B pictures of one size: pixel_values [B, N, patch_dim], grid = (rows, columns) of patches."""
        taps: dict[str, torch.Tensor] = {}
        merged = pixel_values
        for name, value in self.stages(pixel_values, grid):
            if name.startswith("deepstack"):
                taps[name] = value
            elif name == "merger":
                merged = value
        return VisionOutput(merged, tuple(taps.values()))
