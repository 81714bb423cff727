"""A checkpoint's weights, read one tensor at a time into the model that runs them.

The tower is `VisionTower` over a plain mapping, the language model transformers' own class. Memory peaks at about one copy
of the weights in the compute dtype: nothing is initialised at random first and each tensor is read, converted and assigned.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLTextConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextModel, Qwen3VLTextRotaryEmbedding

from qvlopt.errors import RunError
from qvlopt.model.shapes import EMBEDDING, HEAD, LANGUAGE, VISION, text_shapes, vision_shapes
from qvlopt.model.source import Source
from qvlopt.model.stored import widened
from qvlopt.model.vision import VisionTower

PLAIN_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}
"""Stored dtypes that need no scales, by safetensors code."""


@dataclass(frozen=True)
class LoadedModel:
    """A whole model on one device in one dtype. `head` [vocabulary, hidden] is the embedding's own tensor when tied."""

    vision: VisionTower
    text: Qwen3VLTextModel
    head: torch.Tensor
    image_token_id: int
    dtype: torch.dtype
    device: torch.device


def load_model(source: Source, *, dtype: torch.dtype, device: torch.device | str) -> LoadedModel:
    """Reads every weight into `dtype` on `device`, quantised ones widened. Raises RunError naming a tensor that is broken."""
    place = torch.device(device)
    return LoadedModel(
        vision=load_vision(source, dtype=dtype, device=place),
        text=(text := _load_text(source, dtype, place)),
        head=text.embed_tokens.weight if source.tied else _placed(source, HEAD, dtype, place),
        image_token_id=source.settings.image_token_id,
        dtype=dtype,
        device=place,
    )


def load_vision(source: Source, *, dtype: torch.dtype, device: torch.device | str) -> VisionTower:
    """The tower alone."""
    return VisionTower(source.settings.vision, load_vision_part(source, ("",), dtype=dtype, device=device))


def load_vision_part(source: Source, prefixes: tuple[str, ...], *, dtype: torch.dtype, device: torch.device | str) -> dict[str, torch.Tensor]:
    """The tower's parameters whose names, relative to it, start with one of `prefixes` (such as `blocks.0.`)."""
    names = [name for name in vision_shapes(source.settings.vision) if name.startswith(prefixes)]
    return {name: _placed(source, VISION + name, dtype, torch.device(device)) for name in names}


def checkpoint_dtype(source: Source) -> torch.dtype:
    """The dtype that the checkpoint is in: as its config says, else that of the embedding."""
    stored = source.tensors.entry(source.names[source.storages[EMBEDDING].tensors[0]]).dtype
    return source.settings.dtype or PLAIN_DTYPES.get(stored, torch.bfloat16)


def read_parameter(source: Source, parameter: str) -> torch.Tensor:
    """One parameter by canonical name on the CPU: plain ones in their stored dtype, quantised ones in the checkpoint's.

    Raises RunError naming the parameter when its tensors are broken or hold NaN or infinity.
    """
    storage = source.storages[parameter]

    def read(name: str) -> torch.Tensor:
        return source.tensors.read(source.names[name])

    if storage.kind == "plain":
        stored = source.tensors.entry(source.names[parameter]).dtype
        if stored not in PLAIN_DTYPES:
            raise RunError(f"{source.folder}: {source.names[parameter]} is {stored} without scales, expected {', '.join(PLAIN_DTYPES)}")
        return read(parameter)
    block = (source.config.get("quantization_config") or {}).get("weight_block_size") or (128, 128)
    try:
        return widened(storage, read, dtype=checkpoint_dtype(source), fp8_block=(int(block[0]), int(block[1])))
    except ValueError as error:
        raise RunError(f"{source.folder}: {parameter} cannot be unpacked: {error}") from error


def _placed(source: Source, parameter: str, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    tensor = read_parameter(source, parameter).to(device=device, dtype=dtype)
    if not bool(torch.isfinite(tensor).all()):
        raise RunError(f"{source.folder}: {parameter} holds NaN or infinity in {dtype}", hint="the file is damaged, or the dtype's range too small")
    return tensor


def _load_text(source: Source, dtype: torch.dtype, device: torch.device) -> Qwen3VLTextModel:
    """transformers' language model, built without memory and filled by assignment."""
    settings = source.settings.text
    config = Qwen3VLTextConfig(**_copied(settings))
    config._attn_implementation = "sdpa"
    with torch.device("meta"):
        model = Qwen3VLTextModel(config)
    # its frequencies are a buffer that no checkpoint holds: computed again, where there is memory behind it
    model.rotary_emb = Qwen3VLTextRotaryEmbedding(config).to(device)
    for name in text_shapes(settings):
        module, _, leaf = name.rpartition(".")
        parameter = torch.nn.Parameter(_placed(source, LANGUAGE + name, dtype, device), requires_grad=False)
        setattr(model.get_submodule(module), leaf, parameter)
    left = [name for name, tensor in [*model.named_parameters(), *model.named_buffers()] if tensor.is_meta]
    assert not left, f"no weights for {left}"
    model.train(False)
    return model


def _copied(settings: dict[str, Any]) -> dict[str, Any]:
    """transformers' configs write into the dicts that they are given."""
    return {key: dict(value) if isinstance(value, dict) else value for key, value in settings.items()}
