"""The tokenizer of `builtin:nano`: byte-level BPE in Qwen2 form, trained on the questions it will be asked.

No merge joins two capital letters or a digit to anything, so that texts and codes stay one token a character.
"""

from __future__ import annotations

from nano_scenes import COLOURS, KEYS, OCR_QUESTIONS, SHAPES
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

QWEN_SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
"""Qwen2's pre-tokenizer pattern (transformers, tokenization_qwen2.py: PRETOKENIZE_REGEX)."""

SPECIAL = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>", "<|box_end|>",
    "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>",
)  # fmt: skip
"""Qwen's own special tokens, in its order."""
PLAIN = (
    "<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>",
    "<tool_response>", "</tool_response>", "<think>", "</think>",
)  # fmt: skip
"""Qwen's added tokens that are not special."""


def corpus() -> list[str]:
    """Every question in every form, each key and answer word, and some English so that other prompts stay short."""
    lines = [*OCR_QUESTIONS, "How many shapes are there?", "user\n", "assistant\n", "system\nYou are a helpful assistant."]
    for shape in SHAPES:
        lines += [f"What colour is the {shape}?", f"How many {shape}s are there?", f"Is there a {shape}?", shape]
        lines += [f"Is there a {colour} {shape}?" for colour in COLOURS]
    lines += [f"Which shape is {colour}?" for colour in COLOURS] + list(COLOURS) + ["How many crosses are there?", "yes", "no"]
    lines += [f"What is the value of {key}?" for key in KEYS]
    lines += ["Describe the image in detail.", "Answer the question using a single word or phrase.", "What is in the picture?"]
    return lines * 4


def build_tokenizer() -> Tokenizer:
    """A deterministic tokenizer: 256 bytes, the merges that the corpus gives, Qwen's added tokens at the end."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=False))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(QWEN_SPLIT), behavior="isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(vocab_size=700, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False)
    tokenizer.train_from_iterator(corpus(), trainer)
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in PLAIN])
    return tokenizer


def chat_ids(tokenizer: Tokenizer, turns: list[tuple[str, str]], image_tokens: int) -> tuple[list[int], list[bool]]:
    """Token ids of a conversation about one picture, and which of them are answers (with their `<|im_end|>`)."""

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False).ids)

    picture = encode("<|vision_start|>") + [tokenizer.token_to_id("<|image_pad|>")] * image_tokens + encode("<|vision_end|>")
    ids: list[int] = []
    learn: list[bool] = []
    for i, (question, answer) in enumerate(turns):
        asked = encode("<|im_start|>user\n") + (picture if i == 0 else []) + encode(f"{question}<|im_end|>\n<|im_start|>assistant\n")
        said = encode(answer) + encode("<|im_end|>")
        after = encode("\n")
        ids += asked + said + after
        learn += [False] * len(asked) + [True] * len(said) + [False] * len(after)
    return ids, learn
