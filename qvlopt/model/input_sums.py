"""What is kept of the inputs that a linear layer reads while a model is calibrated."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from qvlopt.quant.objective import Gram

_BUFFER = 2**24
"""Values of a layer's inputs that are gathered for one product X^T X: large enough for full matmul speed, 64 MiB."""


class GramSum:
    """Statistics of rows [T, K] that come in pieces: gathered first, since one product of many rows is faster than many of few."""

    def __init__(self) -> None:
        self._total: Gram | None = None
        self._waiting: list[torch.Tensor] = []

    def add(self, rows: torch.Tensor) -> None:
        self._waiting.append(rows)
        if sum(part.numel() for part in self._waiting) >= _BUFFER:
            self.total()

    def total(self) -> Gram:
        """Of all rows so far."""
        if self._waiting:
            new = Gram.of(torch.cat(self._waiting))
            self._waiting = []
            self._total = new if self._total is None else self._total.merge(new)
        assert self._total is not None, "a sum exists only for a layer that read something"
        return self._total


@dataclass(frozen=True)
class GramWithInputs(Gram):
    """Statistics, and the very inputs that they are of, float32 [T, K]."""

    inputs: torch.Tensor


class InputSum(GramSum):
    """A GramSum that keeps what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self._all: list[torch.Tensor] = []

    def add(self, rows: torch.Tensor) -> None:
        self._all.append(rows)
        super().add(rows)

    def total(self) -> Gram:
        gram = super().total()
        return GramWithInputs(gram.count, gram.sum, gram.centred, gram.abs_sum, gram.abs_max, torch.cat(self._all))


class MagnitudeSum(GramSum):
    """Only `count` and `abs_max`: of the rest there are zeros, and `centred` is [0, 0]. Exact, and without a product of the inputs."""

    def __init__(self) -> None:
        super().__init__()
        self._count = 0
        self._largest: torch.Tensor | None = None

    def add(self, rows: torch.Tensor) -> None:
        magnitude = rows.float().abs()
        largest = magnitude.amax(0) if len(rows) else magnitude.new_zeros(rows.shape[1])  # a picture may have no share of the tokens
        self._count += len(rows)
        self._largest = largest if self._largest is None else torch.maximum(self._largest, largest)

    def total(self) -> Gram:
        assert self._largest is not None, "a sum exists only for a layer that read something"
        nothing = torch.zeros(len(self._largest), dtype=torch.float64)
        return Gram(self._count, nothing, torch.zeros(0, 0), nothing, self._largest)
