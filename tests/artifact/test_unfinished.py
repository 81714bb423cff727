"""Parts of unfinished work are there whole or not at all, and belong to one result."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from qvlopt.artifact.unfinished import HEAD, Parts, discard_unfinished, parts_folder, unfinished
from qvlopt.errors import RunError, UsageError

CONDITIONS = {"torch": "2", "threads": "1"}


def kept(parts: Parts) -> None:
    parts.path("a.bin").write_bytes(b"data")
    parts.keep("a", {"loss": 0.1, "names": ["x"]}, ["a.bin"])


def end_with(error: BaseException, destination: Path) -> None:
    """Work that finishes a part and then breaks off."""
    with unfinished(destination, digest="d", conditions=CONDITIONS) as parts:
        kept(parts)
        raise error


def test_a_part_is_read_back_with_floats_to_the_last_bit(tmp_path: Path) -> None:
    parts = Parts(tmp_path / "p")
    parts.path("a.bin").write_bytes(b"data")
    parts.keep("a", {"loss": 0.1 + 0.2}, ["a.bin"])
    assert Parts(tmp_path / "p").record("a") == {"loss": 0.1 + 0.2}
    assert parts.record("b") is None


@pytest.mark.parametrize("damage", ["changed", "cut", "gone", "record cut", "record broken"])
def test_a_damaged_part_is_none(tmp_path: Path, damage: str) -> None:
    parts = Parts(tmp_path / "p")
    kept(parts)
    file, record = parts.path("a.bin"), parts.path("a.json")
    if damage == "changed":
        file.write_bytes(b"dada")
    elif damage == "cut":
        file.write_bytes(b"dat")
    elif damage == "gone":
        file.unlink()
    else:
        record.write_text(record.read_text()[:-9] if damage == "record cut" else '{"files": 3}')
    assert parts.record("a") is None


def test_a_digest_that_is_known_is_not_computed_but_checked(tmp_path: Path) -> None:
    parts = Parts(tmp_path / "p")
    parts.path("a.bin").write_bytes(b"data")
    parts.keep("a", {}, {"a.bin": "0" * 64})
    assert parts.record("a") is None


def test_dropping_forgets_a_part_and_its_files(tmp_path: Path) -> None:
    parts = Parts(tmp_path / "p")
    kept(parts)
    parts.drop("a", "a.bin")
    parts.drop("never", "there")
    assert os.listdir(parts.folder) == []


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError(28, "full"), RuntimeError("bug")], ids=repr)
def test_parts_stay_after_whatever_may_not_happen_again(tmp_path: Path, error: BaseException) -> None:
    with pytest.raises((KeyboardInterrupt, OSError, RuntimeError)):
        end_with(error, tmp_path / "out")
    with unfinished(tmp_path / "out", digest="d", conditions=CONDITIONS) as parts:
        assert parts.record("a") is not None
    assert parts.folder == parts_folder(tmp_path / "out") == tmp_path.resolve() / ".out.part"


def test_parts_go_with_an_error_that_would_come_again(tmp_path: Path) -> None:
    with pytest.raises(RunError):
        end_with(RunError("wrong weights"), tmp_path / "out")
    assert os.listdir(tmp_path) == []


def test_another_result_is_refused_or_dropped_when_overwriting(tmp_path: Path) -> None:
    with unfinished(tmp_path / "out", digest="d", conditions=CONDITIONS) as parts:
        kept(parts)
    with (
        pytest.raises(UsageError, match=r"unfinished work on another result, with digest d, expected e") as refused,
        unfinished(tmp_path / "out", digest="e", conditions=CONDITIONS),
    ):
        pytest.fail("was not refused")
    assert refused.value.hint is not None
    assert "--overwrite" in refused.value.hint
    assert parts.record("a") is not None
    with unfinished(tmp_path / "out", digest="e", conditions=CONDITIONS, overwrite=True) as parts:
        assert parts.record("a") is None


def test_overwriting_goes_on_with_work_on_the_same_result(tmp_path: Path) -> None:
    with unfinished(tmp_path / "out", digest="d", conditions=CONDITIONS) as parts:
        kept(parts)
    with unfinished(tmp_path / "out", digest="d", conditions=CONDITIONS, overwrite=True) as parts:
        assert parts.record("a") is not None


def test_other_conditions_drop_the_parts_and_say_why(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with unfinished(tmp_path / "out", digest="d", conditions=CONDITIONS) as parts:
        kept(parts)
    with caplog.at_level(logging.WARNING), unfinished(tmp_path / "out", digest="d", conditions=CONDITIONS | {"torch": "3"}) as parts:
        assert parts.record("a") is None
    assert "torch 2, now 3" in caplog.text


@pytest.mark.parametrize("kind", ["file", "link", "foreign", "broken head"])
def test_what_is_not_ours_is_left_alone(tmp_path: Path, kind: str) -> None:
    folder, other = tmp_path / ".out.part", tmp_path / "other"
    other.mkdir()
    (other / "mine").touch()
    if kind == "file":
        folder.touch()
    elif kind == "link":
        folder.symlink_to(other)
    else:
        folder.mkdir()
        (folder / ("mine" if kind == "foreign" else HEAD)).write_text("{")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(UsageError, match="is in the way"), unfinished(tmp_path / "out", digest="d", conditions={}, overwrite=True):
        pytest.fail("was not refused")
    discard_unfinished(tmp_path / "out", "d")
    assert sorted(tmp_path.rglob("*")) == before


def test_an_empty_folder_that_a_kill_left_is_used(tmp_path: Path) -> None:
    (tmp_path / ".out.part").mkdir()
    with unfinished(tmp_path / "out", digest="d", conditions={}) as parts:
        assert (parts.folder / HEAD).is_file()
    discard_unfinished(tmp_path / "out", "another")
    assert os.listdir(tmp_path) == [".out.part"]
    discard_unfinished(tmp_path / "out", "d")
    assert os.listdir(tmp_path) == []


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match=r"\.out\.part cannot be made"), unfinished(tmp_path / "file" / "out", digest="d", conditions={}):
        pytest.fail("was made")
