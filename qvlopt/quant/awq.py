"""AWQ's two searches, on the output error instead of on samples: which input channels to scale up, which ranges to cut.

Scaling (Lin et al. 2023, arXiv:2306.00978, section 3.2): weights of channel k are multiplied by s_k before rounding and its
inputs divided by it, exactly, in the norm before the layer. Channels with large inputs get a finer grid at the cost of the
others in their group. Clipping (same, section 3, and AutoAWQ's search): a shorter range rounds the many small weights
better and cuts the few large ones.

Both searches judge by tr(dW H dW^T) (objective.py), start from plain rounding and return it unless they found better. H may
be given as its diagonal [K]: then channels count one by one, as they do for rounding that is compensated (compensate.py).
Nothing is modified and nothing is random. Letters in shapes: N outputs, K inputs, G groups, R rows of a chunk, C candidates.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import NamedTuple

import torch

from qvlopt.quant.objective import row_error
from qvlopt.quant.rounding import QParams, QuantSpec, error_on_grid, group_range, grouped, range_qparams, require_finite

_CHUNK = 2**20
"""Elements of a weight that a step of a search works on; its temporaries are a few times this in float32."""

_RANKING_ELEMENTS = 2**19
"""Elements of a weight that rank the candidate scales: the loss is a sum over rows, and those that plain rounding hurts most
lead it. So a ranking takes seconds at any shape: all rows of narrow layers, 512 rows at K = 1024, 128 at K = 4096."""

_LARGE, _REACH = 2**20, 2
"""Weights from which on the clip search's later sweeps look only so many steps around what the first one found: a quarter of
the time for 0.5 % of the loss (builtin:nano, all layers)."""

_FINALISTS = 4
"""Candidates that are measured on all rows."""

_SCALE_RATIO = 2.0**20
"""Largest ratio between two channels' scales: keeps a folded norm within float16 and dead channels from stretching the rest."""

_MIN_GAIN = 1e-5
"""Least share of a row's loss that clipping must gain: less may be the rounding error of float32 sums."""


class ScaleSearch(NamedTuple):
    """scale: float32 [K], all ones when nothing beat plain rounding. Losses are squared output errors summed over the weights."""

    scale: torch.Tensor
    loss: float
    rounding_loss: float


def search_scale(
    weights: Sequence[torch.Tensor], h: torch.Tensor, mean_abs: torch.Tensor, spec: QuantSpec, *, grid: int = 20, channels: torch.Tensor | None = None
) -> ScaleSearch:
    """The best channel scale for layers that share an input: `weights` [N_i, K], their input's `h` [K, K] and mean |x| [K].

    Candidates are x**r and AutoAWQ's x**r / w**(1-r) for `grid` steps of r, w the mean of |weight| over its group's largest.
    channels: int64 [K], which of the producer's channels each input is, where it gives one to several: those share a scale.
    A channel without inputs or without weights keeps scale 1.
    Raises ValueError on statistics that are not finite or of another width, and as `qparams` does.
    """
    width = _check_inputs(weights, h, mean_abs)
    if channels is not None and channels.shape != (width,):
        raise ValueError(f"channels: got shape {tuple(channels.shape)}, expected one channel for each of {width} inputs")
    best = torch.ones(width, device=h.device)
    plain = [_row_losses(w, best, h, spec) for w in weights]
    loss = rounding_loss = sum(float(rows.sum()) for rows in plain)
    sample = _costliest_rows(weights, plain)
    candidates = list(_candidates(weights, mean_abs, spec, grid, channels))
    candidates.sort(key=lambda scale: _loss_of_scale(sample, scale, h, spec))
    for scale in candidates[:_FINALISTS]:
        candidate_loss = _loss_of_scale(weights, scale, h, spec)
        if candidate_loss < loss:
            best, loss = scale, candidate_loss
    return ScaleSearch(best, loss, rounding_loss)


def search_clip(w: torch.Tensor, h: torch.Tensor, spec: QuantSpec, *, steps: int = 10, max_shrink: float = 0.5, sweeps: int = 2) -> torch.Tensor:
    """The best shrink of both ends of every group's range for `w` [N, K] under `h` [K, K], as `qparams` takes it.

    Returns float32 [N, G, 2] in [1 - max_shrink, 1]; the two ends are equal when `spec` is symmetric. Coordinate descent:
    group after group takes the shrink with the least loss given the errors of all other groups, so terms between groups
    count. A row without a clear gain keeps 1 throughout: no row gets worse.
    A weight that was scaled needs `h` of the scaled inputs (`rescaled`). Raises ValueError as `qparams` does.
    """
    _check_inputs([w], h, h.diagonal() if h.ndim == 2 else h)
    if steps < 1 or sweeps < 1 or not 0 < max_shrink < 1:
        raise ValueError(f"clip search: got steps {steps}, sweeps {sweeps}, max_shrink {max_shrink}, expected 1, 1 and between 0 and 1")
    h = h.float()
    shrinks = 1 - max_shrink * torch.arange(steps + 1, device=w.device) / steps
    parts = _row_chunks(w, at_once=1 if h.ndim == 2 else len(shrinks))
    if h.ndim == 1:
        return torch.cat([_clip_rows_apart(part, h, spec, shrinks) for part in parts])
    reaches = [None, *[_REACH if w.numel() >= _LARGE else None] * (sweeps - 1)]
    return torch.cat([_clip_rows(part, h, spec, shrinks, reaches) for part in parts])


class _Groups(NamedTuple):
    """Weights [..., g] and the range of every group [...], which each candidate shrinks."""

    weights: torch.Tensor
    low: torch.Tensor
    high: torch.Tensor

    @classmethod
    def of(cls, w: torch.Tensor, spec: QuantSpec) -> _Groups:
        groups = grouped(w, spec)
        return cls(groups, *group_range(groups))

    def column(self, index: int) -> _Groups:
        """One group of all rows."""
        return _Groups(*(each[:, index] for each in self))

    def grid(self, clip: torch.Tensor, spec: QuantSpec) -> QParams:
        """With the ends shrunk to `clip` [..., 2] of themselves."""
        return range_qparams(self.low * clip[..., 0], self.high * clip[..., 1], spec)


def _clip_rows(w: torch.Tensor, h: torch.Tensor, spec: QuantSpec, shrinks: torch.Tensor, reaches: Sequence[int | None]) -> torch.Tensor:
    """One sweep over all groups for each of `reaches`: how many steps around the present shrink it tries, None for all of them."""
    groups = _Groups.of(w, spec)
    dw = error_on_grid(groups.weights, groups.grid(torch.ones(2, device=w.device), spec), spec).view(w.shape)
    pull = dw @ h
    before = (pull * dw).sum(1, dtype=torch.float64)
    clip = torch.ones(*groups.low.shape, 2, device=w.device)
    space = groups.weights.new_empty(2, len(shrinks) + 1, len(w), spec.group_size)
    for reach, index in product(reaches, range(groups.low.shape[1])):
        part = slice(index * spec.group_size, (index + 1) * spec.group_size)
        change = -dw[:, part]
        # The loss as a function of this group's error e alone: e H_gg e + 2 e . (what the other groups pull).
        others = pull[:, part] + change @ h[part, part]
        for ends in _moves(spec):
            candidates = _shrunk(clip[:, index], shrinks, ends) if reach is None else _nearby(clip[:, index], shrinks, ends, reach)
            dw[:, part], clip[:, index] = _best_candidate(groups.column(index), others, h[part, part], spec, candidates, space)
        pull += (change + dw[:, part]) @ h[part]
    after = (pull * dw).sum(1, dtype=torch.float64)
    kept = after < before * (1 - _MIN_GAIN)
    return torch.where(kept.view(-1, 1, 1), clip, 1.0)


def _clip_rows_apart(w: torch.Tensor, energy: torch.Tensor, spec: QuantSpec, shrinks: torch.Tensor) -> torch.Tensor:
    """`_clip_rows` where no channel's error touches another's: every group by itself, all groups at once."""
    groups = _Groups.of(w, spec)
    flat = _Groups(groups.weights.reshape(-1, spec.group_size), groups.low.reshape(-1), groups.high.reshape(-1))
    weights = energy.view(-1, spec.group_size).repeat(len(w), 1)
    clip = torch.ones(len(flat.low), 2, device=w.device)
    for ends in _moves(spec):
        _, clip = _best_candidate(flat, None, weights, spec, _shrunk(clip, shrinks, ends))
    clip = clip.view(*groups.low.shape, 2)
    grids = (groups.grid(torch.ones_like(clip), spec), groups.grid(clip, spec))
    before, after = (row_error(error_on_grid(groups.weights, grid, spec).view(w.shape), energy) for grid in grids)
    kept = after < before * (1 - _MIN_GAIN)
    return torch.where(kept.view(-1, 1, 1), clip, 1.0)


def _moves(spec: QuantSpec) -> tuple[list[int], ...]:
    """The ends that move together, in turn: both, then low and high alone, which a symmetric range cannot."""
    return ([0, 1],) if spec.symmetric else ([0, 1], [0], [1])


def _shrunk(clip: torch.Tensor, shrinks: torch.Tensor, ends: list[int]) -> torch.Tensor:
    """Candidates [C + 1, R, 2]: `clip` [R, 2] as it is, then with `ends` set to every one of `shrinks` [C]."""
    candidates = clip.repeat(len(shrinks) + 1, 1, 1)
    candidates[1:, :, ends] = shrinks.view(-1, 1, 1)
    return candidates


def _nearby(clip: torch.Tensor, shrinks: torch.Tensor, ends: list[int], reach: int) -> torch.Tensor:
    """Candidates [2 * reach + 1, R, 2]: `clip` [R, 2] as it is, then with `ends` moved by up to `reach` steps of `shrinks` [C]."""
    steps = [step for distance in range(1, reach + 1) for step in (-distance, distance)]
    candidates = clip.repeat(len(steps) + 1, 1, 1)
    moved = candidates[1:, :, ends] + torch.tensor(steps, device=clip.device).view(-1, 1, 1) * (shrinks[0] - shrinks[1])
    candidates[1:, :, ends] = moved.clamp(float(shrinks[-1]), 1.0)
    return candidates


def _best_candidate(
    group: _Groups, others: torch.Tensor | None, h: torch.Tensor, spec: QuantSpec, candidates: torch.Tensor, space: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Error [R, g] and clip [R, 2] of the best of `candidates` [C, R, 2] for one group [R, g]; the first wins a tie.

    `h` is [g, g] with the pull of `others` [R, g], or, without others, what each error costs by itself [R, g]. `space` is
    float32 [2, C or more, R, g] to work in: fetching such memory from the system every time takes as long as the work.
    """
    if space is None:
        space = group.weights.new_empty(2, len(candidates), *group.weights.shape)
    errors = error_on_grid(group.weights, group.grid(candidates, spec), spec, out=space[0, : len(candidates)])
    costs = space[1, : len(candidates)]
    if others is None:
        torch.square(errors, out=costs).mul_(h)
    else:
        torch.matmul(errors, h, out=costs).add_(others, alpha=2).mul_(errors)
    losses = costs.sum(-1)
    best = losses.argmin(0)
    rows = torch.arange(len(best), device=best.device)
    best = torch.where(losses[best, rows] < losses[0], best, 0)
    return errors[best, rows], candidates[best, rows]


def _candidates(
    weights: Sequence[torch.Tensor], mean_abs: torch.Tensor, spec: QuantSpec, grid: int, channels: torch.Tensor | None
) -> Iterator[torch.Tensor]:
    x = _shared(mean_abs.float(), channels)
    w = _shared(_relative_magnitude(weights, spec), channels)
    live = (x > 0) & (w > 0)
    if not live.any():
        return
    x = x / x.max()
    for step in range(1, grid + 1):
        yield _normalised(x ** (step / grid), live)
    for step in range(grid):
        ratio = step / grid
        yield _normalised(x**ratio / (w ** (1 - ratio) + 1e-4), live)


def _shared(values: torch.Tensor, channels: torch.Tensor | None) -> torch.Tensor:
    """`values` [K] averaged over the inputs that are one channel."""
    if channels is None:
        return values
    count = int(channels.max()) + 1
    total = values.new_zeros(count).index_add_(0, channels, values)
    return (total / torch.bincount(channels, minlength=count))[channels]


def _relative_magnitude(weights: Sequence[torch.Tensor], spec: QuantSpec) -> torch.Tensor:
    """Mean over all rows of |w| as a share of its group's largest: float32 [K] in [0, 1]."""
    total = torch.zeros(weights[0].shape[1], dtype=torch.float64, device=weights[0].device)
    for w in weights:
        for part in _row_chunks(w):
            magnitude = grouped(part, spec).abs()
            largest = magnitude.amax(2, keepdim=True)
            share = magnitude / torch.where(largest > 0, largest, 1.0)
            total += share.sum(0, dtype=torch.float64).view(-1)
    return (total / sum(w.shape[0] for w in weights)).float()


def _normalised(scale: torch.Tensor, live: torch.Tensor) -> torch.Tensor:
    """`scale` divided by the geometric mean of its ends, as AutoAWQ does; dead channels get 1, the middle."""
    largest = scale[live].max()
    scale = scale.clamp(min=float(largest) / _SCALE_RATIO)
    scale = scale / (largest * scale[live].min()).sqrt()
    return torch.where(live, scale, 1.0)


def _row_chunks(w: torch.Tensor, at_once: int = 1) -> tuple[torch.Tensor, ...]:
    """Rows for one step, which has so many candidates of all of them in memory at once."""
    return torch.split(w, max(1, _CHUNK // (at_once * w.shape[1])))


def _costliest_rows(weights: Sequence[torch.Tensor], losses: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The rows of `weights` with the largest `losses`, up to _RANKING_ELEMENTS of them together."""
    together = torch.cat(list(losses))
    count = max(1, _RANKING_ELEMENTS // weights[0].shape[1])
    if len(together) <= count:
        return list(weights)
    least = together.topk(count).values[-1]
    return [w[rows >= least] for w, rows in zip(weights, losses, strict=True)]


def _loss_of_scale(weights: Sequence[torch.Tensor], scale: torch.Tensor, h: torch.Tensor, spec: QuantSpec) -> float:
    return sum(float(_row_losses(w, scale, h, spec).sum()) for w in weights)


def _row_losses(w: torch.Tensor, scale: torch.Tensor, h: torch.Tensor, spec: QuantSpec) -> torch.Tensor:
    """Squared output error of every row of `w` when it is rounded after scaling: float64 [N]."""
    parts = [row_error(_rounded_change(part * scale, spec).div_(scale), h) for part in _row_chunks(w)]
    return torch.cat(parts)


def _rounded_change(w: torch.Tensor, spec: QuantSpec) -> torch.Tensor:
    """`rounding_error` for weights that are known to be finite: this runs for every candidate."""
    groups = grouped(w, spec)
    return error_on_grid(groups, range_qparams(*group_range(groups), spec), spec).view(w.shape)


def _check_inputs(weights: Sequence[torch.Tensor], h: torch.Tensor, mean_abs: torch.Tensor) -> int:
    if not weights:
        raise ValueError("got no weight, expected one or more that share an input")
    for w in weights:
        require_finite(w)
    width = weights[0].shape[-1]
    shapes = [tuple(w.shape) for w in weights]
    if any(w.shape[-1] != width for w in weights) or h.shape not in ((width, width), (width,)) or mean_abs.shape != (width,):
        raise ValueError(f"weights {shapes}, gram {tuple(h.shape)} and mean {tuple(mean_abs.shape)} are not of one input width")
    if not (torch.isfinite(h.diagonal() if h.ndim == 2 else h).all() and torch.isfinite(mean_abs).all()):
        raise ValueError("statistics: hold NaN or infinity, expected finite numbers only")
    return int(width)
