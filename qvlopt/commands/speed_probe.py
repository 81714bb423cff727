"""How fast this machine is at what quantising consists of: a second of the very operations, on made-up numbers.

Processor time is measured, not the clock: what other processes take meanwhile says nothing about this machine. So rates
are those of a machine that has nothing else to do.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F

from qvlopt.model.cost import Rates

TOKENS, INPUTS, OUTPUTS = 784, 1024, 4096
"""A picture of 448x448 through the first MLP layer of the 2B tower."""
ROUNDS, PASSES = 3, 6


def measured_rates(dtype: torch.dtype) -> Rates:
    """Rates with the threads that are set now; `dtype` is what calibration multiplies in. Measured once in a process."""
    return _measured(dtype, torch.get_num_threads())


@cache
def _measured(dtype: torch.dtype, threads: int) -> Rates:
    generator = torch.Generator().manual_seed(0)
    x, w = torch.randn(TOKENS, INPUTS, generator=generator), torch.randn(OUTPUTS, INPUTS, generator=generator)
    narrow = (x.to(dtype), w.to(dtype))
    flop = 2e-9 * TOKENS * INPUTS * OUTPUTS
    block = torch.randn(96, 1024, 128, generator=generator)  # too large for caches, as activations are
    data = bytearray(2**25)
    with torch.inference_mode():
        return Rates(
            linear=flop / _seconds(lambda: F.linear(*narrow), threads),
            float32=flop / _seconds(lambda: F.linear(x, w), threads),
            passes=PASSES * 1e-9 * block.numel() / _seconds(lambda: _passes(block), threads),
            bytes=1e-9 * len(data) / _seconds(lambda: hashlib.sha256(data).digest(), 1),
        )


def _passes(block: torch.Tensor) -> torch.Tensor:
    """Steps as they judge a candidate: one that fetches memory, four in place, and a sum."""
    return torch.div(block, 3.0).round_().add_(1.0).clamp_(0, 15).mul_(block).sum(-1)


def _seconds(work: Callable[[], object], threads: int) -> float:
    """Of the fastest round, after one that does not count, if `threads` of them share its processor time evenly."""
    work()
    took = []
    for _ in range(ROUNDS):
        began = time.process_time()
        work()
        took.append(time.process_time() - began)
    return max(1e-9, min(took)) / threads
