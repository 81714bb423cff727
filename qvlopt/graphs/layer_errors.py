"""What integers cost each linear, on the inputs that it has for real, and the scheme and smoothing that cost least.

The model runs in float32 over a few prompts, one stage in memory at a time. Of every input at most ROWS tokens are kept, evenly
from all prompts, so memory does not grow with their number. Errors are each layer's own: its inputs are the exact ones.
R rows kept, N outputs, K inputs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch

from qvlopt.graphs.quantised import BLOCK, BLOCK4, Scheme
from qvlopt.graphs.rounding import AT_ONCE, LEVELS, block_size, in_blocks, round_blocks, round_rows, round_tokens
from qvlopt.graphs.saturation import EIGHT_BITS, SEVEN_BITS
from qvlopt.graphs.smooth import STRENGTHS, Group, scale_of
from qvlopt.graphs.weights import Weights

ROWS = 256
"""Tokens of a layer's input that its error is measured on."""
FOUR_BITS_ALLOWED = 4.0
"""A layer of 4 bits may be off by so many times `max_layer_error` before it gets 8: rounding to 16 values alone costs 0.1."""


class Inputs(NamedTuple):
    """What a linear read: some rows float32 [R, K], and of all rows the largest magnitude and mean square of each input [K]."""

    rows: torch.Tensor
    largest: torch.Tensor
    mean_square: torch.Tensor


class Recorder:
    """Collects the inputs of linears by canonical name. `prompts` is how many inputs each will be given."""

    def __init__(self, prompts: int, *, rows: int = ROWS) -> None:
        self._share = max(1, rows // max(1, prompts))
        self._rows: dict[str, list[torch.Tensor]] = {}
        self._largest: dict[str, torch.Tensor] = {}
        self._squares: dict[str, torch.Tensor] = {}
        self._count: dict[str, int] = {}

    def __call__(self, name: str, x: torch.Tensor) -> None:
        """`x` [T, K] of one prompt: its first token, where massive activations sit, and others at even distances."""
        step = -(-len(x) // self._share)
        self._rows.setdefault(name, []).append(x[::step].float().clone())
        largest, squares = x.abs().amax(0).float(), x.double().pow(2).sum(0)
        self._largest[name] = torch.maximum(self._largest[name], largest) if name in self._largest else largest
        self._squares[name] = self._squares[name] + squares if name in self._squares else squares
        self._count[name] = self._count.get(name, 0) + len(x)

    def inputs(self, name: str) -> Inputs:
        """Raises KeyError for a linear that never ran."""
        return Inputs(torch.cat(self._rows[name]), self._largest[name], (self._squares[name] / self._count[name]).float())


class Chosen(NamedTuple):
    """A layer's scheme, ||error|| / ||output|| of plain rounding and of what was chosen, and that in words."""

    name: str
    scheme: Scheme
    plain: float
    error: float
    method: str


class GroupChoice(NamedTuple):
    """The layers of a group, and the scale [P] to fold; None where none is better."""

    layers: tuple[Chosen, ...]
    scale: torch.Tensor | None


class Wanted(NamedTuple):
    """What to make of a group's layers: their scheme, what W8A8 weights are bounded by, the error allowed, and which stay float32."""

    scheme: Scheme
    max_error: float
    smooth: bool = True
    largest: int = LEVELS
    keep: frozenset[str] = frozenset()


class Fixed(NamedTuple):
    """A smoothing that is decided already, by another graph over the same buffers; None: none."""

    scale: torch.Tensor | None


def choose(
    group: Group, inputs: Inputs, weights: Weights, wanted: Wanted, *, largest_seen: torch.Tensor | None = None, fixed: Fixed | None = None
) -> GroupChoice:
    """The smoothing of least error over the group's layers, and each layer's scheme under it.

    `largest_seen` [K] are magnitudes from calibration, which saw more tokens. With `fixed` nothing is searched.
    """
    trial = _Trial(group, inputs, weights, wanted)
    plain = trial.errors(None)
    best, scale, words = plain, None, ""
    if fixed is not None and fixed.scale is not None:
        best, scale, words = trial.errors(fixed.scale), fixed.scale, ", smoothed as in the graph that shares its buffers"
    elif fixed is None and wanted.smooth and group.producers and plain:
        largest = inputs.largest if largest_seen is None else torch.maximum(inputs.largest, largest_seen.float())
        for strength in STRENGTHS:
            tried = scale_of(largest, list(trial.tensors.values()), group, strength)
            found = trial.errors(tried)
            if _total(found) < _total(best):
                best, scale, words = found, tried, f", smoothed {strength:g}"
    layers = [trial.judged(name, plain[name], best[name], scale) for name in plain]
    layers = [layer._replace(method=layer.method + words) for layer in layers]
    kept = [Chosen(name, "float32", 0.0, 0.0, "float32, kept") for name in group.consumers if name in wanted.keep]
    return GroupChoice((*layers, *kept), scale)


class _Trial:
    """A group's layers with their exact outputs, tried under one scale after the other."""

    def __init__(self, group: Group, inputs: Inputs, weights: Weights, wanted: Wanted) -> None:
        self.group, self.inputs, self.wanted = group, inputs, wanted
        names = [name for name in group.consumers if name not in wanted.keep]
        self.tensors = {name: weights(f"{name}.weight").float() for name in names}
        self._outputs = {name: inputs.rows @ weight.T for name, weight in self.tensors.items()}

    def errors(self, scale: torch.Tensor | None) -> dict[str, float]:
        """Of every layer in the wanted scheme, its columns multiplied by `scale` [P] and its inputs divided by it."""
        return {name: self._error(name, self.wanted.scheme, scale) for name in self.tensors}

    def judged(self, name: str, plain: float, error: float, scale: torch.Tensor | None) -> Chosen:
        """The wanted scheme if its error is allowed, else the next better one."""
        wanted = self.wanted
        label = {"w8a8": EIGHT_BITS if wanted.largest == LEVELS else SEVEN_BITS, "blocks8": "8 bits", "blocks4": "4 bits", "float32": "float32"}
        allowed = wanted.max_error * (FOUR_BITS_ALLOWED if wanted.scheme == "blocks4" else 1)
        width = self.tensors[name].shape[1]
        if wanted.scheme.startswith("blocks") and block_size(width, BLOCK4) is None:
            return Chosen(name, "float32", 0.0, 0.0, f"float32: its {width} inputs are no multiple of 16")
        if error <= allowed:
            return Chosen(name, wanted.scheme, plain, error, label[wanted.scheme])
        if wanted.scheme == "blocks4":
            finer = self._error(name, "blocks8", scale)
            if finer <= wanted.max_error:
                return Chosen(name, "blocks8", plain, finer, f"8 bits: 4 would be off by {error:.3f}, more than {allowed:g}")
        return Chosen(name, "float32", plain, 0.0, f"float32: {label[wanted.scheme]} would be off by {error:.3f}, more than {allowed:g}")

    def _error(self, name: str, scheme: Scheme, scale: torch.Tensor | None) -> float:
        """||error|| / ||output|| of one layer; in pieces of some outputs, so that no copy of a large weight is made."""
        weight, rows, importance = self.tensors[name], self.inputs.rows, self.inputs.mean_square
        parts: Iterable[torch.Tensor] = torch.split(weight, max(1, AT_ONCE // weight.shape[1]))
        if scale is not None:
            assert self.group.channel is not None, "only a group with producers is smoothed"
            columns = scale[self.group.channel]
            rows, importance = rows / columns, importance / columns**2
            parts = (part * columns for part in parts)
        rounded = [rounded_output(rows, part, scheme, largest=self.wanted.largest, importance=importance) for part in parts]
        return relative(self._outputs[name], torch.cat(rounded, 1))


def rounded_output(
    rows: torch.Tensor, weight: torch.Tensor, scheme: Scheme, *, largest: int = LEVELS, importance: torch.Tensor | None = None
) -> torch.Tensor:
    """What the graph's operators give for rows [R, K] and weights [N, K]: [R, N]. Blocks round activations a block at a time."""
    if scheme == "w8a8":
        return round_tokens(rows) @ round_rows(weight, largest=largest).value().T
    bits = 8 if scheme == "blocks8" else 4
    block = block_size(weight.shape[1], BLOCK if bits == 8 else BLOCK4)
    if scheme == "float32" or block is None:
        return rows @ weight.T
    by_block = round_tokens(in_blocks(rows, block)).flatten(1)
    return by_block @ round_blocks(weight, bits=bits, block=block, importance=importance if bits == 4 else None).value().T


def relative(base: torch.Tensor, candidate: torch.Tensor) -> float:
    """||candidate - base|| / ||base||; 0 without an error, infinite where only the base is zero or a value is not finite."""
    off, whole = float((candidate - base).double().norm()), float(base.double().norm())
    return 0.0 if off == 0 else off / whole if whole > 0 and off < float("inf") else float("inf")


def _total(errors: Mapping[str, float]) -> float:
    return sum(error**2 for error in errors.values())
