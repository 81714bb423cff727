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

from qvlopt.model.load_tower import load_vision
from qvlopt.model.parameters import place_parameter
from qvlopt.model.shapes import HEAD, LANGUAGE, text_shapes
from qvlopt.model.source import Source
from qvlopt.model.vision import VisionTower


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
        head=text.embed_tokens.weight if source.tied else place_parameter(source, HEAD, dtype, place),
        image_token_id=source.settings.image_token_id,
        dtype=dtype,
        device=place,
    )


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
        parameter = torch.nn.Parameter(place_parameter(source, LANGUAGE + name, dtype, device), requires_grad=False)
        setattr(model.get_submodule(module), leaf, parameter)
    left = [name for name, tensor in [*model.named_parameters(), *model.named_buffers()] if tensor.is_meta]
    assert not left, f"no weights for {left}"
    model.train(False)
    return model


def _copied(settings: dict[str, Any]) -> dict[str, Any]:
    """transformers' configs write into the dicts that they are given."""
    return {key: dict(value) if isinstance(value, dict) else value for key, value in settings.items()}
