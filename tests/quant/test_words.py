"""Bits in words, against shifting one number at a time."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qvlopt.quant.words import pack_words, unpack_words


@settings(deadline=None, derandomize=True)
@given(data=st.data(), bits=st.sampled_from([1, 2, 4, 8, 16]), count=st.integers(1, 70))
def test_words_equal_the_slow_reference_and_unpack_to_the_values(data: st.DataObject, bits: int, count: int) -> None:
    values = data.draw(st.lists(st.integers(0, 2**bits - 1), min_size=count, max_size=count))
    expected = [0] * -(-count * bits // 32)
    for index, value in enumerate(values):
        expected[index * bits // 32] |= value << index * bits % 32
    words = pack_words(torch.tensor([values]), bits)
    assert words.dtype == torch.int32
    assert [word % 2**32 for word in words[0].tolist()] == expected
    assert unpack_words(words, bits, count).tolist() == [values]


@pytest.mark.parametrize("value", [-1, 16])
def test_a_value_that_would_spill_into_its_neighbour_is_refused(value: int) -> None:
    with pytest.raises(ValueError, match="0 to 15"):
        pack_words(torch.tensor([[0, value]]), 4)


def test_words_of_another_number_of_values_are_refused() -> None:
    with pytest.raises(ValueError, match="17 values"):
        unpack_words(torch.zeros(1, 2, dtype=torch.int32), 4, 17)


@pytest.mark.parametrize("bits", [0, 3, 64])
def test_bits_that_cross_words_are_refused(bits: int) -> None:
    with pytest.raises(ValueError, match="divisor"):
        pack_words(torch.zeros(1, 8, dtype=torch.int32), bits)
