"""Small unsigned integers in 32-bit words, the lowest bits first: what both checkpoint formats are made of."""

from __future__ import annotations

import torch

WORD = 32


def pack_words(values: torch.Tensor, bits: int) -> torch.Tensor:
    """`values` [..., M] in 0..2**bits-1 as int32 [..., ceil(M * bits / 32)]: value i of a word in its bits i*bits and up.

    bits must divide 32, so that no value crosses a word. The last word is filled up with zeros.
    Raises ValueError on a value out of range: it would spill into its neighbour.
    """
    per_word = _values_per_word(bits)
    if values.numel() and not 0 <= int(values.min()) <= int(values.max()) < 2**bits:
        raise ValueError(f"values to pack: got {int(values.min())} to {int(values.max())}, expected 0 to {2**bits - 1}")
    padding = -values.shape[-1] % per_word
    padded = torch.nn.functional.pad(values.to(torch.int32), (0, padding))
    lanes = padded.reshape(*values.shape[:-1], -1, per_word)
    # Bit fields do not overlap, so the sum is their union; the top field's sign bit makes the word negative, as it should.
    words: torch.Tensor = torch.bitwise_left_shift(lanes, _shifts(bits, values.device)).sum(-1, dtype=torch.int32)
    return words


def unpack_words(words: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """The first `count` values of int32 `words` [..., W]: int32 [..., count]. Raises ValueError when `count` does not fit."""
    per_word = _values_per_word(bits)
    if words.dtype != torch.int32 or words.shape[-1] != -(-count // per_word):
        raise ValueError(f"packed words: got {words.dtype} {tuple(words.shape)}, expected torch.int32 for {count} values of {bits} bits")
    lanes = torch.bitwise_right_shift(words.unsqueeze(-1), _shifts(bits, words.device)) & (2**bits - 1)
    values: torch.Tensor = lanes.flatten(-2)[..., :count].contiguous()
    return values


def _values_per_word(bits: int) -> int:
    if bits < 1 or WORD % bits:
        raise ValueError(f"bits: got {bits}, expected a divisor of {WORD} so that no value crosses a word")
    return WORD // bits


def _shifts(bits: int, device: torch.device) -> torch.Tensor:
    return torch.arange(0, WORD, bits, dtype=torch.int32, device=device)
