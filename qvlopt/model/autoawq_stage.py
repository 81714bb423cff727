"""Quantises one stage with AutoAWQ's own search for scales and clips; folds, roundings and reports are ours."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from qvlopt.model.autoawq import AutoAwq
from qvlopt.model.fold import folded
from qvlopt.model.input_sums import GramWithInputs
from qvlopt.model.names import Fold, Stage
from qvlopt.model.quantize import LayerReport, QuantizedStage, Tokens, changed_of, linear_of, report_of, units
from qvlopt.model.round_layer import Linear, Search, clipped_rounding, plain_rounding
from qvlopt.quant.rounding import Integers, QuantSpec


def quantize_stage_by_autoawq(
    stage: Stage,
    weights: Mapping[str, torch.Tensor],
    grams: Mapping[str, GramWithInputs],
    spec: QuantSpec,
    *,
    dtype: torch.dtype,
    chosen: frozenset[str],
) -> QuantizedStage:
    """As `quantize_stage`, with scales and clips as AutoAWQ finds them, better than plain rounding or not.

    The merger's tied scale is left out, which AutoAWQ has no notion of, and so is clipping of queries and keys, which it
    means to leave out. Raises RunError where the package is missing.
    """
    search = AutoAwq(group_size=spec.group_size, zero_point=not spec.symmetric, bits=spec.bits)
    how = Search(dtype, bias=False)
    work = {name: tensor.float() for name, tensor in weights.items()}
    rows: dict[str, torch.Tensor] = {}
    integers: dict[str, Integers] = {}
    reports: list[LayerReport] = []
    for (name, *_), fold in units(stage, chosen):
        layer = linear_of(work, name, Tokens(grams, {}), rows.get(name))
        scale = _scale(search, layer, grams[name].inputs, fold)
        producer = folded(fold, work, scale, spec, dtype) if fold and scale is not None else None
        moved = layer.behind(producer) if producer else layer
        inputs = grams[name].inputs / producer.scale + producer.shift if producer else grams[name].inputs
        clip = torch.ones(len(layer.weight), layer.weight.shape[1] // spec.group_size, 2, device=layer.weight.device)
        clip[layer.unclipped :] = search.clip(moved.weight[layer.unclipped :], inputs).to(clip)
        rounded = clipped_rounding(moved, spec, how, clip)
        rounded = rounded._replace(plain_loss=plain_rounding(layer, spec, how).loss, method="autoawq+scale" if producer else "autoawq")
        reports.append(report_of(linear_of(weights, name, Tokens(grams, {}), None), name, rounded, None))
        integers[name] = rounded.integers
        if rounded.bias is not None:
            work[f"{name}.bias"] = rounded.bias
        if producer and fold:
            work.update(producer.tensors)
            rows[fold.producer] = producer.row_scale
    return QuantizedStage(integers, changed_of(weights, work, integers), tuple(reports))


def _scale(search: AutoAwq, layer: Linear, inputs: torch.Tensor, fold: Fold | None) -> torch.Tensor | None:
    """The scale [K] that AutoAWQ finds; None where nothing folds, or a scale would have to be tied."""
    if fold is None or fold.repeats > 1:
        return None
    weight = layer.weight if layer.row_scale is None else layer.weight * layer.row_scale.unsqueeze(1)
    return search.scale(weight, layer.bias, inputs).to(weight)
