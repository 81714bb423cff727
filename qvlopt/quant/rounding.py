"""Group-wise rounding of a weight matrix to integers: w ~ (q - zero_point) * scale, one scale and zero point a group.

A group is `group_size` neighbours along the input width, as AWQ and compressed-tensors store it. The order matters: the
scale is first rounded to a number that both bfloat16 and float16 hold exactly, then zero point and integers are computed
from the rounded scale. So an engine in either type dequantises from the very scale that the integers were made for.

Letters in shapes: N outputs, K inputs, G = K / group_size groups, L = 2**bits - 1 the largest integer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

SMALLEST_SCALE = 2.0**-14
"""The smallest normal float16: a group whose weights span less than L times this gets a coarser grid than it could have."""

LARGEST_SCALE = 65280.0
"""The largest bfloat16 that float16 can hold: a group that spans more is clipped."""


@dataclass(frozen=True)
class QuantSpec:
    """How to round. Raises ValueError for bits outside 2..8 or a group size below 1."""

    bits: int
    group_size: int
    symmetric: bool = False

    def __post_init__(self) -> None:
        if not 2 <= self.bits <= 8:
            raise ValueError(f"bits: got {self.bits}, expected 2 to 8")
        if self.group_size < 1:
            raise ValueError(f"group_size: got {self.group_size}, expected 1 or more")

    @property
    def largest(self) -> int:
        """The largest stored integer; the smallest is 0."""
        return int(2**self.bits - 1)

    @property
    def middle(self) -> int:
        """The zero point of every group when `symmetric`."""
        return int(2 ** (self.bits - 1))


class QParams(NamedTuple):
    """scale: float32 [N, G], above 0, exact in bfloat16 and in float16. zero_point: int32 [N, G] in 0..L."""

    scale: torch.Tensor
    zero_point: torch.Tensor


class Integers(NamedTuple):
    """A quantised matrix as stored. q: int32 [N, K] in 0..L, zero_point: int32 [N, G] in 0..L, scale: float32 [N, G]."""

    q: torch.Tensor
    zero_point: torch.Tensor
    scale: torch.Tensor

    @property
    def qparams(self) -> QParams:
        """Scale and zero point, as `dequantize` takes them."""
        return QParams(self.scale, self.zero_point)


def qparams(w: torch.Tensor, spec: QuantSpec, clip: torch.Tensor | None = None) -> QParams:
    """The grid of every group of `w` [N, K], from its smallest and largest weight; the range always includes 0.

    clip: shrinks a group's range, in (0, 1]: [N, G] for both ends alike or [N, G, 2] for the low and the high end.
    A group of zeros gets scale 1 and dequantises to zeros.
    Raises ValueError on a width that the group does not divide, on NaN or infinity in `w`, and on a clip that does not fit.
    """
    require_finite(w)
    low, high = group_range(grouped(w, spec))
    if clip is not None:
        low_clip, high_clip = _ends(clip, low.shape)
        low, high = low * low_clip, high * high_clip
    return range_qparams(low, high, spec)


def quantize(w: torch.Tensor, qp: QParams, spec: QuantSpec) -> torch.Tensor:
    """The integers of `w` [N, K] on the grid `qp`: int32 [N, K] in 0..L. Raises ValueError as `qparams` does."""
    require_finite(w)
    scale, zero_point = qp.scale.unsqueeze(2), qp.zero_point.unsqueeze(2)
    q = torch.round(grouped(w, spec) / scale) + zero_point
    return q.clamp_(0, spec.largest).to(torch.int32).view(w.shape)


def dequantize(q: torch.Tensor, qp: QParams, spec: QuantSpec) -> torch.Tensor:
    """The weights that `q` [N, K] stands for: float32 [N, K], exact (9 bits times a 16-bit float's 8 or 11)."""
    groups = q.view(q.shape[0], _groups(q, spec), spec.group_size)
    return ((groups - qp.zero_point.unsqueeze(2)) * qp.scale.unsqueeze(2)).view(q.shape)


def rounding_error(w: torch.Tensor, spec: QuantSpec, clip: torch.Tensor | None = None) -> torch.Tensor:
    """What rounding adds to `w`: dequantize(quantize(w)) - w in float32 [N, K], without the integers in between."""
    return error_on_grid(grouped(w, spec), qparams(w, spec, clip), spec).view(w.shape)


def require_finite(w: torch.Tensor) -> None:
    """Raises ValueError when `w` holds NaN or infinity: no grid fits those, and a maximum may hide them."""
    if not torch.isfinite(w).all():
        raise ValueError("weight: holds NaN or infinity, expected finite numbers only")


def grouped(w: torch.Tensor, spec: QuantSpec) -> torch.Tensor:
    """`w` [N, K] as float32 [N, G, group_size]. Raises ValueError on other shapes and on a group that does not divide K."""
    if w.ndim != 2:
        raise ValueError(f"weight: got shape {tuple(w.shape)}, expected two dimensions [outputs, inputs]")
    return w.float().reshape(w.shape[0], _groups(w, spec), spec.group_size)


def group_range(groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Lowest and highest of `groups` [..., group_size] along the last dimension, widened to include 0."""
    return groups.amin(-1).clamp_(max=0), groups.amax(-1).clamp_(min=0)


def range_qparams(low: torch.Tensor, high: torch.Tensor, spec: QuantSpec) -> QParams:
    """The grid from low <= 0 to high >= 0, any shape.

    Symmetric: from -m to m with m the larger end, zero in the middle; the top integer is half a step short of m, as in
    compressed-tensors (quantization/utils/helpers.py, calculate_qparams).
    """
    span = 2 * torch.maximum(-low, high) if spec.symmetric else high - low
    scale = torch.where(span > 0, _storable(span / spec.largest), 1.0)
    if spec.symmetric:
        return QParams(scale, torch.full_like(scale, spec.middle, dtype=torch.int32))
    zero_point = torch.round(-low / scale).clamp_(0, spec.largest)
    return QParams(scale, zero_point.to(torch.int32))


def error_on_grid(groups: torch.Tensor, qp: QParams, spec: QuantSpec, out: torch.Tensor | None = None) -> torch.Tensor:
    """Rounding error of `groups` [..., group_size] on the grid `qp` [...], in `out` if given; leading dimensions broadcast."""
    scale, zero_point = qp.scale.unsqueeze(-1), qp.zero_point.unsqueeze(-1).to(torch.float32)
    # In place from here on: this runs for every candidate of both searches. Integers are exact in float32.
    error = torch.div(groups, scale, out=out).round_().add_(zero_point).clamp_(0, spec.largest)
    return error.sub_(zero_point).mul_(scale).sub_(groups)


def _storable(scale: torch.Tensor) -> torch.Tensor:
    """`scale` as the nearest bfloat16 within float16's normal range.

    Nearest, not up: at 2 to 6 bits rounding up costs 0.4 to 0.9 % of squared error and nearest under 0.1 %; at 8 bits,
    where a scale a little too small clips, nearest costs 0.5 to 0.9 % and up 0.3 to 0.6 % (Gaussian, Laplace, Student-t).
    """
    return scale.to(torch.bfloat16).to(torch.float32).clamp_(SMALLEST_SCALE, LARGEST_SCALE)


def _groups(w: torch.Tensor, spec: QuantSpec) -> int:
    width = w.shape[1]
    if width % spec.group_size:
        raise ValueError(f"group size {spec.group_size} does not divide the input width {width}")
    return width // spec.group_size


def _ends(clip: torch.Tensor, shape: torch.Size) -> tuple[torch.Tensor, torch.Tensor]:
    if clip.shape not in (shape, (*shape, 2)):
        raise ValueError(f"clip: got shape {tuple(clip.shape)}, expected {tuple(shape)} [outputs, groups], or that with 2 ends")
    if not bool(((clip > 0) & (clip <= 1)).all()):
        raise ValueError(f"clip: got values from {clip.min():g} to {clip.max():g}, expected above 0 and at most 1")
    return (clip, clip) if clip.shape == shape else (clip[..., 0], clip[..., 1])
