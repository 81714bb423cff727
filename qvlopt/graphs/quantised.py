"""Linear layers of a graph in integers: W8A8 with a scale for every token, and blocks of 8 or 4 bits. Written as they are rounded.

W8A8: ReduceMax and ReduceMin give each token's largest magnitude; a 127th of it is the token's step, by which QuantizeLinear goes
to u8; MatMulIntegerToFloat multiplies with s8 weights, and the result is multiplied by the step. Linears that read the same x
share its integers. A token of zeros gives zeros. Only MatMulNBits can take weights of 4 bits, and it is quicker where
one token streams all weights, as in the head.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from onnx import numpy_helper

from qvlopt.graphs.rounding import LEVELS, SMALLEST, block_size, round_blocks, round_rows
from qvlopt.graphs.weights import FloatLinear, Weights, whole_layer
from qvlopt.graphs.writer import GraphWriter

Scheme = Literal["w8a8", "blocks8", "blocks4", "float32"]
BLOCK = 128
"""Inputs that share a scale in 8 bits: the fastest for one token (design figures in docs/decisions/0006)."""
BLOCK4 = 128
"""In 4 bits: blocks of 32 are off by a sixth less and take 1.4 times as long (docs/decisions/0006)."""
ACCURACY_LEVEL = 4
"""MatMulNBits computes with int8 activations, a scale for each block of a token."""


class Place(NamedTuple):
    """Where another file of the folder holds a layer's packed integers and scales."""

    file: str
    integers: int
    scales: int
    block: int


class QuantisedLinear:
    """A `Linear` whose layers have the scheme that `schemes` names; a layer that it does not name is float32."""

    def __init__(
        self,
        weights: Weights,
        biased: Collection[str],
        schemes: Mapping[str, Scheme],
        *,
        largest: int = LEVELS,
        importance: Mapping[str, torch.Tensor] | None = None,
        seen: Callable[[str], None] = lambda _: None,
    ) -> None:
        """`largest` bounds W8A8 weights; `importance` [K] weighs the inputs of layers of 4 bits; `seen` is told of each layer."""
        self._weights, self._biased, self._schemes = weights, biased, schemes
        self._largest, self._importance, self._seen = largest, importance or {}, seen
        self._float = FloatLinear(weights, biased, seen)
        self.places: dict[str, Place] = {}
        """Layers of blocks8 whose integers lie in another file already."""

    def __call__(self, graph: GraphWriter, names: Sequence[str], x: str) -> tuple[str, ...]:
        tokens = _Tokens(graph, x) if any(self._scheme(name) == "w8a8" for name in names) else None
        return tuple(self._layer(graph, name, x, tokens) for name in names)

    def _layer(self, graph: GraphWriter, name: str, x: str, tokens: _Tokens | None) -> str:
        scheme = self._scheme(name)
        if scheme == "float32":
            return self._float(graph, [name], x)[0]
        if scheme == "w8a8":
            assert tokens is not None, "made where any of the layers needs it"
            y = self._rows(graph, name, tokens)
        else:
            y = self._blocks(graph, name, x, 8 if scheme == "blocks8" else 4)
        self._seen(name)
        if whole_layer(name) not in self._biased:
            return y
        return graph.one("Add", y, graph.weight(f"{name}.bias", self._weights(f"{name}.bias")))

    def _scheme(self, name: str) -> Scheme:
        return self._schemes.get(whole_layer(name), "float32")

    def _rows(self, graph: GraphWriter, name: str, tokens: _Tokens) -> str:
        rounded = round_rows(self._weights(f"{name}.weight").float(), largest=self._largest)
        weight = graph.weight(f"{name}.weight", rounded.q.T.contiguous())
        scale = graph.weight(f"{name}.scale", rounded.scale)
        return tokens.times(weight, scale)

    def _blocks(self, graph: GraphWriter, name: str, x: str, bits: int) -> str:
        place = self.places.get(name)
        if place is not None:
            weight, scale, shape, block = *_referred(graph, name, place, self._weights), place.block
        else:
            tensor = self._weights(f"{name}.weight")
            shape = (tensor.shape[0], tensor.shape[1])
            found = block_size(shape[1], BLOCK if bits == 8 else BLOCK4)
            assert found is not None, f"{name}: a layer without a block size stays float32"
            rounded, block = round_blocks(tensor, bits=bits, block=found, importance=self._importance.get(name)), found
            weight, scale = graph.weight(f"{name}.weight", rounded.packed()), graph.weight(f"{name}.scale", rounded.scale)
        attributes: dict[str, Any] = {"N": shape[0], "K": shape[1], "bits": bits, "block_size": block, "accuracy_level": ACCURACY_LEVEL}
        return graph.one("MatMulNBits", x, weight, scale, **attributes)


class _Tokens:
    """The integers of an input [T, K] and the scale of every token, made once for all linears that read it."""

    def __init__(self, graph: GraphWriter, x: str) -> None:
        self._graph = graph
        last = graph.shape(-1)
        lowest = graph.one("Neg", graph.one("ReduceMin", x, last, keepdims=0))
        largest = graph.one("Max", graph.one("ReduceMax", x, last, keepdims=0), lowest, graph.constant(np.array([SMALLEST], dtype=np.float32)))
        steps = graph.one("Mul", largest, graph.scalar(1 / LEVELS))
        zero = np.array([LEVELS + 1], dtype=np.uint8)
        zeros = graph.one("ConstantOfShape", graph.one("Shape", steps), value=numpy_helper.from_array(zero))
        self._integers = graph.one("QuantizeLinear", x, steps, zeros, axis=0)
        self._steps = graph.one("Unsqueeze", steps, last)
        self._one, self._zero = graph.scalar(1.0), graph.constant(zero[0])

    def times(self, weight: str, scale: str) -> str:
        """The product [T, N] with s8 [K, N] and its scales [N]."""
        graph = self._graph
        product = graph.one("MatMulIntegerToFloat", self._integers, weight, self._one, scale, self._zero)
        return graph.one("Mul", product, self._steps)


def _referred(graph: GraphWriter, name: str, place: Place, weights: Weights) -> tuple[str, str, tuple[int, int]]:
    """Declares integers and scales that lie in another file; gives their names and the layer's shape."""
    rows, width = weights(f"{name}.weight").shape
    groups = width // place.block
    integers = graph.refer(f"{name}.weight", torch.uint8, (rows, groups, place.block), file=place.file, offset=place.integers)
    scales = graph.refer(f"{name}.scale", torch.float32, (rows, groups), file=place.file, offset=place.scales)
    return integers, scales, (rows, width)
