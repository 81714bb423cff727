"""Digests depend on content alone."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from qvlopt.artifact.digest import digest_of, sha256_bytes, sha256_file


def test_a_file_and_its_bytes_have_the_digest_that_hashlib_gives(tmp_path: Path) -> None:
    data = bytes(range(256)) * 5000
    (tmp_path / "f").write_bytes(data)
    assert sha256_file(tmp_path / "f") == sha256_bytes(data) == hashlib.sha256(data).hexdigest()


def test_the_order_of_keys_does_not_change_a_digest_and_any_value_does() -> None:
    assert digest_of({"a": 1, "b": {"c": [1, 2], "d": None}}) == digest_of({"b": {"d": None, "c": (1, 2)}, "a": 1})
    values = [{"a": 1}, {"a": 1.5}, {"a": "1"}, {"a": None}, {"a": [1]}, {"a": True}, {"b": 1}, {"a": [2, 1]}, {"a": [1, 2]}]
    assert len({digest_of(value) for value in values}) == len(values)


def test_a_digest_stays_the_same_from_version_to_version() -> None:
    assert digest_of({"name": "é", "bits": 4}) == "cfb9fa40f9d73f6814483d5249a8439352daf5963f1e279530dc432ee1fc51fc"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), [float("-inf")]])
def test_numbers_that_json_lacks_have_no_digest(value: object) -> None:
    with pytest.raises(ValueError, match="JSON"):
        digest_of(value)


def test_what_json_cannot_hold_has_no_digest() -> None:
    with pytest.raises(TypeError):
        digest_of({"path": Path("x")})
