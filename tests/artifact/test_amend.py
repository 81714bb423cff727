"""A finished artifact's card may be renewed, by us and as long as it is ours."""

from __future__ import annotations

from pathlib import Path

import pytest

from qvlopt.artifact.amend import amend_file
from qvlopt.artifact.folder import existing_state
from qvlopt.artifact.manifest import Manifest, verify_files, write_manifest


@pytest.fixture
def artifact(tmp_path: Path) -> Path:
    folder = tmp_path / "artifact"
    folder.mkdir()
    (folder / "README.md").write_text("card\n", encoding="utf-8")
    (folder / "data.txt").write_text("data", encoding="utf-8")
    write_manifest(folder, Manifest(kind="awq", digest="d", recipe={}))
    return folder


def test_an_amended_file_is_listed_with_its_new_digest(artifact: Path) -> None:
    assert amend_file(artifact, "README.md", "card with scores: 97 % ± 1\n")
    assert (artifact / "README.md").read_text(encoding="utf-8") == "card with scores: 97 % ± 1\n"
    assert verify_files(artifact) == []
    assert existing_state(artifact, "d") == "same"


def test_a_file_that_somebody_edited_is_left_alone(artifact: Path) -> None:
    before = (artifact / "qvlopt.json").read_bytes()
    (artifact / "README.md").write_text("mine\n", encoding="utf-8")
    assert not amend_file(artifact, "README.md", "ours\n")
    assert (artifact / "README.md").read_text(encoding="utf-8") == "mine\n"
    assert (artifact / "qvlopt.json").read_bytes() == before


def test_a_file_that_is_not_listed_is_not_written(artifact: Path) -> None:
    assert not amend_file(artifact, "other.md", "text")
    assert not (artifact / "other.md").exists()


def test_a_link_in_place_of_the_file_is_not_followed(artifact: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside.md"
    outside.write_text("card\n", encoding="utf-8")
    (artifact / "README.md").unlink()
    (artifact / "README.md").symlink_to(outside)
    assert not amend_file(artifact, "README.md", "ours\n")
    assert outside.read_text(encoding="utf-8") == "card\n"


def test_nothing_is_left_beside_the_amended_file(artifact: Path) -> None:
    amend_file(artifact, "README.md", "new\n")
    assert sorted(path.name for path in artifact.iterdir()) == ["README.md", "data.txt", "qvlopt.json"]
    assert [path.name for path in artifact.parent.iterdir()] == ["artifact"]


def test_a_failure_leaves_nothing_beside_and_changes_nothing(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, data: bytes) -> int:
        with path.open("wb") as stream:
            stream.write(data[:5])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match="No space"):
        amend_file(artifact, "README.md", "new\n")
    assert sorted(path.name for path in artifact.iterdir()) == ["README.md", "data.txt", "qvlopt.json"]
    assert verify_files(artifact) == []
