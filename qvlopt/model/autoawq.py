"""AutoAWQ 0.2.9's own scale and clip search, driven over the vision tower's linears: the extra `autoawq`.

A thin adapter. The searches are AutoAWQ's code as it is (awq/quantize/quantizer.py, AwqQuantizer), on the inputs themselves;
what it cannot do on this tower (docs/decisions/0001) is done as for our own search: folding with biases, rounding, packing.
Letters in shapes: T tokens, N outputs, K inputs, G groups.
"""

from __future__ import annotations

import importlib
import warnings
from typing import Any

import torch

from qvlopt.errors import RunError

RELEASE = "0.2.9"
CHUNK_BYTES = 2**30
"""AutoAWQ's default for `max_chunk_memory`."""


class AutoAwq:
    """The two searches of an AwqQuantizer that was made without a model. 4 bits."""

    def __init__(self, *, group_size: int, zero_point: bool, bits: int = 4) -> None:
        """Raises RunError where the package is missing or cannot be imported."""
        quantizer = _quantizer_class()
        self._quantizer: Any = object.__new__(quantizer)
        settings = {
            "w_bit": bits, "group_size": group_size, "zero_point": zero_point, "duo_scaling": True, "n_parallel_calib_samples": None,
            "max_chunk_memory": CHUNK_BYTES, "apply_clip": True,
        }  # fmt: skip
        for name, value in settings.items():
            setattr(self._quantizer, name, value)
        self._group_size = group_size

    @staticmethod
    def require() -> None:
        """Raises RunError where the package is missing: before any work."""
        _quantizer_class()

    @torch.no_grad()
    def scale(self, weight: torch.Tensor, bias: torch.Tensor | None, inputs: torch.Tensor) -> torch.Tensor:
        """The channel scale float32 [K] that AutoAWQ finds for a linear [N, K] and its inputs [T, K]."""
        module = torch.nn.Module()
        module.linear = _linear(weight, bias)
        module.before = torch.nn.Identity()  # only its name is asked for
        _, _, scales = self._quantizer._search_best_scale(module, module.before, [module.linear], inputs.float())
        found: torch.Tensor = scales.float()
        return found

    @torch.no_grad()
    def clip(self, weight: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
        """What AutoAWQ's largest magnitudes leave of both ends of every group's range: float32 [N, G, 2] in (0, 1], as `qparams` takes it."""
        rows = -len(weight) % 64  # it works on 64 or 256 rows at a time and on no others
        padded = torch.cat((weight.float(), weight.new_zeros(rows, weight.shape[1]).float())) if rows else weight.float()
        largest = self._quantizer._compute_best_clip(padded, inputs.float())[: len(weight)]
        groups = weight.float().reshape(len(weight), -1, self._group_size)
        ends = torch.stack((groups.amin(-1).clamp(max=0).abs(), groups.amax(-1).clamp(min=0)), -1)
        return torch.where(ends > 0, largest / torch.where(ends > 0, ends, 1.0), 1.0).clamp(max=1.0)


def _linear(weight: torch.Tensor, bias: torch.Tensor | None) -> torch.nn.Linear:
    linear = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    linear.weight = torch.nn.Parameter(weight.float().clone(), requires_grad=False)
    if bias is not None:
        linear.bias = torch.nn.Parameter(bias.float().clone(), requires_grad=False)
    return linear


def _quantizer_class() -> Any:
    hint = "pip install 'qvlopt[autoawq]' (archived, brings triton), or quantize_awq.engine: native"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it announces its own end of life
        try:
            return importlib.import_module("awq.quantize.quantizer").AwqQuantizer
        except ModuleNotFoundError as error:
            missing = "autoawq is not installed" if (error.name or "").partition(".")[0] == "awq" else f"autoawq needs {error.name}"
            raise RunError(f"quantize_awq.engine: {missing}", hint) from error
        except ImportError as error:
            raise RunError(f"quantize_awq.engine: autoawq {RELEASE} cannot be imported here: {error}", hint) from error
