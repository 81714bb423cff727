"""Files of an ONNX artifact, and the names of every tensor that goes in and out of its graphs.

Letters in shapes: N patches and M = N / merge**2 tokens of one picture; S new tokens, K of them with logits; C the
capacity of the key-value buffers; `taps` the number of DeepStack features. Everything is float32 unless it says otherwise.
"""

from __future__ import annotations

VISION_GRAPH = "vision.onnx"
"""One picture a run: PIXEL_VALUES, POS_EMBEDS, ROPE_COS, ROPE_SIN in; IMAGE_EMBEDS, DEEPSTACK out."""
DECODER_GRAPH = "decoder.onnx"
"""Prefill, chunks of it, and single steps: all the names below in; LOGITS and the present keys and values out."""
DECODE_GRAPH = "decode.onnx"
"""Optional: a twin of DECODER_GRAPH with the same inputs and outputs, faster for steps of one token."""
TABLES = "tables.safetensors"
"""What the host looks up: EMBED_TABLE, perhaps EMBED_SCALE, and POS_TABLE."""

EMBED_TABLE = "embed_tokens.weight"
"""[vocab, hidden] in bf16, f16 or f32; or u8 holding 128 + q, with q times its EMBED_SCALE being the value."""
EMBED_SCALE = "embed_tokens.scale"
"""[vocab, hidden / block]: the scale of each block of columns of a u8 EMBED_TABLE."""
POS_TABLE = "pos_embed.weight"
"""[side * side, D]: the learned position table, which the host resamples to each grid."""

PIXEL_VALUES = "pixel_values"
"""[N, patch_dim], in the processor's order: merge x merge blocks, row by row."""
POS_EMBEDS = "pos_embeds"
"""[N, D]: POS_TABLE resampled to the grid, in the order of PIXEL_VALUES (`model.vision.position_embedding`)."""
ROPE_COS, ROPE_SIN = "rope_cos", "rope_sin"
"""[N, head_dim / 2] each: the first half of the columns of `model.vision.rotary`; the second half is equal."""
IMAGE_EMBEDS = "image_embeds"
"""[M, hidden]"""
DEEPSTACK = "deepstack"
"""[taps, M, hidden], from the first tapped block to the last. Absent where the model has no taps."""

INPUTS_EMBEDS = "inputs_embeds"
"""[1, S, hidden]"""
POSITION_IDS = "position_ids"
"""int64 [3, 1, S]: time, row, column (`model.positions`)."""
DEEPSTACK_EMBEDS = "deepstack_embeds"
"""[taps, 1, S, hidden]: zeros on tokens that are no picture's. Absent where the model has no taps."""
LOGIT_INDICES = "logit_indices"
"""int64 [K], rows of the S new tokens; K may be 0."""
SEQLENS_K = "seqlens_k"
"""int32 [1]: tokens in the buffers after this run, minus one."""
TOTAL_LENGTH = "total_sequence_length"
"""int32 []: tokens in the buffers after this run."""
LOGITS = "logits"
"""[1, K, vocab]"""


def past_key(layer: int) -> str:
    """[1, kv_heads, C, head_dim]. Bound to the same memory as `present_key`, it is filled in place."""
    return f"past_key_values.{layer}.key"


def past_value(layer: int) -> str:
    """As `past_key`."""
    return f"past_key_values.{layer}.value"


def present_key(layer: int) -> str:
    """[1, kv_heads, C, head_dim]"""
    return f"present.{layer}.key"


def present_value(layer: int) -> str:
    """As `present_key`."""
    return f"present.{layer}.value"


def data_file(graph: str) -> str:
    """The file beside a graph that holds its weights."""
    return f"{graph}.data"
