"""Quantises one stage of the tower (a block or a merger): folds, rounds, and lets the biases absorb the mean error.

What is stored is what is judged: norms and biases are rounded to the checkpoint's dtype before the losses are taken, and
the scale that a folded norm really carries after that rounding is the one that goes into the weights. Scales that pass
through attention into value rows are powers of two, so dividing those rows rounds nothing and their integers stay as they
were. Losses are shares of the layer's squared output over the calibration tokens. N outputs, K inputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from qvlopt.model.names import VISION, Fold, Stage
from qvlopt.quant.awq import search_clip, search_scale
from qvlopt.quant.objective import Gram, bias_correction, error, rescaled, row_error
from qvlopt.quant.rounding import Integers, QuantSpec, dequantize, qparams, quantize

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
    """A linear before rounding: weight [N, K], bias [N], its inputs' statistics, and what its rows were divided by."""

    weight: torch.Tensor
    bias: torch.Tensor
    gram: Gram
    row_scale: torch.Tensor | None

    def scaled(self, scale: torch.Tensor) -> _Linear:
        """The same layer reading inputs that were divided by `scale` [K]."""
        return self._replace(weight=self.weight * scale, gram=_divided(self.gram, scale))


class _Rounded(NamedTuple):
    """A linear as it would be stored. `loss` counts each row's error in its original units."""

    integers: Integers
    bias: torch.Tensor
    loss: float
    method: str


class _Producer(NamedTuple):
    """What a fold makes of the layer before: its new tensors by full name, and what its rows were divided by [N]."""

    name: str
    tensors: dict[str, torch.Tensor]
    row_scale: torch.Tensor


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
        layer = _Linear(work[f"{name}.weight"], work[f"{name}.bias"], grams[name], rows.get(name))
        rounded, producer = _quantize_linear(layer, work, spec, search=search, fold=fold)
        original = layer._replace(weight=weights[f"{name}.weight"].float(), bias=weights[f"{name}.bias"].float(), row_scale=None)
        reports.append(_report(name, original, rounded, spec, search))
        integers[name] = rounded.integers
        if producer:
            work.update(producer.tensors)
            rows[f"{VISION}.{producer.name}"] = producer.row_scale
        work[f"{name}.bias"] = rounded.bias
    return QuantizedStage(integers, _changed(weights, work, integers), tuple(reports))


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
    producer, scale = _folded(fold, work, found.scale, search.dtype)
    scaled = _round(layer.scaled(scale), spec, search)
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
    weight, bias, gram, row_scale = layer
    clip = search_clip(weight, gram.covariance() if search.bias else gram.gram, spec) if search.clip else None
    qp = qparams(weight, spec, clip)
    integers = Integers(quantize(weight, qp, spec), qp.zero_point, qp.scale)
    dw = dequantized(integers, spec, search.dtype).float() - weight
    new_bias = (bias + bias_correction(dw, gram.mean)).to(search.dtype).float() if search.bias else bias
    left = (new_bias - bias).double() + dw.double() @ gram.mean
    rows = row_error(dw, gram.covariance()) + gram.count * left.square()
    loss = float((rows if row_scale is None else rows * row_scale.double().square()).sum())
    did = {"clip": clip is not None and bool((clip < 1).any()), "bias": not torch.equal(new_bias, bias)}
    return _Rounded(integers, new_bias, loss, "+".join(step for step, done in did.items() if done) or ROUNDING)


def _folded(fold: Fold, work: Mapping[str, torch.Tensor], scale: torch.Tensor, dtype: torch.dtype) -> tuple[_Producer, torch.Tensor]:
    """The producer after the fold, and the scale [K] that its output really lacks once it is stored in `dtype`."""
    weight_name, bias_name = f"{VISION}.{fold.producer}.weight", f"{VISION}.{fold.producer}.bias"
    weight, bias = work[weight_name], work[bias_name]
    if fold.kind == "value_rows":
        scale = torch.exp2(scale.log2().round())
        rows = torch.cat((torch.ones(weight.shape[0] - scale.shape[0], device=scale.device), scale))
        return _Producer(fold.producer, {weight_name: weight / rows.unsqueeze(1), bias_name: bias / rows}, rows), scale
    part = scale[: weight.shape[0]]
    new_weight = (weight / part).to(dtype).float()
    # A channel whose norm weight is zero is constant: its bias alone carries the scale.
    carried = torch.where(new_weight != 0, weight / torch.where(new_weight != 0, new_weight, 1.0), part)
    new_bias = (bias / carried).to(dtype).float()
    constant = (new_weight == 0) & (new_bias != 0)
    carried = torch.where(constant, bias / torch.where(constant, new_bias, 1.0), carried)
    return _Producer(fold.producer, {weight_name: new_weight, bias_name: new_bias}, carried), carried.repeat(fold.repeats)


def _divided(gram: Gram, scale: torch.Tensor) -> Gram:
    """Statistics of the same inputs divided by `scale` [K]."""
    wide = scale.double()
    return Gram(gram.count, gram.sum / wide, rescaled(gram.centred, scale), gram.abs_sum / wide, gram.abs_max / scale)
