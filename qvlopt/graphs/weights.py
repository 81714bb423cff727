"""Parameters by canonical name as a graph takes them, and the linear layers that are made of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

import torch

from qvlopt.errors import RunError
from qvlopt.graphs.writer import GraphWriter
from qvlopt.model.parameters import read_parameter
from qvlopt.model.shapes import EMBEDDING, HEAD
from qvlopt.model.source import Source

Weights = Callable[[str], torch.Tensor]
"""A parameter by canonical name, such as `model.visual.blocks.0.norm1.weight`; in its stored dtype, finite."""


class Linear(Protocol):
    """Adds linear layers to a graph; the one place where float and quantised graphs differ."""

    def __call__(self, graph: GraphWriter, names: Sequence[str], x: str) -> tuple[str, ...]:
        """The outputs [T, N] of the layers `names` (canonical, without `.weight`), which all read `x` [T, K]."""


QKV_PARTS = ("query", "key", "value")
"""What follows the name of a tower's fused `attn.qkv` for a third of its rows: the graph has three layers, and nothing to split."""


def whole_layer(name: str) -> str:
    """The layer of the checkpoint that `name` is, or is a part of."""
    layer, _, part = name.rpartition(".")
    return layer if part in QKV_PARTS else name


def qkv_part(parameter: str, weights: Weights) -> torch.Tensor | None:
    """The rows of `attn.qkv.query.weight` and the like from the fused parameter; None for any other name."""
    name, _, leaf = parameter.rpartition(".")
    layer = whole_layer(name)
    if layer == name:
        return None
    return weights(f"{layer}.{leaf}").chunk(len(QKV_PARTS))[QKV_PARTS.index(name.rpartition(".")[2])]


def weights_of(source: Source) -> Weights:
    """Reads the source's parameters as they are asked for, quantised ones widened; a tied head is the embedding.

    Parts of a fused qkv are parameters too. What it returns raises RunError naming a parameter that holds NaN or infinity.
    """

    def read(parameter: str) -> torch.Tensor:
        part = qkv_part(parameter, read)
        if part is not None:
            return part
        tensor = read_parameter(source, EMBEDDING if parameter == HEAD and source.tied else parameter)
        if tensor.numel() and not all(math.isfinite(float(end)) for end in torch.aminmax(tensor)):
            raise RunError(f"{source.folder}: {parameter} holds NaN or infinity", "the file is damaged: get the checkpoint again")
        return tensor

    return read


class FloatLinear:
    """Linear layers as they are, in float32. `biased` names the layers that have a bias; `seen` is told of each layer written."""

    def __init__(self, weights: Weights, biased: Collection[str], seen: Callable[[str], None] = lambda _: None) -> None:
        self._weights = weights
        self._biased = biased
        self._seen = seen

    def __call__(self, graph: GraphWriter, names: Sequence[str], x: str) -> tuple[str, ...]:
        return tuple(self._layer(graph, name, x) for name in names)

    def _layer(self, graph: GraphWriter, name: str, x: str) -> str:
        operands = [x, graph.weight(f"{name}.weight", self._weights(f"{name}.weight"))]
        if whole_layer(name) in self._biased:
            operands.append(graph.weight(f"{name}.bias", self._weights(f"{name}.bias")))
        self._seen(name)
        return graph.one("Gemm", *operands, transB=1)


def biased_layers(source: Source) -> frozenset[str]:
    """The modules of the source that have a bias."""
    return frozenset(name.removesuffix(".bias") for name in source.storages if name.endswith(".bias"))
