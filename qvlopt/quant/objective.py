"""What a change of a layer's weights costs in its output, from statistics of its inputs alone.

For inputs X [T, K] and a weight change dW [N, K] the squared output error is ||X dW^T||^2 = tr(dW H dW^T), H = X^T X: the
statistics replace the samples, of any number. A layer with a bias can also absorb the mean of the error (b -= dW mean);
what is left is the same form with the centred H, sum (x - mean)(x - mean)^T.

Letters in shapes: T tokens, N outputs, K inputs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

_BLOCK = 256
"""Columns a step where the other triangle need not be computed: of X^T X a third less time than one product at K = 1024 and 4096."""

_CHUNK = 2**20
"""Elements of dW a step of the quadratic form: large enough for full matmul speed, small beside H."""


@dataclass(frozen=True)
class Gram:
    """Second-order statistics of a layer's inputs. Merging does not depend on order or batch size, up to rounding.

    count: tokens. sum, abs_sum: float64 [K]. abs_max: float32 [K]. centred: float32 [K, K], sum (x - mean)(x - mean)^T:
    kept in this form because sum x x^T loses the variance of a channel whose mean is a thousand times larger.
    """

    count: int
    sum: torch.Tensor
    centred: torch.Tensor
    abs_sum: torch.Tensor
    abs_max: torch.Tensor

    @classmethod
    def of(cls, x: torch.Tensor) -> Gram:
        """Statistics of inputs [..., K]. Raises ValueError when they hold NaN or infinity."""
        x = x.reshape(-1, x.shape[-1]).float()
        if x.shape[0] == 0:
            return cls.empty(x.shape[1], device=x.device)
        total = x.sum(0, dtype=torch.float64)
        if not torch.isfinite(total).all():
            raise ValueError("layer inputs: hold NaN or infinity, expected finite numbers only")
        magnitude = x.abs()
        return cls(
            count=x.shape[0],
            sum=total,
            centred=_self_product(x - (total / x.shape[0]).float()),
            abs_sum=magnitude.sum(0, dtype=torch.float64),
            abs_max=magnitude.amax(0),
        )

    @classmethod
    def empty(cls, width: int, device: torch.device | str = "cpu") -> Gram:
        """Statistics of no token: what merging starts from."""
        nothing = torch.zeros(width, dtype=torch.float64, device=device)
        single = torch.zeros(width, device=device)
        return cls(0, nothing, torch.zeros(width, width, device=device), nothing.clone(), single)

    def merge(self, other: Gram) -> Gram:
        """Statistics of both sets of tokens (Chan, Golub, LeVeque 1979: pairwise update). Raises ValueError on unequal widths."""
        if self.sum.shape != other.sum.shape:
            raise ValueError(f"statistics of width {self.sum.shape[0]} and {other.sum.shape[0]} do not belong to one layer")
        count = self.count + other.count
        shift = (other.mean - self.mean).float()
        weight = self.count * other.count / max(count, 1)
        return Gram(
            count=count,
            sum=self.sum + other.sum,
            centred=torch.addr(self.centred, shift, shift * weight).add_(other.centred),
            abs_sum=self.abs_sum + other.abs_sum,
            abs_max=torch.maximum(self.abs_max, other.abs_max),
        )

    @property
    def mean(self) -> torch.Tensor:
        """Mean input, float64 [K]; zeros without tokens."""
        return self.sum / max(self.count, 1)

    @property
    def mean_abs(self) -> torch.Tensor:
        """Mean magnitude of every channel, float64 [K]: AWQ's measure of how much a channel matters."""
        return self.abs_sum / max(self.count, 1)

    @property
    def gram(self) -> torch.Tensor:
        """sum x x^T, float32 [K, K]: the H of a layer whose bias stays. A new tensor."""
        return torch.addr(self.centred, self.mean.float(), self.sum.float())

    def covariance(self) -> torch.Tensor:
        """sum x x^T - sum sum^T / count, float32 [K, K]: the H of a layer whose bias absorbs the mean error. Not a copy."""
        return self.centred


def row_error(dw: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
    """Squared output error of every row of `dw` [N, K] under `h` [K, K], or the diagonal of one [K]: float64 [N], never negative."""
    dw, h = dw.float(), h.float()
    if h.ndim == 1:
        return dw.square().mul_(h).sum(1, dtype=torch.float64)
    rows = max(1, _CHUNK // dw.shape[1])
    return torch.cat([_quadratic(part, h) for part in torch.split(dw, rows)]).clamp_(min=0)


def error(dw: torch.Tensor, h: torch.Tensor) -> float:
    """Squared output error of a weight change: tr(dw h dw^T) for `dw` [N, K] and symmetric `h` [K, K].

    float32 products, float64 sums: within 1e-7 of float64 throughout at K = 1024 with outlier channels of 1000 times the rest.
    """
    return float(row_error(dw, h).sum())


def relative_error(dw: torch.Tensor, w: torch.Tensor, h: torch.Tensor) -> float:
    """Squared output error as a share of the squared output of `w` [N, K]; 0 when there is no error, infinite without output."""
    lost, whole = error(dw, h), error(w, h)
    if lost == 0:
        return 0.0
    return lost / whole if whole > 0 else float("inf")


def rescaled(h: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """`h` [K, K], or a diagonal one [K], of inputs divided by `scale` [K], as when a scale moves into the weights. A new tensor."""
    return h / scale.square() if h.ndim == 1 else h / scale.unsqueeze(0) / scale.unsqueeze(1)


def bias_correction(dw: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
    """What to add to the bias so that it absorbs the mean error of `dw` [N, K] at the mean input [K]: float32 [N]."""
    return -(dw.double() @ mean.double()).float()


def _quadratic(x: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
    """x_r h x_r for every row of `x` [R, K] and symmetric `h` [K, K]: float64 [R].

    What lies off the diagonal blocks is multiplied once and counted twice: half of the work for wide `h`.
    """
    total = torch.zeros(len(x), dtype=torch.float64, device=x.device)
    for start in range(0, x.shape[1], _BLOCK):
        own, later = slice(start, start + _BLOCK), slice(start + _BLOCK, None)
        pull = torch.addmm(x[:, own] @ h[own, own], x[:, later], h[later, own], alpha=2)
        total += pull.mul_(x[:, own]).sum(1, dtype=torch.float64)
    return total


def _self_product(x: torch.Tensor) -> torch.Tensor:
    """x^T x of [T, K], exactly symmetric off the diagonal blocks."""
    width = x.shape[1]
    product = x.new_empty(width, width)
    for start in range(0, width, _BLOCK):
        stop = min(start + _BLOCK, width)
        product[start:stop, start:] = x[:, start:stop].T @ x[:, start:]
        product[stop:, start:stop] = product[start:stop, stop:].T
    return product
