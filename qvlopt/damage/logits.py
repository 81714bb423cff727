"""Distance of a candidate's next-token distributions from the base's, both given the same tokens so far."""

from __future__ import annotations

import torch


def kl_divergence(base: torch.Tensor, candidate: torch.Tensor) -> torch.Tensor:
    """KL(base || candidate) in nats of every row of two logits [A, V], float64 [A]; infinite where the candidate's are not finite.

    Over the whole vocabulary and in float64, so that equal logits give exactly 0.
    """
    if base.shape != candidate.shape:
        raise ValueError(f"logits of one shape are compared, got {list(base.shape)} and {list(candidate.shape)}")
    p, q = base.double().log_softmax(-1), candidate.double().log_softmax(-1)
    found = (p.exp() * (p - q)).sum(-1).clamp(min=0)
    return torch.where(torch.isfinite(found), found, torch.inf)


def agreement(base: torch.Tensor, candidate: torch.Tensor) -> torch.Tensor:
    """Whether both choose the same token, bool [A], of two logits [A, V]."""
    return base.argmax(-1) == candidate.argmax(-1)


def first_divergence(base: tuple[int, ...], candidate: tuple[int, ...]) -> int | None:
    """Index of the first token in which two answers differ, the end of the shorter one included; None for equal answers."""
    if base == candidate:
        return None
    together = zip(base, candidate, strict=False)
    return next((index for index, (one, other) in enumerate(together) if one != other), min(len(base), len(candidate)))
