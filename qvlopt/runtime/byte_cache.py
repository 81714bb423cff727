"""A cache that holds so many bytes: the entry that was not used for longest goes first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

from qvlopt.artifact.process import available_memory_bytes, memory_limit_bytes

Value = TypeVar("Value")
RESERVE_SHARE = 16
"""One part in so many of the memory that this process may use stays free of cached things."""


class ByteCache(Generic[Value]):
    """Entries by key, `limit_bytes` of them at most; fewer when memory runs short. Not thread-safe.

    `spare_bytes` tells how much more the process may use; it is asked when an entry is added.
    """

    def __init__(self, limit_bytes: int, *, spare_bytes: Callable[[], int] | None = None) -> None:
        self.limit_bytes = limit_bytes
        self.bytes = 0
        self.hits = 0
        self.misses = 0
        self._spare_bytes = spare_bytes or spare_memory_bytes
        self._entries: OrderedDict[str, tuple[Value, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: str) -> bool:
        return key in self._entries

    def get(self, key: str) -> Value | None:
        """The entry, which is then the newest."""
        entry = self._entries.get(key)
        if entry is None:
            self.misses += 1
            return None
        self.hits += 1
        self._entries.move_to_end(key)
        return entry[0]

    def put(self, key: str, value: Value, n_bytes: int) -> None:
        """Adds or replaces an entry, unless it is larger than the cache or memory is short even without the others."""
        self.drop(key)
        if n_bytes > self.limit_bytes:
            return
        while self.bytes + n_bytes > self.limit_bytes:
            self._drop_oldest()
        while self._spare_bytes() < 0:
            if not self._entries:
                return
            self._drop_oldest()
        self._entries[key] = (value, n_bytes)
        self.bytes += n_bytes

    def drop(self, key: str) -> None:
        """Forgets an entry, if there is one."""
        entry = self._entries.pop(key, None)
        self.bytes -= entry[1] if entry else 0

    def clear(self) -> None:
        """Forgets everything."""
        self._entries.clear()
        self.bytes = 0

    def _drop_oldest(self) -> None:
        self.drop(next(iter(self._entries)))


def spare_memory_bytes() -> int:
    """What this process may still use, inside its container, before it touches the reserve; negative within the reserve."""
    return available_memory_bytes() - memory_limit_bytes() // RESERVE_SHARE


def cache_limit_bytes(share: int, most: int) -> int:
    """One part in `share` of the memory that can still be used, `most` at most."""
    return max(0, min(available_memory_bytes() // share, most))
