"""A locked set is used as it was drawn, or not at all."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from PIL import Image

from qvlopt.data.sets import open_set, write_lock
from qvlopt.errors import RunError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "pictures").mkdir()
    Image.new("RGB", (8, 8)).save(tmp_path / "pictures" / "été.png")
    (tmp_path / "manifest.jsonl").write_text('{"id": 1}\n', encoding="utf-8")
    (tmp_path / "LICENSE").write_text("CC0", encoding="utf-8")
    write_lock(tmp_path, name="drawn", licence="CC0-1.0")
    return tmp_path


def test_a_lock_lists_every_file_with_kind_and_size(folder: Path) -> None:
    locked = open_set(folder)
    assert {name: file.kind for name, file in locked.files.items()} == {
        "pictures/été.png": "picture",
        "manifest.jsonl": "manifest",
        "LICENSE": "text",
    }
    assert locked.files["LICENSE"].bytes == 3
    assert (locked.name, locked.licence) == ("drawn", "CC0-1.0")


def test_writing_the_lock_again_changes_nothing(folder: Path) -> None:
    before = (folder / "lock.json").read_bytes()
    write_lock(folder, name="drawn", licence="CC0-1.0")
    assert (folder / "lock.json").read_bytes() == before


def test_the_digest_does_not_depend_on_the_folder(folder: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(folder, tmp_path / "elsewhere")
    assert open_set(copy).digest == open_set(folder).digest


@pytest.mark.parametrize("content", [b"CC1", b"CC0 and more"])
def test_a_changed_file_is_named(folder: Path, content: bytes) -> None:
    (folder / "LICENSE").write_bytes(content)
    with pytest.raises(RunError, match=r"LICENSE was changed"):
        open_set(folder)


def test_a_missing_file_is_named(folder: Path) -> None:
    (folder / "pictures" / "été.png").unlink()
    with pytest.raises(RunError, match=r"été\.png is missing"):
        open_set(folder)


def test_a_file_that_is_added_beside_is_not_read_and_does_no_harm(folder: Path) -> None:
    (folder / ".DS_Store").write_bytes(b"x")
    assert "été" in " ".join(open_set(folder).files)


def test_a_lock_that_was_edited_is_told(folder: Path) -> None:
    document = json.loads((folder / "lock.json").read_text(encoding="utf-8"))
    (folder / "LICENSE").write_bytes(b"CC1")
    document["files"]["LICENSE"] = {"sha256": write_lock(folder, name="x", licence="y").files["LICENSE"].sha256, "bytes": 3, "kind": "text"}
    (folder / "lock.json").write_text(json.dumps(document), encoding="utf-8")
    with pytest.raises(RunError, match=r"lock\.json was changed"):
        open_set(folder)


@pytest.mark.parametrize("name", ["../outside.png", "/etc/hostname", "a/../../b"])
def test_a_lock_cannot_point_outside_its_folder(folder: Path, name: str) -> None:
    document = json.loads((folder / "lock.json").read_text(encoding="utf-8"))
    document["files"][name] = document["files"]["LICENSE"]
    (folder / "lock.json").write_text(json.dumps(document), encoding="utf-8")
    with pytest.raises(RunError, match="leaves the set's folder"):
        open_set(folder)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"files": 3}', '{"files": {"a": {}}, "name": "n"}', "\ud800"])
def test_a_broken_or_missing_lock_is_told(folder: Path, text: str) -> None:
    (folder / "lock.json").write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(RunError, match=r"lock\.json is no valid lock"):
        open_set(folder)
    (folder / "lock.json").unlink()
    with pytest.raises(RunError, match="is missing"):
        open_set(folder)


def test_a_lock_of_a_later_version_is_told(folder: Path) -> None:
    document = json.loads((folder / "lock.json").read_text(encoding="utf-8"))
    (folder / "lock.json").write_text(json.dumps({**document, "schema_version": 2}), encoding="utf-8")
    with pytest.raises(RunError, match="schema_version 2"):
        open_set(folder)
