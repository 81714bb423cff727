"""One buffer for past and present: it grows in steps, keeps what is in it, and notices a copy."""

from __future__ import annotations

import numpy as np
import onnxruntime as ort
import pytest

from qvlopt.errors import RunError
from qvlopt.runtime.kv_cache import STEP, KvCache


def filled(length: int) -> KvCache:
    cache = KvCache(2, 3, 4)
    cache.start(length)
    cache.length = length
    cache.array[:, :, :, :, :length] = np.random.default_rng(0).normal(size=(2, 2, 1, 3, length, 4))
    return cache


def test_the_values_are_the_arrays_own_memory_in_order() -> None:
    cache = KvCache(2, 3, 4)
    bound = list(cache.bound())
    assert [(layer, what) for layer, what, _ in bound] == [(0, "key"), (0, "value"), (1, "key"), (1, "value")]
    cache.array[1, 0, 0, 2, 5, 3] = 7
    assert [float(value.numpy().sum()) for *_, value in bound] == [0, 0, 7, 0]
    assert all(value.shape() == [1, 3, STEP, 4] for *_, value in bound)


def test_growing_keeps_what_is_in_it_and_goes_by_steps() -> None:
    cache = filled(300)
    before, version = cache.snapshot(300), cache.version
    cache.reserve(STEP)
    assert (cache.capacity, cache.version) == (STEP, version)
    cache.reserve(STEP + 1)
    assert cache.capacity == 2 * STEP
    assert cache.version > version
    assert np.array_equal(cache.snapshot(300), before)
    assert not cache.array[:, :, :, :, 300:].any()
    assert cache.length == 300
    assert [value.shape()[2] for *_, value in cache.bound()] == [2 * STEP] * 4


def test_a_snapshot_is_a_copy_and_restores_to_the_bit_in_another_capacity() -> None:
    cache = filled(20)
    snapshot = cache.snapshot(11)
    assert snapshot.nbytes == 11 * cache.token_bytes
    cache.array[:] = 9
    cache.start(3 * STEP)
    cache.restore(snapshot)
    assert (cache.length, cache.capacity) == (11, 3 * STEP)
    assert np.array_equal(cache.snapshot(11), snapshot)
    with pytest.raises(AssertionError):
        cache.snapshot(12)


def test_a_new_sequence_keeps_the_buffer_unless_it_is_far_too_large() -> None:
    cache = filled(3 * STEP)
    version = cache.version
    cache.start(STEP - 1)
    assert (cache.length, cache.capacity, cache.version) == (0, 3 * STEP, version)
    cache.start(5 * STEP)
    cache.start(STEP)
    assert cache.capacity == STEP


def test_a_present_that_is_not_the_past_is_refused() -> None:
    cache = filled(4)
    own = [value for *_, value in cache.bound()]
    cache.check_in_place(own)
    copied = [*own[:3], ort.OrtValue.ortvalue_from_numpy(own[3].numpy().copy())]
    with pytest.raises(RunError, match="copies the values of layer 1"):
        cache.check_in_place(copied)
    with pytest.raises(ValueError, match="shorter"):
        cache.check_in_place(own[:3])
