"""Quantises one stage of the tower (a block or a merger): folds, rounds, and lets the biases absorb the mean error.

What is stored is what is judged: norms and biases are rounded to the checkpoint's dtype before the losses are taken; the
scale that a folded norm really carries after that rounding is the one that goes into the weights, and what its bias lost
counts as the consumer's error. Scales that pass through attention into value rows are powers of two, so dividing those
rows rounds nothing and their integers stay as they were. Losses are shares of the layer's squared output over the
calibration tokens. N outputs, K inputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from qvlopt.model.names import VISION, Fold, Stage, unclipped_rows
from qvlopt.quant.awq import search_clip, search_scale
from qvlopt.quant.objective import Gram, bias_correction, error, rescaled, row_error
from qvlopt.quant.rounding import LARGEST_SCALE, SMALLEST_SCALE, Integers, QuantSpec, dequantize, qparams, quantize

ROUNDING = "rounding"
"""The method of a layer for which nothing beat plain rounding."""


@dataclass(frozen=True)
class Search:
    """What to look for beyond plain rounding. `dtype` is what norms, biases and dequantised weights are stored in."""

    dtype: torch.dtype
    scale: bool = True
    clip: bool = True
    bias: bool = True
    grid: int = 20


class LayerReport(NamedTuple):
    """Loss of plain rounding and of what was chosen, as shares of the layer's squared output; never worse."""

    name: str
    rounding_loss: float
    loss: float
    method: str


class QuantizedStage(NamedTuple):
    """`integers` by canonical linear name; `changed`: every other tensor of the stage that is new, by full name."""

    integers: dict[str, Integers]
    changed: dict[str, torch.Tensor]
    reports: tuple[LayerReport, ...]


class _Linear(NamedTuple):
    """A linear before rounding: weight [N, K], its inputs' statistics, and what its rows were divided by [N].

    `bias` is the stored one; with `right_bias` the output would be exact, had the weight not to be rounded. The first
    `unclipped` rows keep their whole range.
    """

    weight: torch.Tensor
    bias: torch.Tensor
    right_bias: torch.Tensor
    gram: Gram
    row_scale: torch.Tensor | None
    unclipped: int

    def behind(self, producer: _Producer) -> _Linear:
        """The same layer reading what the folded producer gives: x / scale + shift."""
        weight = self.weight * producer.scale
        right_bias = self.right_bias - (weight.double() @ producer.shift.double()).float()
        return self._replace(weight=weight, right_bias=right_bias, gram=_moved(self.gram, producer.scale, producer.shift))


class _Rounded(NamedTuple):
    """A linear as it would be stored. `loss` counts each row's error in its original units."""

    integers: Integers
    bias: torch.Tensor
    loss: float
    method: str


class _Producer(NamedTuple):
    """What a fold makes of the layer before: its new tensors by full name, and what its rows were divided by [N].

    Where it gave x before, it gives x / scale + shift once its tensors are stored; both [K] of the consumer.
    """

    name: str
    tensors: dict[str, torch.Tensor]
    row_scale: torch.Tensor
    scale: torch.Tensor
    shift: torch.Tensor


def dequantized(integers: Integers, spec: QuantSpec, dtype: torch.dtype) -> torch.Tensor:
    """The weights that engines compute with: (q - zero_point) * scale in float32, rounded once to `dtype`: [N, K]."""
    return dequantize(integers.q, integers.qparams, spec).to(dtype)


def quantize_stage(
    stage: Stage, weights: Mapping[str, torch.Tensor], grams: Mapping[str, Gram], spec: QuantSpec, *, search: Search, chosen: frozenset[str]
) -> QuantizedStage:
    """Quantises the linears of `stage` that are in `chosen` (canonical names); the others keep their bytes.

    `weights` are the stage's tensors by canonical tensor name, in their own dtype; they are not modified. A fold is left
    out where its producer must keep its bytes. Raises ValueError as `quant` does.
    """
    work = {name: tensor.float() for name, tensor in weights.items()}
    rows: dict[str, torch.Tensor] = {}
    integers: dict[str, Integers] = {}
    reports = []
    for relative in stage.linears:
        name = f"{VISION}.{relative}"
        if name not in chosen:
            continue
        fold = next((f for f in stage.folds if f.consumer == relative), None)
        if fold and fold.kind == "value_rows" and f"{VISION}.{fold.producer}" not in chosen:
            fold = None
        layer = _linear(work, name, grams[name], rows.get(name))
        rounded, producer = _quantize_linear(layer, work, spec, search=search, fold=fold)
        original = _linear(weights, name, grams[name], None)
        reports.append(_report(name, original, rounded, spec, search))
        integers[name] = rounded.integers
        if producer:
            work.update(producer.tensors)
            rows[f"{VISION}.{producer.name}"] = producer.row_scale
        work[f"{name}.bias"] = rounded.bias
    return QuantizedStage(integers, _changed(weights, work, integers), tuple(reports))


def _linear(tensors: Mapping[str, torch.Tensor], name: str, gram: Gram, row_scale: torch.Tensor | None) -> _Linear:
    weight, bias = tensors[f"{name}.weight"].float(), tensors[f"{name}.bias"].float()
    return _Linear(weight, bias, bias, gram, row_scale, unclipped_rows(name, weight.shape[0]))


def _report(name: str, original: _Linear, rounded: _Rounded, spec: QuantSpec, search: Search) -> LayerReport:
    plain = _rounded(original, spec, replace(search, clip=False, bias=False)).loss
    whole = error(original.weight, original.gram.gram)
    share = 1 / whole if whole else 0.0
    return LayerReport(name, plain * share, rounded.loss * share, rounded.method)


def _changed(weights: Mapping[str, torch.Tensor], work: Mapping[str, torch.Tensor], integers: Mapping[str, Integers]) -> dict[str, torch.Tensor]:
    """The tensors beside the quantised weights that are not what they were, in their own dtype."""
    packed = {f"{name}.weight" for name in integers}
    return {name: work[name].to(old.dtype) for name, old in weights.items() if name not in packed and not torch.equal(work[name], old.float())}


def _quantize_linear(
    layer: _Linear, work: Mapping[str, torch.Tensor], spec: QuantSpec, *, search: Search, fold: Fold | None
) -> tuple[_Rounded, _Producer | None]:
    """The best of a scaled and an unscaled layer, and the producer's new tensors where the scale won."""
    best = _round(layer, spec, search)
    if fold is None or not search.scale:
        return best, None
    weight = layer.weight if layer.row_scale is None else layer.weight * layer.row_scale.unsqueeze(1)
    h = layer.gram.covariance() if search.bias else layer.gram.gram
    found = search_scale([weight], h, layer.gram.mean_abs.float(), spec, grid=search.grid, tie=fold.repeats)
    if not found.loss < found.rounding_loss:
        return best, None
    producer = _folded(fold, work, found.scale, spec, search.dtype)
    if producer is None:
        return best, None
    scaled = _round(layer.behind(producer), spec, search)
    if scaled.loss < best.loss:
        return scaled._replace(method="+".join(["scale", *(m for m in [scaled.method] if m != ROUNDING)])), producer
    return best, None


def _round(layer: _Linear, spec: QuantSpec, search: Search) -> _Rounded:
    """Rounds a layer, with clipping and bias correction only where they pay."""
    options = [_rounded(layer, spec, replace(search, clip=False, bias=False))]
    if search.clip or search.bias:
        options.append(_rounded(layer, spec, search))
    return min(options, key=lambda option: option.loss)


def _rounded(layer: _Linear, spec: QuantSpec, search: Search) -> _Rounded:
    weight, bias, right_bias, gram, row_scale, _ = layer
    clip = _clip(layer, spec, search) if search.clip else None
    qp = qparams(weight, spec, clip)
    integers = Integers(quantize(weight, qp, spec), qp.zero_point, qp.scale)
    dw = dequantized(integers, spec, search.dtype).float() - weight
    new_bias = _stored(right_bias + bias_correction(dw, gram.mean) if search.bias else bias, search.dtype)
    left = (new_bias - right_bias).double() + dw.double() @ gram.mean
    rows = row_error(dw, gram.covariance()) + gram.count * left.square()
    loss = float((rows if row_scale is None else rows * row_scale.double().square()).sum())
    did = {"clip": clip is not None and bool((clip < 1).any()), "bias": search.bias and not torch.equal(new_bias, _stored(bias, search.dtype))}
    return _Rounded(integers, new_bias, loss, "+".join(step for step, done in did.items() if done) or ROUNDING)


def _clip(layer: _Linear, spec: QuantSpec, search: Search) -> torch.Tensor:
    """The best clipping of the rows that may be clipped; the others keep their whole range."""
    found = search_clip(layer.weight[layer.unclipped :], layer.gram.covariance() if search.bias else layer.gram.gram, spec)
    return torch.cat((torch.ones(layer.unclipped, *found.shape[1:], device=found.device), found))


def _folded(fold: Fold, work: Mapping[str, torch.Tensor], scale: torch.Tensor, spec: QuantSpec, dtype: torch.dtype) -> _Producer | None:
    """The producer that divides its outputs by about `scale` [K]; None where `dtype` cannot hold its new tensors."""
    weight_name, bias_name = f"{VISION}.{fold.producer}.weight", f"{VISION}.{fold.producer}.bias"
    weight, bias = work[weight_name], work[bias_name]
    if fold.kind == "value_rows":
        scale = _powers_of_two(scale, weight[-len(scale) :], bias[-len(scale) :], spec, dtype)
        rows = torch.cat((torch.ones(weight.shape[0] - scale.shape[0], device=scale.device), scale))
        tensors = {weight_name: weight / rows.unsqueeze(1), bias_name: bias / rows}
        return _Producer(fold.producer, tensors, rows, scale, torch.zeros_like(scale))
    part = scale[: weight.shape[0]]
    new_weight = _stored(weight / part, dtype)
    if not torch.equal(new_weight != 0, weight != 0) or not bool(torch.isfinite(new_weight).all()):
        return None
    # A channel whose norm weight is zero is constant: its bias alone carries the scale.
    carried = torch.where(new_weight != 0, weight / torch.where(new_weight != 0, new_weight, 1.0), part)
    new_bias = _stored(bias / carried, dtype)
    constant = (new_weight == 0) & (new_bias != 0)
    carried = torch.where(constant, bias / torch.where(constant, new_bias, 1.0), carried)
    if not bool(torch.isfinite(new_bias).all()):
        return None
    shift = new_bias - bias / carried
    tensors = {weight_name: new_weight, bias_name: new_bias}
    return _Producer(fold.producer, tensors, carried, carried.repeat(fold.repeats), shift.repeat(fold.repeats))


def _powers_of_two(scale: torch.Tensor, rows: torch.Tensor, bias: torch.Tensor, spec: QuantSpec, dtype: torch.dtype) -> torch.Tensor:
    """The powers of two nearest to `scale` [K] that value rows [K, inputs] and `bias` [K] can be divided by without a loss.

    The rows' grids stay storable, and a channel whose bias would lose bits in `dtype` (small in float16) keeps scale 1.
    """
    grids = qparams(rows, spec).scale
    most = (grids.amin(1) / SMALLEST_SCALE).log2().floor()
    least = (grids.amax(1) / LARGEST_SCALE).log2().ceil()
    scale = torch.exp2(scale.log2().round().clamp(least, most))
    return torch.where(_stored(bias / scale, dtype) * scale == _stored(bias, dtype), scale, 1.0)


def _stored(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The values that remain of float32 ones in a checkpoint of `dtype`."""
    return tensor.to(dtype).float()


def _moved(gram: Gram, scale: torch.Tensor, shift: torch.Tensor) -> Gram:
    """Statistics of the same inputs as x / scale + shift, both [K]; magnitudes without the shift, which is tiny."""
    wide = scale.double()
    return Gram(gram.count, gram.sum / wide + gram.count * shift.double(), rescaled(gram.centred, scale), gram.abs_sum / wide, gram.abs_max / scale)
