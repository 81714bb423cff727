"""Weights and activations as the integer operators of the graphs take them: pure tensor code.

W8A8 (`MatMulIntegerToFloat`): weights int8 with one scale an output; every row of activations (a token) is divided by its own
largest magnitude, so that one massive token coarsens no other. Blocks (`MatMulNBits`): unsigned integers with one scale for
each block of inputs, zero in the middle of the range. N outputs, K inputs, T tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

LEVELS = 127
"""Activations take the integers -127 to 127, stored as 1 to 255."""
SMALLEST = 1e-30
"""The least that a token's largest magnitude counts as, so that nothing is divided by zero; its 127th is a normal float32 still."""
SHRINKS = 6
"""Steps of the search for a block's scale, from the largest weight down to 3/4 of it (4 bits only)."""
AT_ONCE = 2**20
"""Weights that are rounded at once. The temporaries of four times as many come from the system anew each time, which clears their
pages: five times as slow (2 threads of a Zen 4; a quarter as many take a seventh longer)."""


class Rows(NamedTuple):
    """Weights as int8 `q` [N, K]; q * scale[:, None] is the value, scale float32 [N]."""

    q: torch.Tensor
    scale: torch.Tensor

    def value(self) -> torch.Tensor:
        return self.q.float() * self.scale[:, None]


class Blocks(NamedTuple):
    """Weights as uint8 `q` [N, K] of so many bits; (q - 2**(bits - 1)) * scale of its block is the value, scale float32 [N, K / block]."""

    q: torch.Tensor
    scale: torch.Tensor
    bits: int

    @property
    def block(self) -> int:
        return self.q.shape[1] // self.scale.shape[1]

    def value(self) -> torch.Tensor:
        centred = self.q.float() - (1 << self.bits - 1)
        return (in_blocks(centred, self.block) * self.scale[..., None]).flatten(1)

    def packed(self) -> torch.Tensor:
        """uint8 [N, K / block, block * bits / 8], the earlier input in the lower half of a byte, as MatMulNBits reads it."""
        grouped = in_blocks(self.q, self.block)
        return grouped if self.bits == 8 else grouped[..., 0::2] | grouped[..., 1::2] << 4


def in_blocks(x: torch.Tensor, block: int) -> torch.Tensor:
    """[T, K] as [T, K / block, block]."""
    return x.reshape(len(x), -1, block)


def round_rows(weight: torch.Tensor, *, largest: int = LEVELS) -> Rows:
    """Nearest integers in [-largest, largest] of weights [N, K]; an output without weights gets scale 1."""
    scale = weight.abs().amax(1).float() / largest
    scale = torch.where(scale > 0, scale, 1.0)
    parts = torch.split(weight, max(1, AT_ONCE // weight.shape[1]))
    q = torch.cat([(part / step[:, None]).round_().to(torch.int8) for part, step in zip(parts, torch.split(scale, len(parts[0])), strict=True)])
    return Rows(q, scale)


def round_tokens(x: torch.Tensor) -> torch.Tensor:
    """Activations [T, K] as the graph's integers stand for them: every row on a grid of its own; rows of zeros stay zero."""
    largest = x.abs().amax(-1, keepdim=True).clamp(min=SMALLEST)
    return (x / largest * LEVELS).round_() * (largest / LEVELS)


def block_size(width: int, wanted: int) -> int | None:
    """The largest power of two, 16 to `wanted`, that divides `width`; None when none does. MatMulNBits has none below 16."""
    found = wanted
    while found >= 16:
        if width % found == 0:
            return found
        found //= 2
    return None


def round_blocks(weight: torch.Tensor, *, bits: int, block: int, importance: torch.Tensor | None = None) -> Blocks:
    """Integers of weights [N, K] in blocks of inputs. With `importance` [K] 4-bit scales are searched for the least weighted error.

    8 bits: the largest weight of a block is 127. 4 bits: it is -8, whichever its sign, so that the whole range is used.
    """
    rows = max(1, AT_ONCE // weight.shape[1])
    weigh = None if importance is None else importance.float().view(-1, block)
    parts = [_block_part(in_blocks(part.float(), block), bits, weigh) for part in torch.split(weight, rows)]
    return Blocks(torch.cat([q for q, _ in parts]), torch.cat([scale for _, scale in parts]), bits)


def _block_part(weight: torch.Tensor, bits: int, importance: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """uint8 [n, K] and scales [n, K / block] of weights [n, K / block, block]."""
    half = 1 << bits - 1
    if bits == 8:
        scale = weight.abs().amax(2) / (half - 1)
    else:
        largest = weight.gather(2, weight.abs().argmax(2, keepdim=True))[..., 0]
        scale = largest / -half
        if importance is not None:
            scale = _least_error(weight, scale, half, importance)
    return _integers(weight, scale, half).add_(half).to(torch.uint8).flatten(1), torch.where(scale != 0, scale, 1.0)


def _least_error(weight: torch.Tensor, scale: torch.Tensor, half: int, importance: torch.Tensor) -> torch.Tensor:
    """The best of SHRINKS shares of every block's scale."""
    best, least = scale, torch.full_like(scale, torch.inf)
    for step in range(SHRINKS + 1):
        tried = scale * (1 - 0.25 * step / SHRINKS)
        error = (((_integers(weight, tried, half) * tried[..., None] - weight) ** 2) * importance).sum(2)
        best, least = torch.where(error < least, tried, best), torch.minimum(error, least)
    return best


def _integers(weight: torch.Tensor, scale: torch.Tensor, half: int) -> torch.Tensor:
    """float32 integers in [-half, half - 1]."""
    return (weight / torch.where(scale != 0, scale, 1.0)[..., None]).round_().clamp_(-half, half - 1)
