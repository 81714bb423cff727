"""Quantises one stage of a model (a block, a merger, a decoder layer): folds, rounds, and lets the biases absorb the mean error.

What is stored is what is judged: norms and biases are rounded to the checkpoint's dtype before the losses are taken (fold.py,
round_layer.py). Losses are shares of the layer's squared output over the calibration tokens. N outputs, K inputs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from qvlopt.model.fold import Producer, folded, read_channels
from qvlopt.model.names import Fold, Stage, unclipped_rows
from qvlopt.model.round_layer import ROUNDING, Linear, Rounded, Search, best_rounding, dequantized, plain_rounding
from qvlopt.model.token_draw import HELD_OUT
from qvlopt.quant.awq import search_scale
from qvlopt.quant.compensate import factored
from qvlopt.quant.objective import Gram, error
from qvlopt.quant.rounding import Integers, QuantSpec

__all__ = [
    "ROUNDING", "LayerReport", "QuantizedStage", "Search", "Tokens", "changed_of", "dequantized", "linear_of", "quantize_stage", "report_of", "units",
]  # fmt: skip


LARGE, ROW_EVERY = 2**20, 8
"""Weights from which on a share of the rows decides between scaled and unscaled: it saves a search of the whole that loses."""


class LayerReport(NamedTuple):
    """Loss of plain rounding and of what was chosen, as shares of the layer's squared output; never worse.

    held_out_loss: of what was chosen, on tokens that decided nothing but whether to compensate; held_out_uncompensated: of
    the best without compensation on the same. None where there are no such tokens.
    """

    name: str
    rounding_loss: float
    loss: float
    method: str
    held_out_loss: float | None = None
    held_out_uncompensated: float | None = None


class QuantizedStage(NamedTuple):
    """`integers` by canonical linear name; `changed`: every other tensor of the stage that is new, by full name."""

    integers: dict[str, Integers]
    changed: dict[str, torch.Tensor]
    reports: tuple[LayerReport, ...]


def quantize_stage(
    stage: Stage,
    weights: Mapping[str, torch.Tensor],
    grams: Mapping[str, Gram],
    spec: QuantSpec,
    *,
    search: Search,
    chosen: frozenset[str],
) -> QuantizedStage:
    """Quantises the linears of `stage` that are in `chosen` (canonical names); the others keep their bytes.

    `weights` are the stage's tensors by canonical tensor name, in their own dtype; they are not modified. `grams` may
    hold statistics of held-out tokens as well, under a layer's name with HELD_OUT after it, by which methods are then chosen.
    A fold is left out where its producer or one of its consumers must keep its bytes. Raises ValueError as `quant` does.
    """
    work = {name: tensor.float() for name, tensor in weights.items()}
    held_out = {name.removesuffix(HELD_OUT): gram for name, gram in grams.items() if name.endswith(HELD_OUT)}
    tokens = Tokens(grams, held_out)
    rows: dict[str, torch.Tensor] = {}
    integers: dict[str, Integers] = {}
    reports = []
    for names, fold in units(stage, chosen):
        layers = [linear_of(work, name, tokens, rows.get(name)) for name in names]
        done = _chosen(layers, work, spec, search=search, fold=fold)
        for name, rounded, choice in zip(names, done.rounded, done.choices or [None] * len(names), strict=True):
            reports.append(report_of(linear_of(weights, name, tokens, None), name, rounded, choice))
            integers[name] = rounded.integers
            if rounded.bias is not None:
                work[f"{name}.bias"] = rounded.bias
        if done.producer and fold:
            work.update(done.producer.tensors)
            rows[fold.producer] = done.producer.row_scale
    return QuantizedStage(integers, changed_of(weights, work, integers), tuple(reports))


class Tokens(NamedTuple):
    """Statistics by canonical name: what is fitted to, and what methods are chosen by."""

    grams: Mapping[str, Gram]
    held_out: Mapping[str, Gram]


def units(stage: Stage, chosen: frozenset[str]) -> list[tuple[tuple[str, ...], Fold | None]]:
    """The chosen linears, those that share a fold together, with the fold if it can be used; canonical names throughout."""
    folds = {consumer: fold for fold in (fold.under(stage.root) for fold in stage.folds) for consumer in fold.consumers}
    found: list[tuple[tuple[str, ...], Fold | None]] = []
    for relative in stage.linears:
        name = f"{stage.root}.{relative}"
        fold = folds.get(name)
        together = fold.consumers if fold else (name,)
        names = tuple(consumer for consumer in together if consumer in chosen)
        if name == together[0] and names:
            usable = fold is not None and names == together and (fold.kind == "norm" or fold.producer in chosen)
            found.append((names, fold if usable else None))
    return found


def linear_of(tensors: Mapping[str, torch.Tensor], name: str, tokens: Tokens, row_scale: torch.Tensor | None) -> Linear:
    weight = tensors[f"{name}.weight"].float()
    bias = tensors[f"{name}.bias"].float() if f"{name}.bias" in tensors else None
    right = bias if bias is not None else torch.zeros(weight.shape[0], device=weight.device)
    unclipped = unclipped_rows(name, weight.shape[0])
    return Linear(weight, bias, right, tokens.grams[name], tokens.held_out.get(name), row_scale, unclipped)


def report_of(original: Linear, name: str, done: Rounded, choice: _HeldOut | None) -> LayerReport:
    share = _share(original.weight, original.whole)
    report = LayerReport(name, done.plain_loss * share, done.loss * share, done.method)
    if original.held is None or choice is None:
        return report
    other = _share(original.weight, original.held)
    return report._replace(held_out_loss=choice.chosen * other, held_out_uncompensated=choice.uncompensated * other)


def _share(weight: torch.Tensor, gram: Gram) -> float:
    whole = error(weight, gram.gram)
    return 1 / whole if whole else 0.0


def changed_of(weights: Mapping[str, torch.Tensor], work: Mapping[str, torch.Tensor], integers: Mapping[str, Integers]) -> dict[str, torch.Tensor]:
    """The tensors beside the quantised weights that are not what they were, in their own dtype."""
    packed = {f"{name}.weight" for name in integers}
    return {name: work[name].to(old.dtype) for name, old in weights.items() if name not in packed and not torch.equal(work[name], old.float())}


class _HeldOut(NamedTuple):
    """Losses of a layer on held-out tokens: of the method that was chosen, and of the best without compensation."""

    chosen: float
    uncompensated: float


class _Together(NamedTuple):
    """Layers that share their inputs, and the producer's new tensors where a scale was folded into it.

    `choices` tell what decided about compensation; empty where there was nothing to decide or nothing to decide it by.
    """

    rounded: list[Rounded]
    producer: Producer | None
    choices: tuple[_HeldOut, ...] = ()


def _chosen(layers: Sequence[Linear], work: Mapping[str, torch.Tensor], spec: QuantSpec, *, search: Search, fold: Fold | None) -> _Together:
    """The layers as they will be stored.

    With held-out tokens these decide whether layers that were fitted to the others are better compensated; then all tokens
    are fitted to. Without them the loss on the very tokens that were fitted to decides.
    """
    usual = replace(search, compensate=False)
    if not search.compensate:
        return _quantize_together([layer.with_all_tokens() for layer in layers], work, spec, search=usual, fold=fold)
    plainly = _quantize_together(layers, work, spec, search=usual, fold=fold)
    compensated = _compensated(layers, work, spec, search=search, fold=fold)
    is_better = compensated is not None and _is_better(compensated, plainly)
    if any(layer.held is None for layer in layers):
        return compensated if compensated is not None and is_better else plainly
    better = compensated if compensated is not None and is_better else plainly
    choices = tuple(_HeldOut(new.judged, old.judged) for new, old in zip(better.rounded, plainly.rounded, strict=True))
    everything = [layer.with_all_tokens() for layer in layers]
    final = _compensated(everything, work, spec, search=search, fold=fold) if is_better else None
    if final is None or any(rounded.loss > rounded.plain_loss for rounded in final.rounded):
        final = _quantize_together(everything, work, spec, search=usual, fold=fold)
    return final._replace(choices=choices)


def _is_better(new: _Together, old: _Together) -> bool:
    """In total on the tokens that judge, and no layer worse than plain rounding on those that were fitted to."""
    worse = any(rounded.loss > rounded.plain_loss for rounded in new.rounded)
    return not worse and sum(rounded.judged for rounded in new.rounded) < sum(rounded.judged for rounded in old.rounded)


def _compensated(
    layers: Sequence[Linear], work: Mapping[str, torch.Tensor], spec: QuantSpec, *, search: Search, fold: Fold | None
) -> _Together | None:
    """With compensation, and with scales and clips that suit it; None where the statistics allow none."""
    factor = factored(layers[0].h(search))
    if factor is None:
        return None
    return _quantize_together([layer._replace(factor=factor) for layer in layers], work, spec, search=search, fold=fold)


def _quantize_together(
    layers: Sequence[Linear], work: Mapping[str, torch.Tensor], spec: QuantSpec, *, search: Search, fold: Fold | None
) -> _Together:
    """The best of scaled and unscaled layers."""
    producer = _scaled_producer(layers, work, spec, search=search, fold=fold) if fold and search.scale else None
    moved = [layer.behind(producer) for layer in layers] if producer else []
    is_large = sum(layer.weight.numel() for layer in layers) >= LARGE
    if moved and is_large and not _pays_on_some_rows(layers, moved, spec, search):
        moved, producer = [], None
    if moved and is_large:
        plain = [plain_rounding(layer, spec, search) for layer in layers]
        scaled = _scaled(moved, plain, spec, search)
        if scaled is not None:
            return _Together(scaled, producer)
        moved, producer = [], None
    best = [best_rounding(layer, spec, search) for layer in layers]
    scaled = _scaled(moved, best, spec, search) if moved else None
    if scaled is None or not sum(new.loss for new in scaled) < sum(old.loss for old in best):
        return _Together(best, None)
    return _Together(scaled, producer)


def _scaled(moved: Sequence[Linear], unscaled: Sequence[Rounded], spec: QuantSpec, search: Search) -> list[Rounded] | None:
    """The layers behind their scaled producer; None where one is worse than plain rounding of it unscaled."""
    found = [best_rounding(layer, spec, search) for layer in moved]
    if any(new.loss > old.plain_loss for new, old in zip(found, unscaled, strict=True)):
        return None
    named = ["+".join(["scale", *(m for m in [new.method] if m != ROUNDING)]) for new in found]
    return [new._replace(method=name, plain_loss=old.plain_loss) for new, old, name in zip(found, unscaled, named, strict=True)]


def _pays_on_some_rows(layers: Sequence[Linear], moved: Sequence[Linear], spec: QuantSpec, search: Search) -> bool:
    """Whether the scale makes one row of ROW_EVERY better. Rows are rounded by themselves and losses are sums over them."""
    losses = (sum(best_rounding(layer.every(ROW_EVERY), spec, search).loss for layer in side) for side in (layers, moved))
    return next(losses) > next(losses)


def _scaled_producer(layers: Sequence[Linear], work: Mapping[str, torch.Tensor], spec: QuantSpec, *, search: Search, fold: Fold) -> Producer | None:
    """The fold with the scale that AWQ's search finds; None where it finds none or it cannot be stored."""
    weights = [layer.weight if layer.row_scale is None else layer.weight * layer.row_scale.unsqueeze(1) for layer in layers]
    channels = None if fold.repeats == 1 else read_channels(fold, weights[0].shape[1])
    found = search_scale(weights, layers[0].cost(search), layers[0].gram.mean_abs.float(), spec, grid=search.grid, channels=channels)
    return folded(fold, work, found.scale, spec, search.dtype) if found.loss < found.rounding_loss else None
