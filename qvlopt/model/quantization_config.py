"""The `quantization_config` that makes engines treat exactly the quantised linears as quantised, and nothing else.

The engines' matching rules differ: transformers anchors an entry of `modules_to_not_convert` at the start of the full
name, vLLM looks for it as a substring of its own shorter name; compressed-tensors' regexes run against vLLM's names.
So names are listed in both spellings and regexes start with `.*`; only the names of whole linears are listed, since
`visual.deepstack_merger_list.1` would be found in `visual.deepstack_merger_list.10` too.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from qvlopt.model.names import LANGUAGE, LM_HEAD
from qvlopt.quant.rounding import QuantSpec

_MODEL = "model."
_LINEAR_KINDS = r"re:.*visual\.(blocks\.\d+\.(attn\.(qkv|proj)|mlp\.linear_fc[12])|(merger|deepstack_merger_list\.\d+)\.linear_fc[12])$"
"""Every linear of the tower under transformers' and vLLM's names, and not its embeddings, norms or convolution."""
_DECODER_LINEARS = r"re:.*language_model\.(model\.)?layers\.\d+\.(self_attn\.[qkvo]_proj|mlp\.(gate|up|down)_proj)$"
"""Every linear of the decoder layers; engines that fuse some look for each of those they are made of."""


def awq_config(spec: QuantSpec, kept_linears: Sequence[str], kept_language: Sequence[str] | None = None) -> dict[str, Any]:
    """AutoAWQ's GEMM config; `kept_linears` are the tower's linears that stay in 16 bits, by canonical name.

    `kept_language` are those of the language model; None where all of it stays.
    """
    names = [*([LANGUAGE] if kept_language is None else kept_language), *kept_linears]
    kept = [spelling for name in names for spelling in _spellings(name)]
    return {
        "quant_method": "awq",
        "version": "gemm",
        "bits": spec.bits,
        "group_size": spec.group_size,
        "zero_point": not spec.symmetric,
        "modules_to_not_convert": [*kept, LM_HEAD],
    }


def compressed_config(spec: QuantSpec, kept_linears: Sequence[str], kept_language: Sequence[str] | None = None) -> dict[str, Any]:
    """compressed-tensors' pack-quantized config, one group, weights only; arguments as those of `awq_config`."""
    weights = {
        "num_bits": spec.bits, "type": "int", "symmetric": spec.symmetric, "strategy": "group", "group_size": spec.group_size, "dynamic": False,
    }  # fmt: skip
    targets = [_LINEAR_KINDS] if kept_language is None else [_LINEAR_KINDS, _DECODER_LINEARS]
    group = {"targets": targets, "weights": weights, "input_activations": None, "output_activations": None, "format": "pack-quantized"}
    kept = [rf"re:.*{re.escape(name.removeprefix(_MODEL))}$" for name in kept_linears]
    layers = [rf"re:.*language_model\.(model\.)?{re.escape(name.removeprefix(f'{LANGUAGE}.'))}$" for name in kept_language or ()]
    language = ["re:.*language_model.*"] if kept_language is None else layers
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": [LM_HEAD, *language, *kept],
    }


def _spellings(name: str) -> list[str]:
    """The names that engines know a module by: transformers', without its first part, and vLLM's of a decoder layer's."""
    layer = [name.replace(f"{LANGUAGE}.", "language_model.model.", 1)] if name.startswith(f"{LANGUAGE}.") else []
    return [name, name.removeprefix(_MODEL), *layer]
