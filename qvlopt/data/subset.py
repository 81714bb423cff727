"""Chooses a part of a set: the same rows in every run, spread evenly over its kinds of rows."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Sequence

from qvlopt.data.rows import Row


def choose(rows: Sequence[Row], limit: int | None, seed: int) -> list[Row]:
    """`limit` rows in their order; which ones depends on the seed, the ids and the strata only.

    Every stratum gives its share, rounded: its rows stand in the order of a seeded hash of their ids, the k-th of n at
    (k + 1/2) / n, and the lowest places over all strata are taken. So a larger limit holds every smaller one, and files
    that are sorted by kind, as ChartQA's and OCRBench's are, lose no kind.
    """
    if limit is None or limit >= len(rows):
        return list(rows)
    strata: dict[str, list[tuple[bytes, int]]] = defaultdict(list)
    for number, row in enumerate(rows):
        digest = hashlib.sha256(f"{seed}\0{row.id}".encode("utf-8", "surrogatepass")).digest()
        strata[row.stratum or ""].append((digest, number))
    places = []
    for hashed in strata.values():
        places += [((rank + 0.5) / len(hashed), digest, number) for rank, (digest, number) in enumerate(sorted(hashed))]
    chosen = {number for _, _, number in sorted(places)[:limit]}
    return [row for number, row in enumerate(rows) if number in chosen]
