"""Rounds one linear as it would be stored, in the ways that a search asks for, and judges each by its output error.

What is stored is what is judged: biases are rounded to the checkpoint's dtype and weights dequantised in it before a loss is
taken. Losses are squared output errors, summed over tokens. N outputs, K inputs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from qvlopt.model.fold import Producer, stored
from qvlopt.quant.awq import search_clip
from qvlopt.quant.compensate import Factor, compensate
from qvlopt.quant.objective import Gram, bias_correction, row_error
from qvlopt.quant.rounding import Integers, QuantSpec, dequantize, qparams, quantize

ROUNDING = "rounding"
"""The method of a layer for which nothing beat plain rounding."""
COMPENSATE = "compensate"


@dataclass(frozen=True)
class Search:
    """What to look for beyond plain rounding. `dtype` is what norms, biases and dequantised weights are stored in."""

    dtype: torch.dtype
    scale: bool = True
    clip: bool = True
    bias: bool = True
    grid: int = 20
    compensate: bool = False


class Linear(NamedTuple):
    """A linear before rounding: weight [N, K], its inputs' statistics, and what its rows were divided by [N].

    `bias` is the stored one, None where there is none; with `right_bias` the output would be exact, had the weight not to
    be rounded. `held` are statistics of tokens that choose between methods and decide nothing else; None where there are
    none. The first `unclipped` rows keep their whole range.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    right_bias: torch.Tensor
    gram: Gram
    held: Gram | None
    row_scale: torch.Tensor | None
    unclipped: int
    factor: Factor | None = None
    """Of `h`; what compensation needs."""

    def behind(self, producer: Producer) -> Linear:
        """The same layer reading what the folded producer gives: x / scale + shift."""
        return self._replace(
            weight=self.weight * producer.scale,
            right_bias=self.right_bias - (self.weight.double() @ (producer.shift * producer.scale).double()).float(),
            gram=producer.moved(self.gram),
            held=None if self.held is None else producer.moved(self.held),
            factor=None if self.factor is None else self.factor.rescaled(producer.scale),
        )

    @property
    def whole(self) -> Gram:
        """Statistics of all tokens, held out or not."""
        return self.gram if self.held is None else self.gram.merge(self.held)

    def with_all_tokens(self) -> Linear:
        """The same layer, fitted to the held-out tokens too."""
        return self._replace(gram=self.whole, held=None)

    def every(self, step: int) -> Linear:
        """The layer with one row of `step` only."""
        rows = slice(None, None, step)
        return self._replace(
            weight=self.weight[rows],
            bias=None if self.bias is None else self.bias[rows],
            right_bias=self.right_bias[rows],
            row_scale=None if self.row_scale is None else self.row_scale[rows],
            unclipped=len(range(0, self.unclipped, step)),
        )

    def h(self, search: Search) -> torch.Tensor:
        """What errors of the weight cost [K, K]: without their mean where the bias takes that up."""
        return self.gram.covariance() if search.bias and self.bias is not None else self.gram.gram

    def cost(self, search: Search) -> torch.Tensor:
        """What scales and clips are judged by: `h`, or a diagonal one [K] where later columns make up for earlier ones."""
        return self.factor.energy if search.compensate and self.factor is not None else self.h(search)


class Rounded(NamedTuple):
    """A linear as it would be stored. Losses count each row's error in its original units; `held` that on held-out tokens.

    `plain_loss` is that of plain rounding of the same layer.
    """

    integers: Integers
    bias: torch.Tensor | None
    loss: float
    held: float | None
    method: str
    plain_loss: float

    @property
    def judged(self) -> float:
        """What decides whether to compensate."""
        return self.loss if self.held is None else self.held


def best_rounding(layer: Linear, spec: QuantSpec, search: Search) -> Rounded:
    """Rounds a layer, with clipping, bias correction and compensation only where they pay."""
    plain = plain_rounding(layer, spec, search)
    options = [plain]
    if search.clip or search.bias or search.compensate:
        options.append(_rounded(layer, spec, search))
    return min(options, key=lambda option: option.loss)._replace(plain_loss=plain.loss)


def plain_rounding(layer: Linear, spec: QuantSpec, search: Search) -> Rounded:
    """Without any search, as it would be stored."""
    return _rounded(layer, spec, replace(search, clip=False, bias=False, compensate=False))


def clipped_rounding(layer: Linear, spec: QuantSpec, search: Search, clip: torch.Tensor) -> Rounded:
    """With a clip [N, G, 2] that was found elsewhere."""
    return _rounded(layer, spec, replace(search, clip=False), clip)


def _rounded(layer: Linear, spec: QuantSpec, search: Search, clip: torch.Tensor | None = None) -> Rounded:
    weight, bias, right_bias, gram, held = layer.weight, layer.bias, layer.right_bias, layer.gram, layer.held
    clip = _clip(layer, spec, search) if search.clip else clip
    qp = qparams(weight, spec, clip)
    q = compensate(weight, layer.h(search), qp, spec, factor=layer.factor) if search.compensate else quantize(weight, qp, spec)
    integers = Integers(q, qp.zero_point, qp.scale)
    dw = dequantized(integers, spec, search.dtype).float() - weight
    new_bias, is_corrected = bias, False
    if bias is not None:
        new_bias = stored(right_bias + bias_correction(dw, gram.mean) if search.bias else bias, search.dtype)
        is_corrected = search.bias and not torch.equal(new_bias, stored(bias, search.dtype))
    off = -right_bias if new_bias is None else new_bias - right_bias
    did = {"clip": clip is not None and bool((clip < 1).any()), COMPENSATE: search.compensate, "bias": is_corrected}
    loss = _loss(dw, off, gram, layer.row_scale)
    method = "+".join(step for step, done in did.items() if done) or ROUNDING
    return Rounded(integers, new_bias, loss, None if held is None else _loss(dw, off, held, layer.row_scale), method, loss)


def _loss(dw: torch.Tensor, off: torch.Tensor, gram: Gram, row_scale: torch.Tensor | None) -> float:
    """Squared output error of a change of the weights [N, K] and of the bias [N]."""
    mean_error = off.double() + dw.double() @ gram.mean
    rows = row_error(dw, gram.covariance()) + gram.count * mean_error.square()
    return float((rows if row_scale is None else rows * row_scale.double().square()).sum())


def _clip(layer: Linear, spec: QuantSpec, search: Search) -> torch.Tensor:
    """The best clipping of the rows that may be clipped; the others keep their whole range."""
    if layer.unclipped == layer.weight.shape[0]:
        return torch.ones(layer.unclipped, layer.weight.shape[1] // spec.group_size, 2, device=layer.weight.device)
    found = search_clip(layer.weight[layer.unclipped :], layer.cost(search), spec)
    return torch.cat((torch.ones(layer.unclipped, *found.shape[1:], device=found.device), found))


def dequantized(integers: Integers, spec: QuantSpec, dtype: torch.dtype) -> torch.Tensor:
    """The weights that engines compute with: (q - zero_point) * scale in float32, rounded once to `dtype`: [N, K]."""
    return dequantize(integers.q, integers.qparams, spec).to(dtype)
