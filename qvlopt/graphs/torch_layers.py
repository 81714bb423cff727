"""The model in torch, one stage in memory at a time, with an eye on what every linear reads: for checks and measurements.

The language model's layers are transformers' own class, so that nothing of the graphs' builder is shared with their check.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLTextConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextDecoderLayer, Qwen3VLTextRotaryEmbedding

from qvlopt.graphs.weights import Weights
from qvlopt.model.names import LANGUAGE, VISION
from qvlopt.model.preprocess import Picture
from qvlopt.model.shapes import HEAD
from qvlopt.model.vision import VisionOutput

Seen = Callable[[str, torch.Tensor], None]
"""Told of a linear, by canonical name, and of its input [T, K]."""
_HEAD_ROWS = 16384
"""Rows of the head that are widened at once."""


class TextInputs(NamedTuple):
    """A prompt as the language model takes it: embeds float32 [S, hidden] with the pictures in place, positions int64 [3, S],
    deepstack float32 [taps, S, hidden], zeros on text."""

    embeds: torch.Tensor
    positions: torch.Tensor
    deepstack: torch.Tensor


class Prompt(NamedTuple):
    """Token ids of a prompt, its M-RoPE positions int64 [3, S], and its pictures in the order of their image tokens."""

    ids: tuple[int, ...]
    positions: torch.Tensor
    pictures: tuple[Picture, ...]


class TowerWeights(dict[str, torch.Tensor]):
    """The tower's parameters in float32 by name relative to it, read when asked for and kept until `clear`."""

    def __init__(self, weights: Weights) -> None:
        super().__init__()
        self._weights = weights

    def __missing__(self, name: str) -> torch.Tensor:
        self[name] = self._weights(f"{VISION}.{name}").float()
        return self[name]


def text_inputs(prompt: Prompt, features: Sequence[VisionOutput], rows: torch.Tensor, image_token_id: int) -> TextInputs:
    """What the language model takes: `rows` float32 [S, hidden] are the ids' embeddings, `features` those of the pictures [1, M, hidden]."""
    is_picture = torch.tensor(prompt.ids) == image_token_id
    embeds = rows.clone()
    taps = len(features[0].deepstack) if features else 0
    deepstack = torch.zeros(taps, *embeds.shape)
    if features:
        embeds[is_picture] = torch.cat([feature.merged[0] for feature in features])
        for tap in range(taps):
            deepstack[tap, is_picture] = torch.cat([feature.deepstack[tap][0] for feature in features])
    return TextInputs(embeds, prompt.positions, deepstack)


class TextLayers:
    """The language model's layers over whole prompts; a layer's weights are dropped with the layer."""

    def __init__(self, settings: Mapping[str, Any], weights: Weights) -> None:
        self.config = Qwen3VLTextConfig(**copy.deepcopy(dict(settings)))
        self.config._attn_implementation = "sdpa"
        self._weights = weights

    def start(self, prompt: TextInputs) -> tuple[torch.Tensor, Any]:
        """Hidden states [1, S, hidden] and the angles of the positions."""
        x = prompt.embeds[None]
        return x, Qwen3VLTextRotaryEmbedding(self.config)(x, prompt.positions[:, None])

    def layer(self, index: int, seen: Seen | None = None) -> Callable[[torch.Tensor, Any, TextInputs], torch.Tensor]:
        """Hidden states after the layer and its DeepStack feature; `seen` is told of every linear."""
        with torch.device("meta"):
            layer = Qwen3VLTextDecoderLayer(self.config, index)
        for name, _ in list(layer.named_parameters()):
            module, _, leaf = name.rpartition(".")
            value = torch.nn.Parameter(self._weights(f"{LANGUAGE}.layers.{index}.{name}").float(), requires_grad=False)
            setattr(layer.get_submodule(module), leaf, value)
        layer.train(False)
        if seen is not None:
            _watch(layer, f"{LANGUAGE}.layers.{index}", seen)

        def run(hidden: torch.Tensor, angles: Any, prompt: TextInputs) -> torch.Tensor:
            output: torch.Tensor = layer(hidden, position_embeddings=angles)
            return output + prompt.deepstack[index] if index < len(prompt.deepstack) else output

        return run

    def normed(self, hidden: torch.Tensor) -> torch.Tensor:
        """What the head reads, [S, hidden]."""
        weight = self._weights(f"{LANGUAGE}.norm.weight").float()
        return F.rms_norm(hidden, (hidden.shape[-1],), weight, self.config.rms_norm_eps)[0]

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """[S, vocab] of the head's input [S, hidden]."""
        return torch.cat([F.linear(x, part.float()) for part in torch.split(self._weights(HEAD), _HEAD_ROWS)], dim=1)


def text_logits(
    settings: Mapping[str, Any], weights: Weights, prompts: Sequence[TextInputs], asked: Sequence[torch.Tensor] | None = None
) -> list[torch.Tensor]:
    """Logits float32 [A, vocab] of the positions `asked` for (a bool [S] a prompt; None: all) of whole prompts. A layer is read once."""
    layers = TextLayers(settings, weights)
    with torch.inference_mode():
        started = [layers.start(prompt) for prompt in prompts]
        hidden = [x for x, _ in started]
        for index in range(layers.config.num_hidden_layers):
            run = layers.layer(index)
            hidden = [run(x, angles, prompt) for x, (_, angles), prompt in zip(hidden, started, prompts, strict=True)]
        normed = [layers.normed(x) for x in hidden]
        return [layers.logits(x if asked is None else x[asked[index]]) for index, x in enumerate(normed)]


def _watch(layer: torch.nn.Module, prefix: str, seen: Seen) -> None:
    def hook(name: str) -> Callable[[torch.nn.Module, tuple[torch.Tensor, ...]], None]:
        return lambda _module, inputs: seen(name, inputs[0].flatten(0, -2))

    for name, module in layer.named_modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(hook(f"{prefix}.{name}"))
