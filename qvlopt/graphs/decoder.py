"""The language model as one ONNX graph for prefill, chunks of it and single steps, over key-value buffers that stay in place.

M-RoPE needs no operator of its own: which of the three positions turns a frequency is fixed, so the angles are one
product of the positions with a matrix [3, head_dim / 2] that holds each frequency in the row of its axis. The product
adds zeros only and is exact. DeepStack features come in dense, zeros on text, and are added after the first layers.
After the last attention only the rows whose logits are asked for go on. Letters in shapes as in `names`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLTextConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextRotaryEmbedding

from qvlopt.graphs import names
from qvlopt.graphs.weights import Linear, Weights
from qvlopt.graphs.writer import FLOAT, INT32, INT64, GraphWriter
from qvlopt.model.names import LANGUAGE, LM_HEAD

_ACTIVATIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "silu": ("QuickGelu", {"alpha": 1.0}),  # x * sigmoid(alpha * x)
    "gelu": ("Gelu", {}),
    "gelu_pytorch_tanh": ("FastGelu", {}),
}


def build_decoder(graph: GraphWriter, settings: Mapping[str, Any], taps: int, weights: Weights, linear: Linear) -> None:
    """Adds the language model and its head. `settings` is `ModelConfig.text`, `taps` the number of DeepStack features."""
    _Decoder(graph, settings, taps, weights, linear).build()


def rotary_matrix(settings: Mapping[str, Any]) -> tuple[np.ndarray, float]:
    """float32 [3, head_dim / 2] that turns positions (time, row, column) into angles, and what cosine and sine are multiplied by.

    Qwen3-VL interleaves (modeling_qwen3_vl.py, apply_interleaved_mrope): frequency j belongs to row or column where
    j % 3 is 1 or 2 and j < 3 * that axis's section, else to time.
    """
    copied = {key: dict(value) if isinstance(value, dict) else value for key, value in settings.items()}
    rotary = Qwen3VLTextRotaryEmbedding(Qwen3VLTextConfig(**copied))
    frequencies = rotary.inv_freq.float().numpy()
    sections = settings["rope_parameters"]["mrope_section"]
    index = np.arange(len(frequencies))
    axis = np.where((index % 3 > 0) & (index < 3 * np.array(sections)[index % 3]), index % 3, 0)
    matrix = np.zeros((3, len(frequencies)), dtype=np.float32)
    matrix[axis, index] = frequencies
    return matrix, float(rotary.attention_scaling)


class _Decoder:
    def __init__(self, graph: GraphWriter, settings: Mapping[str, Any], taps: int, weights: Weights, linear: Linear) -> None:
        self.graph, self.settings, self.weights, self.linear = graph, settings, weights, linear
        self.width, self.head_dim = settings["hidden_size"], settings["head_dim"]
        self.heads, self.kv_heads = settings["num_attention_heads"], settings["num_key_value_heads"]
        self.layers = settings["num_hidden_layers"]
        self.taps = taps

    def build(self) -> None:
        graph = self.graph
        x = graph.one("Reshape", graph.input(names.INPUTS_EMBEDS, FLOAT, (1, "new", self.width)), graph.shape(-1, self.width))
        cos, sin = self._angles()
        features = self._deepstack()
        rows = graph.input(names.LOGIT_INDICES, INT64, ("asked",))
        graph.input(names.SEQLENS_K, INT32, (1,))
        graph.input(names.TOTAL_LENGTH, INT32, ())
        y = self._norm("layers.0.input_layernorm", x)
        for index in range(self.layers):
            attended = self._attention(index, y, cos, sin)
            if index == self.layers - 1:
                attended, x = graph.one("Gather", attended, rows), graph.one("Gather", x, rows)
            y, x = self._add_norm(f"layers.{index}.post_attention_layernorm", x, self._linear(f"layers.{index}.self_attn.o_proj", attended))
            change = self._mlp(index, y)
            if index < len(features):
                x = graph.one("Add", x, change)
                change = graph.one("Gather", features[index], rows) if index == self.layers - 1 else features[index]
            y, x = self._add_norm(f"layers.{index + 1}.input_layernorm" if index + 1 < self.layers else "norm", x, change)
        logits = self.linear(graph, [LM_HEAD], y)[0]
        graph.one("Unsqueeze", logits, graph.shape(0), name=names.LOGITS)
        graph.output(names.LOGITS, FLOAT, (1, "asked", self.settings["vocab_size"]))
        for index in range(self.layers):
            for name in (names.present_key(index), names.present_value(index)):
                graph.output(name, FLOAT, (1, self.kv_heads, "capacity", self.head_dim))

    def _angles(self) -> tuple[str, str]:
        """Cosine and sine [S, head_dim / 2] of the new tokens."""
        graph = self.graph
        matrix, scaling = rotary_matrix(self.settings)
        positions = graph.one("Cast", graph.input(names.POSITION_IDS, INT64, (3, 1, "new")), to=FLOAT)
        by_token = graph.one("Transpose", graph.one("Reshape", positions, graph.shape(3, -1)), perm=[1, 0])
        angles = graph.one("MatMul", by_token, graph.constant(matrix))
        cos, sin = graph.one("Cos", angles), graph.one("Sin", angles)
        if scaling == 1.0:
            return cos, sin
        return graph.one("Mul", cos, graph.scalar(scaling)), graph.one("Mul", sin, graph.scalar(scaling))

    def _deepstack(self) -> tuple[str, ...]:
        """The features [S, hidden] to add after each of the first layers."""
        graph = self.graph
        if not self.taps:
            return ()
        dense = graph.input(names.DEEPSTACK_EMBEDS, FLOAT, (self.taps, 1, "new", self.width))
        parts = graph.many("Split", [dense], self.taps, axis=0, num_outputs=self.taps)
        return tuple(graph.one("Reshape", part, graph.shape(-1, self.width)) for part in parts)

    def _attention(self, index: int, y: str, cos: str, sin: str) -> str:
        """Attention over the buffers, new keys and values included: [S, heads * head_dim]."""
        graph, layer = self.graph, f"layers.{index}.self_attn"
        shape = (1, self.kv_heads, "capacity", self.head_dim)
        past = [graph.input(name, FLOAT, shape) for name in (names.past_key(index), names.past_value(index))]
        q, k, v = self.linear(graph, [f"{LANGUAGE}.{layer}.{name}" for name in ("q_proj", "k_proj", "v_proj")], y)
        operands = [
            graph.one("RotaryEmbedding", self._head_norm(f"{layer}.q_norm", q, self.heads), graph.shape(0), cos, sin),
            graph.one("RotaryEmbedding", self._head_norm(f"{layer}.k_norm", k, self.kv_heads), graph.shape(0), cos, sin),
            graph.one("Unsqueeze", v, graph.shape(0)),
        ]
        outputs = [f"{layer}.attended", names.present_key(index), names.present_value(index)]
        graph.many(
            "GroupQueryAttention",
            [*operands, *past, names.SEQLENS_K, names.TOTAL_LENGTH],
            outputs,
            num_heads=self.heads,
            kv_num_heads=self.kv_heads,
        )
        return graph.one("Reshape", outputs[0], graph.shape(-1, self.heads * self.head_dim))

    def _head_norm(self, name: str, x: str, heads: int) -> str:
        """Every head by itself: [S, heads * head_dim] to [1, S, heads * head_dim]."""
        graph = self.graph
        apart = graph.one("Reshape", x, graph.shape(-1, self.head_dim))
        return graph.one("Reshape", self._norm(name, apart), graph.shape(1, -1, heads * self.head_dim))

    def _mlp(self, index: int, y: str) -> str:
        graph, layer = self.graph, f"layers.{index}.mlp"
        gate, up = self.linear(graph, [f"{LANGUAGE}.{layer}.gate_proj", f"{LANGUAGE}.{layer}.up_proj"], y)
        op, attributes = _ACTIVATIONS[self.settings["hidden_act"]]
        return self._linear(f"{layer}.down_proj", graph.one("Mul", graph.one(op, gate, **attributes), up))

    def _linear(self, name: str, x: str) -> str:
        return self.linear(self.graph, [f"{LANGUAGE}.{name}"], x)[0]

    def _norm(self, name: str, x: str) -> str:
        weight = self.graph.weight(f"{LANGUAGE}.{name}.weight", self.weights(f"{LANGUAGE}.{name}.weight"))
        return self.graph.one("SimplifiedLayerNormalization", x, weight, axis=-1, epsilon=self.settings["rms_norm_eps"])

    def _add_norm(self, name: str, x: str, change: str) -> tuple[str, str]:
        """(normalised, sum) of x + change. SkipSimplifiedLayerNormalization does both at once, in twice the time."""
        total = self.graph.one("Add", x, change, name=f"{name}.input")
        return self._norm(name, total), total
