"""The tower's forward stage by stage over many pictures: one stage's weights are in memory at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from qvlopt.model.load_tower import load_vision_part
from qvlopt.model.names import Stage, vision_stages
from qvlopt.model.positions import Grid
from qvlopt.model.source import Source
from qvlopt.model.vision import Linear, VisionOutput, VisionTower, rotary

Batch = tuple[torch.Tensor, Grid]
"""`pixel_values` float32 [B, N, patch_dim] of B pictures of one size, and their grid."""

EMBEDDING_PARTS = ("patch_embed.", "pos_embed.")
WIDE = 512
"""Hidden width from which on matrix products decide how long a tower takes."""


def embedded(source: Source, batches: Iterable[Batch], device: torch.device) -> Iterator[tuple[torch.Tensor, Grid]]:
    """The first block's input [B, N, D] of every batch, and its grid."""
    tower = VisionTower(source.settings.vision, load_vision_part(source, EMBEDDING_PARTS, dtype=torch.float32, device=device))
    for pixel_values, grid in batches:
        yield tower.embed(pixel_values.to(device), grid), grid


def linear_dtype(source: Source, device: torch.device) -> torch.dtype:
    """What to multiply in while calibrating: bfloat16 for wide towers on hardware that does it natively, else float32.

    Measured on a Zen 4 core at 784 tokens, 1024 to 4096: 195 GFLOP/s in bfloat16, 69 in float32. Inputs are off by 2^-9 of
    themselves then, at random, as in the engines that will run the model; statistics of thousands of tokens do not see it.
    """
    if source.settings.vision.hidden_size < WIDE:
        return torch.float32
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float32
    capabilities: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    return torch.bfloat16 if capabilities.get("avx512_bf16") or capabilities.get("amx_bf16") else torch.float32


class StageForward:
    """One block or merger with its weights in memory: float32, and its linears' in `dtype`. Sums are float32 in any case."""

    def __init__(self, source: Source, stage: Stage, device: torch.device, dtype: torch.dtype = torch.float32) -> None:
        self._config = source.settings.vision
        self.device = device
        self.is_block = stage.name.startswith("blocks.")
        self._name = stage.name
        self._weights = load_vision_part(source, (f"{stage.name}.",), dtype=torch.float32, device=device)
        self._weights.update({f"{name}.weight": self._weights[f"{name}.weight"].to(dtype) for name in stage.linears})
        self._angles: dict[Grid, tuple[torch.Tensor, torch.Tensor]] = {}

    def __call__(self, hidden: torch.Tensor, grid: Grid, linear: Linear | None = None) -> torch.Tensor:
        """A block's output [B, N, D] or a merger's [B, M, out] for its input [B, N, D]; `linear` as in VisionTower."""
        # Made for each call: one that is kept would refer back to this object, and the weights outlive their stage.
        tower = VisionTower(self._config, self._weights, linear or self.apply)
        hidden = hidden.to(self.device)
        if not self.is_block:
            return tower.merge(self._name, hidden)
        return tower.block(int(self._name.removeprefix("blocks.")), hidden, self._cos_sin(grid))

    def apply(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """The stage's linear of that name, relative to the tower, on float32 [..., K]."""
        weight, bias = self._weights[f"{name}.weight"], self._weights[f"{name}.bias"]
        if weight.dtype == x.dtype:
            return F.linear(x, weight, bias)
        return F.linear(x.to(weight.dtype), weight).to(x.dtype).add_(bias)

    def _cos_sin(self, grid: Grid) -> tuple[torch.Tensor, torch.Tensor]:
        """Of the last grid only: a table is as large as a head's share of the activations."""
        if grid not in self._angles:
            cos, sin = rotary(self._config, grid)
            self._angles = {grid: (cos.to(self.device), sin.to(self.device))}
        return self._angles[grid]


def encode_by_stage(source: Source, batches: Sequence[Batch], device: torch.device) -> list[VisionOutput]:
    """The tower's outputs for every batch, as VisionTower gives them, without the whole tower in memory."""
    outputs: list[list[torch.Tensor]] = [[] for _ in batches]
    with torch.inference_mode():
        hidden = [x for x, _ in embedded(source, batches, device)]
        for stage in vision_stages(source.settings.vision):
            forward = StageForward(source, stage, device)
            results = [forward(x, grid) for x, (_, grid) in zip(hidden, batches, strict=True)]
            if forward.is_block:
                hidden = results
            else:
                for taps, result in zip(outputs, results, strict=True):
                    taps.append(result)
    return [VisionOutput(taps[-1], tuple(taps[:-1])) for taps in outputs]
