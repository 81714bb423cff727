"""AutoAWQ 0.2.9's own scale and clip search, called layer by layer: what `benchmarks/compensation.py` compares with.

Its `AwqQuantizer` is made without a model, since it knows none of these, and given what the two searches read. The module
whose output a scale is judged by is the linear itself, as AutoAWQ does where a model's map names no other. Nothing is
scaled behind a GELU: AutoAWQ would put a module with scales there that no engine has for Qwen3-VL.
"""

from __future__ import annotations

import sys
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import torch

TOKENS = 2048
"""Inputs that the searches see: their grid has 20 scales and 10 clips, and every scale costs a product with all inputs."""

UNCLIPPED = ("q_", "k_", "query", "key", "Wqkv")
"""awq/quantize/quantizer.py, _search_best_clip: parts of names that are not clipped. A fused `attn.qkv` has none of them."""


def quantizer(bits: int, group_size: int, *, clip_tokens: int = 512) -> Any:
    """`clip_tokens` are what its clip search looks at, 512 by its own choice. Raises ImportError where autoawq is not installed."""
    own = str(Path(__file__).parent)
    sys.path = [place for place in sys.path if place != own]  # awq.py of this folder is not the package
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from awq.quantize.quantizer import AwqQuantizer
    finally:
        sys.path.insert(0, own)
    made = object.__new__(AwqQuantizer)
    made.w_bit, made.group_size, made.zero_point, made.duo_scaling = bits, group_size, True, True
    made.n_parallel_calib_samples, made.max_chunk_memory = None, 1024 * 1024 * 1024
    made._compute_best_clip = partial(made._compute_best_clip, n_sample_token=clip_tokens)
    return made


def quantised(awq: Any, w: torch.Tensor, x: torch.Tensor, *, name: str, scaled: bool, unclipped: int = 0) -> torch.Tensor:
    """What AutoAWQ makes of weight `w` [N, K] that reads `x` [T, K]: the weights that engines compute with, times the inputs as they were.

    The first `unclipped` rows are linears of their own in AutoAWQ's sight, with names that it leaves alone.
    """
    x = x[:: max(1, len(x) // TOKENS)]
    with torch.no_grad():
        scale = _scale(awq, w, x) if scaled else torch.ones(w.shape[1])
        work = w * scale
        if not any(part in name for part in UNCLIPPED):
            most = awq._compute_best_clip(work[unclipped:].clone(), x / scale)
            groups = work[unclipped:].reshape(*most.shape[:2], -1)
            work[unclipped:] = groups.clamp(-most, most).reshape(-1, w.shape[1])
        result: torch.Tensor = awq.pseudo_quantize_tensor(work)[0] / scale
    return result


def _scale(awq: Any, w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    linear = torch.nn.Linear(w.shape[1], w.shape[0], bias=False)
    linear.weight.data = w.clone()
    share = w.view(-1, awq.group_size).abs()
    share = (share / (share.amax(dim=1, keepdim=True) + 1e-6)).view(w.shape).mean(0)  # _search_best_scale, step 1
    scale: torch.Tensor = awq._compute_best_scale(x, share, x.abs().mean(0), linear, [linear], linear(x), {})
    return scale
