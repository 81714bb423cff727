"""Where results are kept, and that there are never too many of them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from qvlopt.scoring.cache_folder import cache_folder, keep_within


@pytest.mark.parametrize(
    ("environment", "path"),
    [
        ({"QVLOPT_CACHE": "/somewhere", "XDG_CACHE_HOME": "/x"}, "/somewhere"),
        ({"QVLOPT_CACHE": "", "XDG_CACHE_HOME": "/x"}, "/x/qvlopt"),
        ({}, str(Path.home() / ".cache" / "qvlopt")),
    ],
)
def test_the_folder_is_the_users_choice(environment: dict[str, str], path: str) -> None:
    assert cache_folder(environment) == Path(path)


def test_the_files_unused_for_longest_go_first(tmp_path: Path) -> None:
    for age, name in enumerate(("new", "middle", "old")):
        path = tmp_path / "answers" / f"{name}.jsonl"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"x" * 100)
        os.utime(path, (10_000 - age, 10_000 - age))
    keep_within(tmp_path, 300)
    assert len(list(tmp_path.rglob("*.jsonl"))) == 3
    keep_within(tmp_path, 299)
    assert sorted(path.stem for path in tmp_path.rglob("*.jsonl")) == ["middle", "new"]


def test_links_are_neither_counted_nor_followed(tmp_path: Path) -> None:
    (tmp_path / "mine").write_bytes(b"x" * 1000)
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "link").symlink_to(tmp_path / "mine")
    keep_within(tmp_path / "cache", 10)
    assert (tmp_path / "mine").exists()
    assert (tmp_path / "cache" / "link").is_symlink()


def test_a_folder_that_is_not_there_is_empty(tmp_path: Path) -> None:
    keep_within(tmp_path / "gone", 10)
    assert not (tmp_path / "gone").exists()
