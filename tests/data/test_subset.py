"""Subsets are the same in every run, nested, and fair to every stratum."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from qvlopt.data.rows import Record, Row, make_row
from qvlopt.data.subset import choose


def row(id: str, stratum: str | None = None) -> Row:
    values: dict[str, Any] = {"id": id, "question": "q", "stratum": stratum}
    return make_row(Record("x:1", values, Path()))


strata = st.lists(st.sampled_from(["a", "b", "c", None]), min_size=1, max_size=60)


@given(strata, st.integers(1, 60), st.integers(0, 5))
def test_a_larger_limit_holds_the_smaller_one_and_every_stratum_its_share(kinds: list[str | None], limit: int, seed: int) -> None:
    rows = [row(f"{i}", kind) for i, kind in enumerate(kinds)]
    chosen = choose(rows, limit, seed)
    assert len(chosen) == min(limit, len(rows))
    assert [int(each.id) for each in chosen] == sorted(int(each.id) for each in chosen)
    assert {each.id for each in chosen} <= {each.id for each in choose(rows, limit + 1, seed)}
    share = len(chosen) / len(rows)
    found = Counter(each.stratum for each in chosen)
    for kind, count in Counter(kinds).items():
        assert abs(found[kind] - count * share) <= 2


@given(strata, st.integers(1, 30), st.randoms())
def test_the_order_of_the_rows_does_not_matter(kinds: list[str | None], limit: int, random: Any) -> None:
    rows = [row(f"{i}", kind) for i, kind in enumerate(kinds)]
    shuffled = list(rows)
    random.shuffle(shuffled)
    assert {each.id for each in choose(rows, limit, 0)} == {each.id for each in choose(shuffled, limit, 0)}


def test_a_sorted_file_loses_no_kind() -> None:
    rows = [row(f"{i}", f"kind {i // 100}") for i in range(1000)]
    assert Counter(Counter(each.stratum for each in choose(rows, 50, 0)).values()) == {5: 10}
