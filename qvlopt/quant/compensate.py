"""Error-compensated rounding: each column of a weight is rounded so as to make up for what the columns before it lost.

On fixed grids the loss of integers, tr(dW H dW^T), is ||dW M||^2 with H = M M^T and M upper triangular in the order in
which columns are rounded, and column i of dW M holds errors of columns 0..i only. So one column after the other takes the
grid point nearest to w_i - sum_{j<i} dw_j M_ji / M_ii. That is GPTQ (Frantar et al. 2022, arXiv:2210.17323, algorithm 1),
with the same integers in exact arithmetic, as Babai's nearest plane (Chen et al. 2025, arXiv:2507.18553): one Cholesky
factor and no inverse. Then coordinate descent (Behdin et al. 2023, arXiv:2309.01885) revisits every column, earlier ones
knowing of later ones now: no move of it raises the loss.

Grids are given and stay in place, so the order of rounding is free and nothing but the integers differs from plain
rounding: every format and engine takes them. Letters in shapes: N outputs, K inputs, G groups, R rows, B columns of a block.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from qvlopt.quant.objective import row_error
from qvlopt.quant.rounding import QParams, QuantSpec, dequantize, quantize

DAMPING = 0.05
"""Share by which every channel's own energy is raised: it shrinks correlations that a few tokens overstate, the same for
channels of any size, where a share of the mean energy would drown small channels beside outliers. Of 0.01 to 0.3 the best
or within 2 % of it on unseen inputs (benchmarks/RESULTS.md, "Compensation")."""

SWEEPS = 1
"""Rounds of coordinate descent after the first pass. The first gains 1 %, two more gain 0.4 %."""

_BLOCK = 128
"""Columns that are rounded before the rest hears of it: the rest is then one product of matrices."""

_ROWS = 4096
"""Rows at a time: rows do not depend on each other, and this bounds the temporaries."""

_MORE_DAMPING = (0.0, 0.01, 0.1, 1.0)
"""Added to the damping, one after the other, until there is a factor: float32 sums of large means may leave none without."""


class Factor(NamedTuple):
    """H of some inputs, factored. order [K]: columns as they are rounded, those with the most energy first, while much is left
    to make up for them. upper: M in that order, float32 [K, K]. damping: what made it. dead [K]: channels without energy."""

    order: torch.Tensor
    upper: torch.Tensor
    damping: float
    dead: torch.Tensor

    @property
    def energy(self) -> torch.Tensor:
        """What the square of a column's own rounding error costs when all later columns make up for it: M_ii squared, [K];
        nothing where the channel is dead, whose M_ii stands for no input.

        The loss of `compensate` is the sum of these over columns, so a grid that suits it is sought with this diagonal in
        the place of H, as if no channel went with another.
        """
        return torch.empty_like(self.upper[0]).index_copy_(0, self.order, self.upper.diagonal().square()).masked_fill_(self.dead, 0.0)

    def rescaled(self, scale: torch.Tensor) -> Factor:
        """The factor for inputs divided by `scale` [K]; the order stays."""
        return self._replace(upper=self.upper / scale[self.order].unsqueeze(1))


def factored(h: torch.Tensor, *, damping: float = DAMPING) -> Factor | None:
    """The factor of `h` [K, K] with its diagonal raised by the share `damping`; None where no such damping makes one possible.

    It is the factor of the mirrored matrix, mirrored. In float64: in float32 the factor of ordinary activations fails.
    Raises ValueError on statistics that are not finite or not square, and on a negative damping.
    """
    if h.ndim != 2 or h.shape[0] != h.shape[1] or damping < 0:
        raise ValueError(f"compensation: got gram {tuple(h.shape)} and damping {damping}, expected a square and 0 or more")
    if not torch.isfinite(h).all():
        raise ValueError("statistics: hold NaN or infinity, expected finite numbers only")
    order = h.diagonal().argsort(descending=True, stable=True)
    mirrored = h[order][:, order].double().flip(0, 1)
    for more in _MORE_DAMPING:
        lower, failed = torch.linalg.cholesky_ex(_damped(mirrored, damping + more))
        if not int(failed):
            return Factor(order, lower.flip(0, 1).float(), damping + more, h.diagonal() <= 0)
    return None


def compensate(w: torch.Tensor, h: torch.Tensor, qp: QParams, spec: QuantSpec, *, factor: Factor | None = None, sweeps: int = SWEEPS) -> torch.Tensor:
    """Integers of `w` [N, K] on the grid `qp` with a small error under `h` [K, K]: int32 [N, K] in 0..L.

    `factor` is that of `h`; it is made here where it is not given. A row for which nothing was gained keeps the integers of
    plain rounding, so no row's loss is above theirs. A diagonal `h` gives plain rounding. Raises ValueError on values that
    are not finite and on shapes that do not fit.
    """
    if h.shape != (w.shape[-1],) * 2 or sweeps < 0:
        raise ValueError(f"compensation: got weight {tuple(w.shape)}, gram {tuple(h.shape)} and {sweeps} sweeps")
    plain = quantize(w, qp, spec)
    factor = factored(h) if factor is None else factor
    if factor is None:
        return plain
    h, order = h.float(), factor.order
    shared = _Shared(order, order // spec.group_size, factor.upper, _damped(h[order][:, order], factor.damping), spec.largest)
    parts = [_rows(w[i : i + _ROWS].float(), QParams(*(t[i : i + _ROWS] for t in qp)), shared, sweeps) for i in range(0, w.shape[0], _ROWS)]
    found = torch.cat(parts)
    gains = _loss(found, w, h, qp, spec) < _loss(plain, w, h, qp, spec)
    return torch.where(gains.unsqueeze(1), found, plain)


class _Shared(NamedTuple):
    """What all rows share. order [K]: columns as they are rounded; group, upper and h [K, K] are in that order."""

    order: torch.Tensor
    group: torch.Tensor
    upper: torch.Tensor
    h: torch.Tensor
    largest: int


Grid = tuple[torch.Tensor, torch.Tensor]
"""Scale and zero point, float32 [G, R] each."""


def _damped(h: torch.Tensor, damping: float) -> torch.Tensor:
    """`h` with its diagonal raised; channels without energy get 1, so that they are rounded plainly."""
    energy = h.diagonal()
    return h + torch.diag(torch.where(energy > 0, damping * energy, 1.0))


def _rows(w: torch.Tensor, qp: QParams, shared: _Shared, sweeps: int) -> torch.Tensor:
    """Integers of some rows, columns where they belong. Works on columns as rows: a step touches one column of all rows."""
    columns = w.T[shared.order].contiguous()
    grid = qp.scale.T.contiguous(), qp.zero_point.T.float().contiguous()
    q, dw = torch.empty_like(columns), torch.zeros_like(columns)
    _first_pass(columns, q, dw, grid, shared)
    pull = shared.h @ dw if sweeps else dw
    for _ in range(sweeps):
        _sweep(columns, q, dw, pull, grid=grid, shared=shared)
    found = torch.empty_like(q)
    found[shared.order] = q
    return found.T.to(torch.int32)


def _first_pass(columns: torch.Tensor, q: torch.Tensor, dw: torch.Tensor, grid: Grid, shared: _Shared) -> None:
    """Fills `q` and `dw` [K, R] for the weights `columns`, nearest plane by nearest plane."""
    ratio = shared.upper / shared.upper.diagonal()  # column i by M_ii
    for start in range(0, len(columns), _BLOCK):
        stop = min(start + _BLOCK, len(columns))
        target = torch.addmm(columns[start:stop], ratio[:start, start:stop].T, dw[:start], alpha=-1)
        for i in range(start, stop):
            q[i], rounded = _nearest(target[i - start], i, grid, shared)
            dw[i] = rounded - columns[i]
            if i + 1 < stop:
                target[i + 1 - start :].addr_(ratio[i, i + 1 : stop], dw[i], alpha=-1)


def _sweep(columns: torch.Tensor, q: torch.Tensor, dw: torch.Tensor, pull: torch.Tensor, *, grid: Grid, shared: _Shared) -> None:
    """Moves every column to its best grid point given all others; `pull` is h dw, and kept so."""
    energy = shared.h.diagonal()
    for start in range(0, len(columns), _BLOCK):
        stop = min(start + _BLOCK, len(columns))
        before, local = dw[start:stop].clone(), pull[start:stop].clone()
        for i in range(start, stop):
            wanted = columns[i] + dw[i] - local[i - start] / energy[i]
            q[i], rounded = _nearest(wanted, i, grid, shared)
            change = rounded - columns[i] - dw[i]
            dw[i] += change
            if i + 1 < stop:
                local[i + 1 - start :].addr_(shared.h[i, i + 1 : stop], change)
        pull.addmm_(shared.h[:, start:stop], dw[start:stop] - before)


def _nearest(wanted: torch.Tensor, i: int, grid: Grid, shared: _Shared) -> tuple[torch.Tensor, torch.Tensor]:
    """The integers nearest to `wanted` [R] on the grid of column `i`, and what they stand for."""
    group = shared.group[i]
    scale, zero_point = grid[0][group], grid[1][group]
    q = torch.div(wanted, scale).round_().add_(zero_point).clamp_(0, shared.largest)
    return q, (q - zero_point).mul_(scale)


def _loss(q: torch.Tensor, w: torch.Tensor, h: torch.Tensor, qp: QParams, spec: QuantSpec) -> torch.Tensor:
    return row_error(dequantize(q, qp, spec) - w.float(), h)
