"""A checkpoint's config.json, checked and brought to one spelling; nothing that changes the numbers is ever defaulted.

transformers 4.57 writes `rope_theta` and `rope_scaling` into text_config, 5.x one `rope_parameters`; both mean the same
here. A config without a theta is refused: the class's default is not any released checkpoint's value.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import isqrt
from pathlib import Path
from typing import Any, NamedTuple

import torch

from qvlopt.errors import RunError
from qvlopt.model.settings import RESTORE, Settings
from qvlopt.model.vision import VisionConfig

MODEL_TYPE = "qwen3_vl"
ROPE_TYPES = ("default", "linear", "yarn", "llama3")
"""Types whose frequencies do not depend on the length seen so far, so that an answer does not depend on its batch."""
TEXT_NEEDED = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "max_position_embeddings", "rms_norm_eps",
)  # fmt: skip
VISION_ACTIVATIONS = ("gelu_pytorch_tanh", "gelu")
TEXT_ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh")
"""`hidden_act` and `attention_bias` are the only keys of text_config that may be absent (configuration_qwen3_vl.py: silu, false)."""
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
MOST_LAYERS = 1000
"""Of either tower; a config that says more is broken, and its shapes would fill the memory."""
VISION_NEEDED = (
    "hidden_size", "num_heads", "intermediate_size", "out_hidden_size", "patch_size", "temporal_patch_size", "spatial_merge_size",
    "num_position_embeddings",
)  # fmt: skip


class ModelConfig(NamedTuple):
    """What a Qwen3-VL is built from. `text` holds the arguments of transformers' Qwen3VLTextConfig, rope in its 5.x form."""

    vision: VisionConfig
    text: dict[str, Any]
    image_token_id: int
    dtype: torch.dtype | None
    tied: bool | None
    """As the config says; None when it does not: then the tensors decide."""
    quant_method: str | None
    raw: dict[str, Any]


def read_config(folder: Path) -> ModelConfig:
    """Reads and checks `folder`/config.json. Raises RunError naming the file and the key."""
    path = folder / "config.json"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise RunError(f"{folder}: config.json is missing", hint="name the folder of a Qwen3-VL checkpoint") from error
    except ValueError as error:
        raise RunError(f"{path}: not valid JSON ({error})", hint=RESTORE) from error
    kind = raw.get("model_type") if isinstance(raw, dict) else None
    if kind != MODEL_TYPE:
        raise RunError(f"{path}: model_type is {kind!r}, expected {MODEL_TYPE!r}", hint="other model families are not supported")
    for section in ("vision_config", "text_config"):
        if not isinstance(raw.get(section), dict):
            raise RunError(f"{path}: {section} is missing", hint=RESTORE)
    return ModelConfig(
        vision=_vision_config(raw["vision_config"], path),
        text=_text_settings(raw["text_config"], path),
        image_token_id=Settings(raw, str(path)).whole("image_token_id"),
        dtype=_dtype(raw, path),
        tied=_tied_flag(raw),
        quant_method=_quant_method(raw),
        raw=raw,
    )


def rope_parameters(text: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The rotary settings of a text_config in transformers' 5.x spelling, whichever spelling it uses; `where` is for errors.

    Raises RunError when the theta is missing, when two places disagree, and for a rope type that this version cannot run.
    """
    new, old = text.get("rope_parameters") or {}, text.get("rope_scaling") or {}
    if not isinstance(new, dict) or not isinstance(old, dict):
        raise RunError(f"{where}: rope_parameters and rope_scaling are objects, got {new!r} and {old!r}", hint=RESTORE)
    rope: dict[str, Any] = {}
    for source in (new, old, {"rope_theta": text["rope_theta"]} if text.get("rope_theta") is not None else {}):
        for key, value in source.items():
            name = "rope_type" if key == "type" else key
            value = "default" if name == "rope_type" and value == "mrope" else value  # Qwen2-VL's older word
            if rope.setdefault(name, value) != value:
                raise RunError(f"{where}: {name} is given twice, {rope[name]!r} and {value!r}", hint="keep one spelling of the rotary settings")
    rope.setdefault("rope_type", "default")
    theta, sections = rope.get("rope_theta"), rope.get("mrope_section")
    if isinstance(theta, bool) or not isinstance(theta, (int, float)) or not 0 < theta < 1e300:
        raise RunError(
            f"{where}: no rope_theta, neither in rope_parameters nor beside rope_scaling",
            hint="take it from the original checkpoint's config.json (5000000 in Qwen's releases)",
        )
    if rope["rope_type"] not in ROPE_TYPES:
        raise RunError(f"{where}: rope_type is {rope['rope_type']!r}, supported are {', '.join(ROPE_TYPES)}")
    whole = [section for section in sections if type(section) is int] if isinstance(sections, list) else []
    if whole != sections or len(whole) != 3 or 2 * sum(whole) != text.get("head_dim"):
        raise RunError(f"{where}: mrope_section is {sections!r}, expected three numbers with the sum head_dim / 2 = {text.get('head_dim', 0) / 2:g}")
    if rope.get("mrope_interleaved", True) is not True:
        raise RunError(f"{where}: mrope_interleaved is {rope['mrope_interleaved']!r}, Qwen3-VL interleaves")
    rope["rope_theta"] = float(theta)
    return rope


def _text_settings(text: Mapping[str, Any], path: Path) -> dict[str, Any]:
    missing = [key for key in TEXT_NEEDED if text.get(key) is None]
    if missing:
        raise RunError(f"{path}: text_config lacks {', '.join(missing)}", hint=RESTORE)
    values = Settings(text, f"{path}: text_config")
    settings: dict[str, Any] = {key: values.whole(key) for key in TEXT_NEEDED if key not in ("num_hidden_layers", "rms_norm_eps")}
    settings["num_hidden_layers"] = values.whole("num_hidden_layers", most=MOST_LAYERS)
    settings["rms_norm_eps"] = values.number("rms_norm_eps")
    settings["hidden_act"] = values.choice("hidden_act", "silu", TEXT_ACTIVATIONS)
    settings["attention_bias"] = bool(text.get("attention_bias"))
    _check_divides(settings, "num_attention_heads", "num_key_value_heads", f"{path}: text_config")
    return {**settings, "rope_parameters": rope_parameters(text, f"{path}: text_config")}


def _vision_config(vision: Mapping[str, Any], path: Path) -> VisionConfig:
    where = f"{path}: vision_config"
    missing = [key for key in (*VISION_NEEDED, "depth", "deepstack_visual_indexes") if vision.get(key) is None]
    if missing:
        raise RunError(f"{where} lacks {', '.join(missing)}", hint=RESTORE)
    values = Settings(vision, where)
    for key in VISION_NEEDED:
        values.whole(key)
    values.wholes("deepstack_visual_indexes", least=0, most=values.whole("depth", most=MOST_LAYERS) - 1)
    values.whole("in_channels", 3)
    values.choice("hidden_act", "gelu_pytorch_tanh", VISION_ACTIVATIONS)
    values.section("rope_parameters").number("rope_theta", 10000.0)
    _check_divides(vision, "hidden_size", "num_heads", where)
    if isqrt(vision["num_position_embeddings"]) ** 2 != vision["num_position_embeddings"]:
        raise RunError(f"{where}: num_position_embeddings is {vision['num_position_embeddings']}, expected a square", hint=RESTORE)
    return VisionConfig.from_dict(vision)


def _check_divides(section: Mapping[str, Any], whole: str, part: str, where: str) -> None:
    if section[whole] % section[part]:
        raise RunError(f"{where}: {whole} is {section[whole]}, expected a multiple of {part}, which is {section[part]}", hint=RESTORE)


def _dtype(raw: Mapping[str, Any], path: Path) -> torch.dtype | None:
    """The dtype that the checkpoint says it is in (`dtype`, in older files `torch_dtype`; the top level first)."""
    for section in (raw, raw["text_config"]):
        name = section.get("dtype") or section.get("torch_dtype")
        if name is not None and name != "auto":
            return DTYPES[Settings({"dtype": name}, str(path)).choice("dtype", "", tuple(DTYPES))]
    return None


def _tied_flag(raw: Mapping[str, Any]) -> bool | None:
    for section in (raw, raw["text_config"]):
        if isinstance(section.get("tie_word_embeddings"), bool):
            return bool(section["tie_word_embeddings"])
    return None


def _quant_method(raw: Mapping[str, Any]) -> str | None:
    """Top level as everywhere; some tools of compressed-tensors wrote it into text_config."""
    for section in (raw, raw["text_config"]):
        stored = section.get("quantization_config") or section.get("compression_config")
        if isinstance(stored, dict):
            return str(stored.get("quant_method", "compressed-tensors"))
    return None
