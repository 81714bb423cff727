"""Widens the tower's MLPs with inner channels that are zero: exact, and a width that groups divide.

A new row of `linear_fc1` has no weights and no bias, so its channel is gelu(0) = 0 for every token, and the new columns of
`linear_fc2` are zero as well. The width is one number in config.json, so all blocks are widened or none. Letters in
shapes: I inner channels.
"""

from __future__ import annotations

from math import lcm

import torch
import torch.nn.functional as F

from qvlopt.model.names import VISION
from qvlopt.model.vision import VisionConfig
from qvlopt.quant.objective import Gram

KERNEL_WIDTH = 128
"""Inputs that GPU kernels take at once (vLLM's Marlin: multiples of 128 inputs, 64 outputs); padding to less would cost a second one."""


def padded_width(inner: int, group_size: int) -> int:
    """The least width from `inner` on that groups and kernels divide."""
    step = lcm(group_size, KERNEL_WIDTH)
    return -(-inner // step) * step


def padded_parameters(config: VisionConfig) -> tuple[str, ...]:
    """Canonical names of the parameters that have an inner dimension."""
    parts = ("linear_fc1.weight", "linear_fc1.bias", "linear_fc2.weight")
    return tuple(f"{VISION}.blocks.{index}.mlp.{part}" for index in range(config.depth) for part in parts)


def is_inner_input(linear: str) -> bool:
    """Whether the inputs of the linear of that canonical name are the inner channels."""
    return linear.startswith(f"{VISION}.blocks.") and linear.endswith("mlp.linear_fc2")


def is_inner_output(linear: str) -> bool:
    """Whether the outputs of the linear of that canonical name become the inner channels."""
    return linear.startswith(f"{VISION}.blocks.") and linear.endswith("mlp.linear_fc1")


def padded(name: str, tensor: torch.Tensor, width: int) -> torch.Tensor:
    """Parameter `name` with zeros for inner channels up to `width`; parameters without an inner dimension are returned as they are."""
    if not name.startswith(f"{VISION}.blocks."):
        return tensor
    if name.endswith("mlp.linear_fc2.weight"):
        return F.pad(tensor, (0, width - tensor.shape[1]))
    if name.endswith("mlp.linear_fc1.weight"):
        return F.pad(tensor, (0, 0, 0, width - tensor.shape[0]))
    return F.pad(tensor, (0, width - tensor.shape[0])) if name.endswith("mlp.linear_fc1.bias") else tensor


def padded_gram(gram: Gram, width: int) -> Gram:
    """Statistics of inputs with channels up to `width` that are always zero."""
    more = width - gram.sum.shape[0]
    vectors = (F.pad(values, (0, more)) for values in (gram.abs_sum, gram.abs_max))
    return Gram(gram.count, F.pad(gram.sum, (0, more)), F.pad(gram.centred, (0, more, 0, more)), *vectors)
