"""Moves a channel scale into the layer before: what its tensors become, and what it gives then, bit for bit as stored.

A norm's weight and bias are rounded to the checkpoint's dtype, and the scale that it really carries after that rounding is
the one that its consumers' weights get; what its bias lost counts as their error. Rows of a linear are divided by powers
of two, which rounds nothing: their integers stay as they were. N outputs of the producer, K inputs of the consumers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch

from qvlopt.model.names import Fold
from qvlopt.quant.objective import Gram, rescaled
from qvlopt.quant.rounding import LARGEST_SCALE, SMALLEST_SCALE, QuantSpec, qparams


class Producer(NamedTuple):
    """What a fold makes of the layer before: its new tensors by full name, and what its rows were divided by [N].

    Where it gave x before, it gives x / scale + shift once its tensors are stored; both [K] of the consumers.
    """

    tensors: dict[str, torch.Tensor]
    row_scale: torch.Tensor
    scale: torch.Tensor
    shift: torch.Tensor

    def moved(self, gram: Gram) -> Gram:
        """Statistics of x / scale + shift from those of x; magnitudes without the shift, which is tiny."""
        wide = self.scale.double()
        total = gram.sum / wide + gram.count * self.shift.double()
        return Gram(gram.count, total, rescaled(gram.centred, self.scale), gram.abs_sum / wide, gram.abs_max / self.scale)


def read_channels(fold: Fold, width: int) -> torch.Tensor:
    """Which of the producer's channels each of the consumers' `width` inputs is: int64 [K]."""
    channels = torch.arange(width // fold.repeats)
    if fold.head:
        return channels.view(-1, fold.head).repeat_interleave(fold.repeats, 0).flatten()
    return channels.repeat(fold.repeats)


def folded(fold: Fold, work: Mapping[str, torch.Tensor], scale: torch.Tensor, spec: QuantSpec, dtype: torch.dtype) -> Producer | None:
    """The producer that divides its outputs by about `scale` [K]; None where `dtype` cannot hold its new tensors.

    `work` holds float32 tensors by name, in which the fold's own names are whole. `scale` is the same for inputs of one channel.
    """
    channels = read_channels(fold, len(scale)).to(scale.device)
    part = scale.new_empty(int(channels.max()) + 1)
    part[channels] = scale
    if fold.kind == "norm":
        return _norm(fold, work, part, dtype=dtype, channels=channels)
    return _rows(fold, work, part, spec, dtype=dtype, channels=channels)


def _norm(fold: Fold, work: Mapping[str, torch.Tensor], part: torch.Tensor, *, dtype: torch.dtype, channels: torch.Tensor) -> Producer | None:
    weight, bias = work[f"{fold.producer}.weight"], work.get(f"{fold.producer}.bias")
    new_weight = stored(weight / part, dtype)
    if not torch.equal(new_weight != 0, weight != 0) or not bool(torch.isfinite(new_weight).all()):
        return None
    carried = torch.where(new_weight != 0, weight / torch.where(new_weight != 0, new_weight, 1.0), part)
    if bias is None:
        tensors = {f"{fold.producer}.weight": new_weight}
        return Producer(tensors, carried, carried[channels], torch.zeros_like(carried)[channels])
    # A channel whose norm weight is zero is constant: its bias alone carries the scale.
    new_bias = stored(bias / carried, dtype)
    constant = (new_weight == 0) & (new_bias != 0)
    carried = torch.where(constant, bias / torch.where(constant, new_bias, 1.0), carried)
    if not bool(torch.isfinite(new_bias).all()):
        return None
    tensors = {f"{fold.producer}.weight": new_weight, f"{fold.producer}.bias": new_bias}
    return Producer(tensors, carried, carried[channels], (new_bias - bias / carried)[channels])


def _rows(
    fold: Fold, work: Mapping[str, torch.Tensor], part: torch.Tensor, spec: QuantSpec, *, dtype: torch.dtype, channels: torch.Tensor
) -> Producer:
    """The last rows of a linear divided: all of them, or the value rows of a fused qkv."""
    weight, bias = work[f"{fold.producer}.weight"], work.get(f"{fold.producer}.bias")
    own_bias = None if bias is None else bias[-len(part) :]
    part = _powers_of_two(part, weight[-len(part) :], own_bias, spec, dtype)
    rows = torch.cat((torch.ones(weight.shape[0] - len(part), device=part.device), part))
    tensors = {f"{fold.producer}.weight": weight / rows.unsqueeze(1)}
    if bias is not None:
        tensors[f"{fold.producer}.bias"] = bias / rows
    scale = part[channels]
    return Producer(tensors, rows, scale, torch.zeros_like(scale))


def _powers_of_two(scale: torch.Tensor, rows: torch.Tensor, bias: torch.Tensor | None, spec: QuantSpec, dtype: torch.dtype) -> torch.Tensor:
    """The powers of two nearest to `scale` [C] that `rows` [C, inputs] and `bias` [C] can be divided by without a loss.

    The rows' grids stay storable, and a channel whose bias would lose bits in `dtype` (small in float16) keeps scale 1.
    """
    grids = qparams(rows, spec).scale
    most = (grids.amin(1) / SMALLEST_SCALE).log2().floor()
    least = (grids.amax(1) / LARGEST_SCALE).log2().ceil()
    scale = torch.exp2(scale.log2().round().clamp(least, most))
    return scale if bias is None else torch.where(stored(bias / scale, dtype) * scale == stored(bias, dtype), scale, 1.0)


def stored(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The values that remain of float32 ones in a checkpoint of `dtype`."""
    return tensor.to(dtype).float()
