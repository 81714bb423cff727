"""A clock that only moves when a test says so."""

from __future__ import annotations


class FakeClock:
    """`clock()` is the time in seconds; `clock.pass_(s)` lets `s` seconds pass."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def pass_(self, seconds: float) -> None:
        self.now += seconds
