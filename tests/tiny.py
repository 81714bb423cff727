"""Seeded random Qwen3-VL checkpoints of any shape, a few hundred kilobytes each, built in milliseconds.

A tensor's values depend on the seed and its canonical name alone, so that tied, sharded and old-prefix variants hold the
same numbers, and every value is exact in bfloat16, so that float32 and bfloat16 saves are the same model. Biases and norms
are not trivial. Written with `safetensors` itself, as an independent check of the package's own reader.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from functools import cache
from itertools import product
from math import prod, sqrt
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

QWEN_SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
"""Qwen2's pre-tokenizer pattern (transformers, tokenization_qwen2.py: PRETOKENIZE_REGEX)."""

SPECIAL = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>", "<|box_end|>",
    "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>",
)  # fmt: skip
"""Qwen's special tokens in its order."""

CHAT_TEMPLATE = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.content is string %}
        {{- message.content }}
    {%- else %}
        {%- for part in message.content %}
            {%- if part.type == 'image' or 'image' in part or 'image_url' in part %}
                {{- '<|vision_start|><|image_pad|><|vision_end|>' }}
            {%- elif part.type == 'video' or 'video' in part %}
                {{- '<|vision_start|><|video_pad|><|vision_end|>' }}
            {%- elif 'text' in part %}
                {{- part.text }}
            {%- endif %}
        {%- endfor %}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
"""A chat template of the form that Qwen3-VL ships, without tools."""

Dtype = Literal["bfloat16", "float16", "float32", "float8", "float8_vision"]


def build_tiny(
    folder: Path,
    *,
    seed: int = 0,
    tied: bool = True,
    shards: int = 1,
    old_prefix: bool = False,
    dtype: Dtype = "bfloat16",
    vision: Mapping[str, Any] | None = None,
    text: Mapping[str, Any] | None = None,
) -> Path:
    """Writes a checkpoint folder and returns it; `vision` and `text` override keys of the two sub-configs.

    `old_prefix` names tensors as Qwen2-VL-era checkpoints do (`visual.*`, `model.layers.*`). `float8` stores the language
    model's linear layers as float8_e4m3fn with `weight_scale_inv` of 128x128 blocks and the rest in bfloat16, as Qwen's FP8
    releases do; `float8_vision` stores the tower's linear layers so too.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    config = tiny_config(tied=tied, dtype=dtype, vision=vision, text=text)
    tensors = tiny_tensors(config, seed=seed)
    stored = _stored(tensors, dtype)
    if old_prefix:
        stored = {name.replace("model.visual.", "visual.").replace("model.language_model.", "model."): tensor for name, tensor in stored.items()}
    _write_weights(folder, stored, shards)
    _write_json(folder / "config.json", config)
    _write_tokenizer(folder)
    _write_settings(folder, config)
    return folder


def tiny_config(
    *, tied: bool = True, dtype: Dtype = "bfloat16", vision: Mapping[str, Any] | None = None, text: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """config.json as Qwen ships it (transformers 4.57 spelling: rope_theta and rope_scaling)."""
    tokenizer = tiny_tokenizer()
    kept = "bfloat16" if dtype.startswith("float8") else dtype
    text_config = _text_config(text or {}, dtype=kept, tied=tied)
    config: dict[str, Any] = {
        "architectures": ["Qwen3VLForConditionalGeneration"], "model_type": "qwen3_vl", "image_token_id": tokenizer.token_to_id("<|image_pad|>"),
        "video_token_id": tokenizer.token_to_id("<|video_pad|>"), "vision_start_token_id": tokenizer.token_to_id("<|vision_start|>"),
        "vision_end_token_id": tokenizer.token_to_id("<|vision_end|>"), "text_config": text_config, "tie_word_embeddings": tied,
        "transformers_version": "4.57.0.dev0", "vision_config": _vision_config(vision or {}, out_hidden_size=text_config["hidden_size"]),
    }  # fmt: skip
    if dtype.startswith("float8"):
        tower = [name.removesuffix(".weight") for name in _vision_shapes(config["vision_config"]) if _is_linear(name)]
        config["quantization_config"] = {
            "activation_scheme": "dynamic", "fmt": "e4m3", "modules_to_not_convert": ["lm_head", *(tower if dtype == "float8" else [])],
            "quant_method": "fp8", "weight_block_size": [128, 128],
        }  # fmt: skip
    return config


def tiny_tensors(config: Mapping[str, Any], *, seed: int = 0) -> dict[str, torch.Tensor]:
    """Every tensor by its canonical name (`model.visual.*`, `model.language_model.*`, `lm_head.weight` unless tied), float32."""
    return {name: _random(name, shape, seed) for name, shape in tensor_shapes(config).items()}


def tensor_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Canonical names and shapes, in the order of the modules."""
    shapes = {**_vision_shapes(config["vision_config"]), **_text_shapes(config["text_config"])}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = shapes["model.language_model.embed_tokens.weight"]
    return shapes


@cache
def tiny_tokenizer() -> Tokenizer:
    """A byte-level BPE in Qwen2 form: 256 bytes, a few merges, Qwen's special tokens at the end."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(QWEN_SPLIT), behavior="isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(vocab_size=320, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False)
    corpus = ["What is the colour of the text in this picture?", "How many shapes are there?", "user\nassistant\nsystem\n"]
    tokenizer.train_from_iterator(corpus * 4, trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    return tokenizer


def _text_config(overrides: Mapping[str, Any], *, dtype: str, tied: bool) -> dict[str, Any]:
    tokenizer = tiny_tokenizer()
    config: dict[str, Any] = {
        "model_type": "qwen3_vl_text", "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": tokenizer.token_to_id("<|endoftext|>"),
        "eos_token_id": tokenizer.token_to_id("<|im_end|>"), "dtype": dtype, "head_dim": 32, "hidden_act": "silu", "hidden_size": 128,
        "initializer_range": 0.02, "intermediate_size": 256, "max_position_embeddings": 4096, "num_attention_heads": 4, "num_hidden_layers": 2,
        "num_key_value_heads": 2, "rms_norm_eps": 1e-06, "rope_theta": 5000000, "tie_word_embeddings": tied, "use_cache": True,
        "vocab_size": -(-tokenizer.get_vocab_size() // 64) * 64, **overrides,
    }  # fmt: skip
    half = config["head_dim"] // 2
    side = half * 5 // 16
    config.setdefault("rope_scaling", {"mrope_interleaved": True, "mrope_section": [half - 2 * side, side, side], "rope_type": "default"})
    return config


def _vision_config(overrides: Mapping[str, Any], *, out_hidden_size: int) -> dict[str, Any]:
    config: dict[str, Any] = {
        "model_type": "qwen3_vl", "depth": 2, "hidden_act": "gelu_pytorch_tanh", "hidden_size": 128, "in_channels": 3, "initializer_range": 0.02,
        "intermediate_size": 256, "num_heads": 2, "num_position_embeddings": 16, "out_hidden_size": out_hidden_size, "patch_size": 16,
        "spatial_merge_size": 2, "temporal_patch_size": 2, **overrides,
    }  # fmt: skip
    config.setdefault("deepstack_visual_indexes", list(range(min(2, config["depth"]))))
    return config


def _vision_shapes(c: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    width, inner, merged = c["hidden_size"], c["intermediate_size"], c["hidden_size"] * c["spatial_merge_size"] ** 2
    shapes: dict[str, tuple[int, ...]] = {
        "patch_embed.proj.weight": (width, c["in_channels"], c["temporal_patch_size"], c["patch_size"], c["patch_size"]),
        "patch_embed.proj.bias": (width,),
        "pos_embed.weight": (c["num_position_embeddings"], width),
    }
    for i in range(c["depth"]):
        for norm in ("norm1", "norm2"):
            shapes |= {f"blocks.{i}.{norm}.weight": (width,), f"blocks.{i}.{norm}.bias": (width,)}
        layers = {"attn.qkv": (3 * width, width), "attn.proj": (width, width), "mlp.linear_fc1": (inner, width), "mlp.linear_fc2": (width, inner)}
        for layer, (rows, columns) in layers.items():
            shapes |= {f"blocks.{i}.{layer}.weight": (rows, columns), f"blocks.{i}.{layer}.bias": (rows,)}
    mergers = [("merger", width)] + [(f"deepstack_merger_list.{i}", merged) for i in range(len(c["deepstack_visual_indexes"]))]
    for merger, norm_width in mergers:
        shapes |= {f"{merger}.norm.weight": (norm_width,), f"{merger}.norm.bias": (norm_width,)}
        shapes |= {f"{merger}.linear_fc1.weight": (merged, merged), f"{merger}.linear_fc1.bias": (merged,)}
        shapes |= {f"{merger}.linear_fc2.weight": (c["out_hidden_size"], merged), f"{merger}.linear_fc2.bias": (c["out_hidden_size"],)}
    return {f"model.visual.{name}": shape for name, shape in shapes.items()}


def _text_shapes(c: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    width, inner, head = c["hidden_size"], c["intermediate_size"], c["head_dim"]
    queries, keys = c["num_attention_heads"] * head, c["num_key_value_heads"] * head
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens.weight": (c["vocab_size"], width), "norm.weight": (width,)}
    for i in range(c["num_hidden_layers"]):
        layer = {
            "input_layernorm": (width,), "post_attention_layernorm": (width,), "self_attn.q_norm": (head,), "self_attn.k_norm": (head,),
            "self_attn.q_proj": (queries, width), "self_attn.k_proj": (keys, width), "self_attn.v_proj": (keys, width),
            "self_attn.o_proj": (width, queries), "mlp.gate_proj": (inner, width), "mlp.up_proj": (inner, width), "mlp.down_proj": (width, inner),
        }  # fmt: skip
        shapes |= {f"layers.{i}.{name}.weight": shape for name, shape in layer.items()}
        if c["attention_bias"]:
            shapes |= {f"layers.{i}.{name}.bias": shape[:1] for name, shape in layer.items() if name.startswith("self_attn") and "proj" in name}
    return {f"model.language_model.{name}": shape for name, shape in shapes.items()}


def _random(name: str, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Values that keep activations near one: norms about 1, weights about 1/sqrt(inputs), biases about 0.1."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:6], "big"))
    values = torch.randn(shape, generator=generator)
    if name.endswith(".bias"):
        values = 0.1 * values
    elif len(shape) == 1:
        values = 1.0 + 0.1 * values
    elif "embed_tokens" in name or "pos_embed" in name or name == "lm_head.weight":
        values = 0.5 * values
    else:
        values = values / sqrt(prod(shape[1:]))
    return values.bfloat16().float()


def _stored(tensors: Mapping[str, torch.Tensor], dtype: Dtype) -> dict[str, torch.Tensor]:
    if not dtype.startswith("float8"):
        return {name: tensor.to(getattr(torch, dtype)) for name, tensor in tensors.items()}
    stored: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if _is_linear(name) and (".visual." not in name or dtype == "float8_vision"):
            stored[name], stored[f"{name}_scale_inv"] = _to_float8(tensor)
        else:
            stored[name] = tensor.bfloat16()
    return stored


def _is_linear(name: str) -> bool:
    """True for weights of the blocks', mergers' and decoder layers' linear layers (not of lm_head, embeddings, norms)."""
    module = name.removesuffix(".weight").rsplit(".", 1)[-1]
    return name.endswith(".weight") and (module in {"qkv", "linear_fc1", "linear_fc2"} or (module.endswith("proj") and "patch_embed" not in name))


def _to_float8(weight: torch.Tensor, block: int = 128) -> tuple[torch.Tensor, torch.Tensor]:
    """`weight` [N, K] as float8_e4m3fn and its bfloat16 scale [ceil(N/128), ceil(K/128)]; value = stored * scale."""
    rows, columns = weight.shape
    scale = torch.ones(-(-rows // block), -(-columns // block))
    for i, j in product(*map(range, scale.shape)):
        scale[i, j] = weight[i * block : (i + 1) * block, j * block : (j + 1) * block].abs().max() / 448.0
    scale = scale.clamp_min(1e-12).bfloat16()
    spread = scale.float().repeat_interleave(block, 0)[:rows].repeat_interleave(block, 1)[:, :columns]
    return (weight / spread).clamp(-448.0, 448.0).to(torch.float8_e4m3fn), scale


def _write_weights(folder: Path, stored: Mapping[str, torch.Tensor], shards: int) -> None:
    if shards == 1:
        save_file(dict(stored), folder / "model.safetensors", metadata={"format": "pt"})
        return
    names = list(stored)
    weight_map: dict[str, str] = {}
    for i in range(shards):
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        part = names[len(names) * i // shards : len(names) * (i + 1) // shards]
        save_file({name: stored[name] for name in part}, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    total = sum(tensor.nbytes for tensor in stored.values())
    _write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map})


def _write_tokenizer(folder: Path) -> None:
    """tokenizer.json, the older vocab.json and merges.txt, and the settings, as Qwen's repositories hold them."""
    tokenizer = tiny_tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    model = json.loads(tokenizer.to_str())["model"]
    _write_json(folder / "vocab.json", model["vocab"])
    (folder / "merges.txt").write_text("".join(" ".join(pair) + "\n" for pair in model["merges"]), encoding="utf-8")
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
    added = {str(tokenizer.token_to_id(token)): {"content": token, **flags} for token in SPECIAL}
    settings = {
        "add_bos_token": False, "add_prefix_space": False, "added_tokens_decoder": added, "additional_special_tokens": list(SPECIAL[1:]),
        "bos_token": None, "clean_up_tokenization_spaces": False, "eos_token": "<|im_end|>", "errors": "replace", "model_max_length": 4096,
        "pad_token": "<|endoftext|>", "split_special_tokens": False, "tokenizer_class": "Qwen2Tokenizer", "unk_token": None,
    }  # fmt: skip
    _write_json(folder / "tokenizer_config.json", settings)
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")


def _write_settings(folder: Path, config: Mapping[str, Any]) -> None:
    """Preprocessor settings (one merged token to 512x512 pixels) and sampling settings that a tool must not obey."""
    vision = config["vision_config"]
    pixels = {"longest_edge": 512 * 512, "shortest_edge": 32 * 32}
    shared = {
        "size": pixels, "patch_size": vision["patch_size"], "temporal_patch_size": vision["temporal_patch_size"],
        "merge_size": vision["spatial_merge_size"],
        "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5], "processor_class": "Qwen3VLProcessor",
    }  # fmt: skip
    _write_json(folder / "preprocessor_config.json", {**shared, "image_processor_type": "Qwen2VLImageProcessorFast"})
    _write_json(folder / "video_preprocessor_config.json", {**shared, "video_processor_type": "Qwen3VLVideoProcessor"})
    end, text_end = config["text_config"]["eos_token_id"], config["text_config"]["bos_token_id"]
    generation = {
        "bos_token_id": text_end, "do_sample": True, "eos_token_id": [end, text_end], "pad_token_id": text_end, "repetition_penalty": 1.0,
        "temperature": 0.7, "top_k": 20, "top_p": 0.8,
    }  # fmt: skip
    _write_json(folder / "generation_config.json", generation)


def _write_json(path: Path, fields: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(fields, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
