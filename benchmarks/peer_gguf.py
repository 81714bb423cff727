"""Writes a Qwen3-VL checkpoint folder as llama.cpp's two files, the language model and the tower (its "mmproj"), for `peers.py`.

    peer_gguf.py MODEL TEXT.gguf MMPROJ.gguf [--mmproj-type F16]

Runs in an environment with the package `gguf`. Names and keys are those that llama.cpp reads: `src/models/qwen3vl.cpp`,
`tools/mtmd/clip-impl.h`. The language model keeps its bfloat16. One tensor is in memory at a time. A tied head is left out, and
llama.cpp takes the embedding. Ids that the tokenizer does not know, of which a checkpoint with random weights has many, become
tokens with a text of their own: a server says nothing of tokens without a text, so the first one could not be timed.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

TEXT_NAMES = {
    "embed_tokens": "token_embd", "norm": "output_norm", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip
BLOCK_NAMES = {
    "norm1": "ln1", "norm2": "ln2", "attn.qkv": "attn_qkv", "attn.proj": "attn_out", "mlp.linear_fc1": "ffn_up", "mlp.linear_fc2": "ffn_down",
}  # fmt: skip
MERGER_NAMES = {"norm": "v.post_ln", "linear_fc1": "mm.0", "linear_fc2": "mm.2"}
TAP_NAMES = {"norm": "norm", "linear_fc1": "fc1", "linear_fc2": "fc2"}
PATCHES = "patch_embed.proj.weight"
NORMAL, CONTROL, USER_DEFINED = 1, 3, 4
"""llama.cpp's kinds of tokens."""


class Part(NamedTuple):
    """A tensor to write: its name there, its shape, and the frame of the patch embedding's kernel where it is one."""

    name: str
    shape: tuple[int, ...]
    frame: int | None = None

    @property
    def is_float32(self) -> bool:
        """What llama.cpp computes with as it is: vectors, and what it resizes or convolves."""
        return len(self.shape) == 1 or "embd" in self.name.removeprefix("token_embd")


def text_name(name: str) -> str:
    """The name of a parameter of the language model, given relative to it."""
    name, _, kind = name.rpartition(".")
    if not name.startswith("layers."):
        return f"{TEXT_NAMES[name]}.{kind}"
    _, index, rest = name.split(".", 2)
    return f"blk.{index}.{TEXT_NAMES[rest]}.{kind}"


def vision_parts(name: str, shape: tuple[int, ...], taps: Sequence[int]) -> list[Part]:
    """What a parameter of the tower, named relative to it, becomes: itself by another name, or a kernel of each frame.

    Mergers of DeepStack are named by the block that they follow, not by their place in the list.
    """
    if name == PATCHES:
        frames = {0: "v.patch_embd.weight", 1: "v.patch_embd.weight.1"}
        return [Part(named, (*shape[:2], *shape[3:]), frame) for frame, named in frames.items()]
    name, _, kind = name.rpartition(".")
    if name.startswith("blocks."):
        _, index, rest = name.split(".", 2)
        named = f"v.blk.{index}.{BLOCK_NAMES[rest]}"
    elif name.startswith("deepstack_merger_list."):
        _, place, rest = name.split(".", 2)
        named = f"v.deepstack.{taps[int(place)]}.{TAP_NAMES[rest]}"
    elif name.startswith("merger."):
        named = MERGER_NAMES[name.removeprefix("merger.")]
    else:
        named = {"patch_embed.proj": "v.patch_embd", "pos_embed": "v.position_embd"}[name]
    return [Part(f"{named}.{kind}", shape)]


def vocabulary(tokenizer: Mapping[str, Any], size: int) -> tuple[list[str], list[int]]:
    """Texts and kinds of `size` tokens from a tokenizer.json."""
    texts = [f"[{index}]" for index in range(size)]
    kinds = [NORMAL] * size
    for text, index in tokenizer["model"]["vocab"].items():
        texts[index] = text
    for added in tokenizer["added_tokens"]:
        texts[added["id"]] = added["content"]
        kinds[added["id"]] = CONTROL if added["special"] else USER_DEFINED
    return texts, kinds


def describe_text(writer: Any, config: Mapping[str, Any]) -> None:
    """What llama.cpp has to know of the language model; M-RoPE has a fourth section, which is empty."""
    text = config["text_config"]
    rope = text.get("rope_parameters") or {**text["rope_scaling"], "rope_theta": text["rope_theta"]}
    writer.add_vocab_size(text["vocab_size"])
    writer.add_block_count(text["num_hidden_layers"])
    writer.add_context_length(text["max_position_embeddings"])
    writer.add_embedding_length(text["hidden_size"])
    writer.add_feed_forward_length(text["intermediate_size"])
    writer.add_head_count(text["num_attention_heads"])
    writer.add_head_count_kv(text["num_key_value_heads"])
    writer.add_key_length(text["head_dim"])
    writer.add_value_length(text["head_dim"])
    writer.add_layer_norm_rms_eps(text["rms_norm_eps"])
    writer.add_rope_freq_base(float(rope["rope_theta"]))
    writer.add_rope_dimension_sections([*rope["mrope_section"], 0])
    writer.add_num_deepstack_layers(len(config["vision_config"]["deepstack_visual_indexes"]))


def describe_vision(writer: Any, config: Mapping[str, Any], pictures: Mapping[str, Any]) -> None:
    """What it has to know of the tower; its norms' epsilon is 1e-6 in Qwen3-VL's code and not in its config."""
    vision = config["vision_config"]
    writer.add_clip_has_vision_encoder(True)
    writer.add_clip_projector_type("qwen3vl_merger")
    writer.add_vision_projection_dim(config["text_config"]["hidden_size"])
    writer.add_vision_image_size(round(vision["num_position_embeddings"] ** 0.5) * vision["patch_size"])
    writer.add_vision_patch_size(vision["patch_size"])
    writer.add_vision_embedding_length(vision["hidden_size"])
    writer.add_vision_feed_forward_length(vision["intermediate_size"])
    writer.add_vision_block_count(vision["depth"])
    writer.add_vision_head_count(vision["num_heads"])
    writer.add_vision_attention_layernorm_eps(1e-6)
    writer.add_vision_use_gelu(True)
    writer.add_vision_spatial_merge_size(vision["spatial_merge_size"])
    writer.add_vision_image_mean(pictures["image_mean"])
    writer.add_vision_image_std(pictures["image_std"])
    writer.add_vision_is_deepstack_layers([index in vision["deepstack_visual_indexes"] for index in range(vision["depth"])])


def stored_tensors(model: Path) -> dict[str, Any]:
    """Every tensor of the folder's safetensors files by its name, not read yet."""
    from gguf.utility import SafetensorsLocal

    return {name: tensor for path in sorted(model.glob("*.safetensors")) for name, tensor in SafetensorsLocal(path).tensors.items()}


def values(tensor: Any) -> np.ndarray:
    """A stored bfloat16 tensor in float32."""
    stored: np.ndarray = tensor.mmap_bytes().view(np.uint16)
    return (stored.astype(np.uint32) << 16).view(np.float32).reshape(tensor.shape)


def write(writer: Any, path: Path, parts: Sequence[tuple[Any, Part]], dtype: str) -> None:
    """Writes tensor by tensor; what is no vector becomes `dtype`."""
    import gguf

    kinds = [gguf.GGMLQuantizationType["F32" if part.is_float32 else dtype] for _, part in parts]
    for (_, part), kind in zip(parts, kinds, strict=True):
        block, size = gguf.GGML_QUANT_SIZES[kind]
        writer.add_tensor_info(part.name, part.shape, np.dtype(np.float32), int(np.prod(part.shape)) // block * size, raw_dtype=kind)
    writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{dtype}"])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.write_header_to_file(path)
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for (tensor, part), kind in zip(parts, kinds, strict=True):
        if kind == gguf.GGMLQuantizationType.BF16:
            writer.write_tensor_data(tensor.mmap_bytes())
            continue
        read = values(tensor)
        writer.write_tensor_data(gguf.quants.quantize(np.ascontiguousarray(read if part.frame is None else read[:, :, part.frame]), kind))
    writer.close()


def write_text(model: Path, path: Path, tensors: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    import gguf

    writer = gguf.GGUFWriter(path, "qwen3vl")
    describe_text(writer, config)
    texts, kinds = vocabulary(json.loads((model / "tokenizer.json").read_text(encoding="utf-8")), config["text_config"]["vocab_size"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(texts)
    writer.add_token_types(kinds)
    gguf.SpecialVocab(model, load_merges=True).add_to_gguf(writer, quiet=True)
    prefix = "model.language_model."
    parts = [(tensor, Part(text_name(name.removeprefix(prefix)), tensor.shape)) for name, tensor in tensors.items() if name.startswith(prefix)]
    if "lm_head.weight" in tensors and not config.get("tie_word_embeddings"):
        parts.append((tensors["lm_head.weight"], Part("output.weight", tensors["lm_head.weight"].shape)))
    write(writer, path, parts, "BF16")


def write_vision(model: Path, path: Path, tensors: Mapping[str, Any], config: Mapping[str, Any], dtype: str) -> None:
    import gguf

    writer = gguf.GGUFWriter(path, "clip")
    writer.add_type("mmproj")
    describe_vision(writer, config, json.loads((model / "preprocessor_config.json").read_text(encoding="utf-8")))
    taps, prefix = config["vision_config"]["deepstack_visual_indexes"], "model.visual."
    parts = [
        (tensor, part)
        for name, tensor in tensors.items()
        if name.startswith(prefix)
        for part in vision_parts(name.removeprefix(prefix), tensor.shape, taps)
    ]
    write(writer, path, parts, dtype)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("model", "text", "mmproj"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--mmproj-type", default="F16", choices=("BF16", "F16", "Q8_0"))
    asked = parser.parse_args()
    tensors = stored_tensors(asked.model)
    config = json.loads((asked.model / "config.json").read_text(encoding="utf-8"))
    write_text(asked.model, asked.text, tensors, config)
    write_vision(asked.model, asked.mmproj, tensors, config, asked.mmproj_type)


if __name__ == "__main__":
    main()
