"""Names inside manifests and weight maps never lead out of their folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from qvlopt.artifact.containment import contained_file, escapes
from qvlopt.errors import RunError


@pytest.mark.parametrize("name", ["", "/etc/passwd", "../a", "a/../../b", "a/..", "C:/a", "C:a", "\\\\host\\a", "\\a", "a\\..\\..\\b", "a\0b"])
def test_absolute_and_climbing_names_escape(tmp_path: Path, name: str) -> None:
    assert escapes(name)
    with pytest.raises(RunError, match=r"index\.json names the path"):
        contained_file(tmp_path, name, named_by="index.json")


@pytest.mark.parametrize("name", ["a", "a/b.bin", "..a", "a..b", "模型/é x.safetensors"])
def test_names_below_the_folder_are_kept(tmp_path: Path, name: str) -> None:
    assert contained_file(tmp_path, name, named_by="index.json") == tmp_path / name


def test_a_link_that_leads_outside_is_refused_with_a_hint(tmp_path: Path) -> None:
    (tmp_path / "outside").write_text("x")
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "m").symlink_to(tmp_path / "outside")
    with pytest.raises(RunError, match=r"is a link to .*outside") as caught:
        contained_file(folder, "m", named_by="index.json")
    assert caught.value.hint


def test_a_name_through_a_linked_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "sub").symlink_to(tmp_path / "outside")
    with pytest.raises(RunError, match="is a link"):
        contained_file(folder, "sub/new", named_by="index.json")


def test_links_inside_the_folder_and_a_linked_folder_itself_are_followed(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "real").write_text("x")
    (folder / "m").symlink_to("real")
    (tmp_path / "alias").symlink_to(folder)
    assert contained_file(tmp_path / "alias", "m", named_by="index.json").read_text() == "x"


@pytest.fixture
def hub(tmp_path: Path) -> Path:
    """A repository folder of the hub's cache with one snapshot."""
    repository = tmp_path / "models--Qwen--X"
    (repository / "blobs").mkdir(parents=True)
    (repository / "snapshots" / "abc123" / "sub").mkdir(parents=True)
    (repository / "blobs" / "f00").write_text("blob")
    return repository


def test_links_of_the_hub_cache_into_its_blobs_are_followed(hub: Path) -> None:
    snapshot = hub / "snapshots" / "abc123"
    (snapshot / "m").symlink_to("../../blobs/f00")
    (snapshot / "sub" / "m").symlink_to("../../../blobs/f00")
    assert contained_file(snapshot, "m", named_by="index.json").read_text() == "blob"
    assert contained_file(snapshot, "sub/m", named_by="index.json").read_text() == "blob"
    assert contained_file(snapshot / "sub", "m", named_by="index.json").read_text() == "blob"


def test_a_folder_of_blobs_beside_a_plain_folder_is_not_the_hub_cache(tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / "f00").write_text("blob")
    (tmp_path / "models" / "mine").mkdir(parents=True)
    (tmp_path / "models" / "mine" / "m").symlink_to("../../blobs/f00")
    with pytest.raises(RunError, match="is a link"):
        contained_file(tmp_path / "models" / "mine", "m", named_by="index.json")


def test_links_of_a_snapshot_elsewhere_are_refused(hub: Path, tmp_path: Path) -> None:
    other = tmp_path / "models--Qwen--Y" / "blobs"
    other.mkdir(parents=True)
    (other / "f00").write_text("another repository's")
    (hub / "snapshots" / "abc123" / "m").symlink_to("../../../models--Qwen--Y/blobs/f00")
    with pytest.raises(RunError, match="is a link"):
        contained_file(hub / "snapshots" / "abc123", "m", named_by="index.json")
