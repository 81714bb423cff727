"""Writes `builtin:nano` as a Hugging Face folder in the spelling that Qwen's own releases use."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping
from typing import Any

import torch
from nano_tokenizer import PLAIN, SPECIAL, build_tokenizer
from safetensors.torch import save_file

SIZE_LIMITS = {"shortest_edge": 1024, "longest_edge": 262144}
"""Smallest and largest number of pixels a picture is resized to: one merged token, and 512 x 512."""

ADDED = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}

CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message['role'] + '\\n' -}}
{%- if message['content'] is string -%}
{{- message['content'] -}}
{%- else -%}
{%- for part in message['content'] -%}
{%- if part['type'] == 'image' or 'image' in part or 'image_url' in part -%}
{{- '<|vision_start|><|image_pad|><|vision_end|>' -}}
{%- elif 'text' in part -%}
{{- part['text'] -}}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""

CARD = """\
---
license: apache-2.0
pipeline_tag: image-text-to-text
library_name: transformers
tags: [qwen3_vl, tiny, test]
---
# nano: a tiny trained checkpoint of the Qwen3-VL architecture

**These are not Qwen's weights.** This checkpoint was trained from random initialisation by `tools/train_nano.py` on
pictures that the same project draws. It exists so that quantisation, export and evaluation can be run and measured
offline, in minutes: random weights cannot show accuracy. It knows nothing beyond the three things below.

It has every organ of Qwen3-VL-2B: patch 16, temporal 2, merge 2, a learned and interpolated position table, vision
rotary embedding, DeepStack taps (after blocks {taps}) into the first language layers, interleaved M-RoPE, q/k norm,
grouped-query attention, tied embeddings, head_dim 64. {parameters:,} parameters ({vision:,} in the vision tower), bfloat16.

| asked | answers |
|---|---|
| `Read the text.` | the drawn word: 1 to 8 capital letters and digits |
| `What colour is the star?`, `How many circles are there?`, `Is there a red square?`, `Which shape is blue?` | one word or number |
| `What is the value of Total?` | the value beside that key on a drawn receipt or table |

Scores on the shipped set `nano-eval` (seeds that training never saw), greedy, float32: see `docs/nano.md`.
"""


def write_checkpoint(folder: pathlib.Path, config: Mapping[str, Any], weights: Mapping[str, torch.Tensor]) -> None:
    """Writes config, bf16 weights, tokenizer, templates and card into `folder`; overwrites what is there."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = build_tokenizer()
    kept = {name: weights[name].to(torch.bfloat16).contiguous() for name in sorted(weights)}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)  # safetensors makes files that only their owner reads
    _write_json(folder / "config.json", config)
    tokenizer.save(str(folder / "tokenizer.json"))
    tokenizer.model.save(str(folder))
    _write_json(folder / "tokenizer_config.json", _tokenizer_config(tokenizer))
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    end, stop = tokenizer.token_to_id("<|endoftext|>"), tokenizer.token_to_id("<|im_end|>")
    _write_json(folder / "generation_config.json", {
        "bos_token_id": end, "pad_token_id": end, "eos_token_id": [stop, end], "do_sample": True, "temperature": 0.7, "top_p": 0.8,
        "top_k": 20, "repetition_penalty": 1.0,
    })  # fmt: skip
    pictures = {
        "size": SIZE_LIMITS, "patch_size": 16, "temporal_patch_size": 2, "merge_size": 2, "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
        "processor_class": "Qwen3VLProcessor",
    }  # fmt: skip
    _write_json(folder / "preprocessor_config.json", {**pictures, "image_processor_type": "Qwen2VLImageProcessor"})
    _write_json(folder / "video_preprocessor_config.json", {**pictures, "video_processor_type": "Qwen3VLVideoProcessor"})
    vision = sum(v.numel() for k, v in kept.items() if k.startswith("model.visual."))
    card = CARD.format(
        taps=", ".join(map(str, config["vision_config"]["deepstack_visual_indexes"])), parameters=sum(v.numel() for v in kept.values()), vision=vision
    )
    (folder / "README.md").write_text(card, encoding="utf-8")


def _tokenizer_config(tokenizer: Any) -> dict[str, Any]:
    added = {str(tokenizer.token_to_id(token)): {**ADDED, "content": token, "special": token in SPECIAL} for token in (*SPECIAL, *PLAIN)}
    return {
        "tokenizer_class": "Qwen2Tokenizer", "add_prefix_space": False, "added_tokens_decoder": added,
        "additional_special_tokens": list(SPECIAL[1:]),
        "bos_token": None, "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "unk_token": None, "errors": "replace",
        "split_special_tokens": False, "clean_up_tokenization_spaces": False, "add_bos_token": False, "model_max_length": 4096,
    }  # fmt: skip


def _write_json(path: pathlib.Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
