"""Caches hold the bytes they may and no more; the oldest goes first, and under pressure everything."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qvlopt.artifact import process
from qvlopt.runtime import byte_cache
from qvlopt.runtime.byte_cache import ByteCache, cache_limit_bytes, spare_memory_bytes


def roomy() -> int:
    return 1 << 40


@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(0, 60), st.booleans()), max_size=60))
def test_it_is_a_least_recently_used_cache_by_bytes(steps: list[tuple[str, int, bool]]) -> None:
    """Against the plainest model: a list of entries, cut from the front until it fits."""
    cache: ByteCache[int] = ByteCache(100, spare_bytes=roomy)
    model: OrderedDict[str, int] = OrderedDict()
    for key, size, is_read in steps:
        if is_read:
            assert cache.get(key) == model.get(key)
            if key in model:
                model.move_to_end(key)
            continue
        cache.put(key, size, size)
        model.pop(key, None)
        model[key] = size
        while sum(model.values()) > 100:
            model.popitem(last=False)
        assert cache.bytes == sum(model.values()) <= 100
        assert len(cache) == len(model)
    assert all(key in cache for key in model)


def test_what_is_larger_than_the_cache_pushes_nothing_out() -> None:
    cache: ByteCache[str] = ByteCache(10, spare_bytes=roomy)
    cache.put("small", "s", 4)
    cache.put("large", "l", 11)
    assert cache.get("small") == "s"
    assert cache.get("large") is None
    assert (cache.hits, cache.misses) == (1, 1)


def test_pressure_evicts_the_oldest_until_there_is_room_again() -> None:
    cache: ByteCache[str] = ByteCache(100, spare_bytes=lambda: 25 - cache.bytes)
    for key in "abc":
        cache.put(key, key, 10)
    assert cache.bytes == 30
    cache.put("d", "d", 10)
    assert [key in cache for key in "abcd"] == [False, True, True, True]


def test_without_memory_nothing_is_kept() -> None:
    spare = [1]
    cache: ByteCache[str] = ByteCache(100, spare_bytes=lambda: spare[0])
    cache.put("a", "a", 10)
    spare[0] = -1
    cache.put("b", "b", 10)
    assert (len(cache), cache.bytes) == (0, 0)


def test_limits_are_those_of_the_container(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A container of 1 GB with 0.9 GB in use on a machine with 64 GB."""
    proc, cgroups = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    cgroups.mkdir()
    (proc / "meminfo").write_text("MemTotal: 64000000 kB\nMemAvailable: 60000000 kB\n")
    (proc / "self" / "cgroup").write_text("0::/\n")
    (cgroups / "memory.max").write_text("1000000000")
    (cgroups / "memory.current").write_text("900000000")
    places = {"cgroups": cgroups, "proc": proc}
    monkeypatch.setattr(byte_cache, "available_memory_bytes", lambda: process.available_memory_bytes(**places))
    monkeypatch.setattr(byte_cache, "memory_limit_bytes", lambda: process.memory_limit_bytes(**places))
    assert cache_limit_bytes(8, 1 << 30) == 100_000_000 // 8
    assert cache_limit_bytes(8, 1000) == 1000
    assert spare_memory_bytes() == 100_000_000 - 1_000_000_000 // byte_cache.RESERVE_SHARE
    (cgroups / "memory.current").write_text("990000000")
    assert spare_memory_bytes() < 0


def test_clearing_and_dropping_give_bytes_back() -> None:
    cache: ByteCache[str] = ByteCache(100, spare_bytes=roomy)
    cache.put("a", "a", 10)
    cache.put("a", "b", 20)
    assert (cache.bytes, cache.get("a")) == (20, "b")
    cache.drop("a")
    cache.drop("a")
    assert cache.bytes == 0
    cache.put("a", "a", 10)
    cache.clear()
    assert (cache.bytes, len(cache)) == (0, 0)
