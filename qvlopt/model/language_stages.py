"""The language model one part at a time: its embedding, one layer, its head, each read when asked for and dropped after.

Letters in shapes: B rows, T tokens, D hidden width, V vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLTextConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextDecoderLayer, Qwen3VLTextRotaryEmbedding

from qvlopt.model.parameters import read_parameter
from qvlopt.model.shapes import HEAD, LANGUAGE, text_shapes
from qvlopt.model.source import Source

Angles = tuple[torch.Tensor, torch.Tensor]
Layer = Callable[[torch.Tensor, Angles], torch.Tensor]
"""Hidden states [B, T, D] and the angles of their positions to hidden states [B, T, D]; causal, without padding."""


class LanguageStages:
    """Parts of a checkpoint's language model in one dtype on one device. Nothing stays in memory between calls."""

    def __init__(self, source: Source, *, dtype: torch.dtype, device: torch.device) -> None:
        self.source = source
        self.dtype = dtype
        self.device = device
        self.config = Qwen3VLTextConfig(**copy.deepcopy(source.settings.text))
        self.config._attn_implementation = "sdpa"

    @property
    def layers(self) -> int:
        return int(self.config.num_hidden_layers)

    def embed(self, rows: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Embeddings [T, D] of each int64 [T]. The table, the largest tensor there is, is never there in another dtype."""
        table = read_parameter(self.source, LANGUAGE + "embed_tokens.weight")
        return [F.embedding(ids.cpu(), table).to(device=self.device, dtype=self.dtype) for ids in rows]

    def angles(self, positions: torch.Tensor) -> Angles:
        """Cosine and sine [1, T, head_dim] of M-RoPE positions int64 [3, T]."""
        rotary = Qwen3VLTextRotaryEmbedding(self.config).to(self.device)
        cos, sin = rotary(torch.empty(0, dtype=self.dtype, device=self.device), positions[:, None].to(self.device))
        return cos, sin

    def layer(self, index: int, observe: Callable[[str, torch.Tensor], None] | None = None) -> Layer:
        """Layer `index` as transformers computes it. `observe` is told what each linear reads, by name relative to the layer."""
        with torch.device("meta"):
            layer = Qwen3VLTextDecoderLayer(self.config, index)
        start = f"layers.{index}."
        for name in text_shapes(self.source.settings.text):
            if name.startswith(start):
                module, _, leaf = name.removeprefix(start).rpartition(".")
                setattr(layer.get_submodule(module), leaf, torch.nn.Parameter(self._read(name), requires_grad=False))
        layer.train(False)
        if observe is not None:
            for name, module in layer.named_modules():
                if isinstance(module, torch.nn.Linear):
                    module.register_forward_pre_hook(partial(_told, observe, name))

        def run(hidden: torch.Tensor, angles: Angles) -> torch.Tensor:
            output: torch.Tensor = layer(hidden, position_embeddings=angles)
            return output

        return run

    def head(self, vocabulary: int | None = None) -> Callable[[torch.Tensor], torch.Tensor]:
        """The last norm and the head: hidden states [..., D] to logits [..., V]; only of the first `vocabulary` ids where given."""
        norm, eps = self._read("norm.weight"), float(self.config.rms_norm_eps)
        weight = self._read("embed_tokens.weight") if self.source.tied else self._parameter(HEAD)
        weight = weight[:vocabulary]

        def run(hidden: torch.Tensor) -> torch.Tensor:
            return F.linear(F.rms_norm(hidden, (hidden.shape[-1],), norm, eps), weight)

        return run

    def _read(self, name: str) -> torch.Tensor:
        return self._parameter(LANGUAGE + name)

    def _parameter(self, name: str) -> torch.Tensor:
        return read_parameter(self.source, name).to(device=self.device, dtype=self.dtype)


def _told(observe: Callable[[str, torch.Tensor], None], name: str, _module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
    observe(name, inputs[0])
