"""A manifest says what an artifact is, byte for byte, and nothing it names lies outside."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from qvlopt.artifact.manifest import (
    MANIFEST,
    CheckRecord,
    LayerRecord,
    Manifest,
    ModuleRecord,
    ParentRecord,
    SourceRecord,
    read_intact,
    read_manifest,
    verify_files,
    write_manifest,
)
from qvlopt.errors import RunError

FULL = Manifest(
    kind="awq",
    digest="d" * 64,
    recipe={"bits": 4, "keep": ["lm_head"], "name": "模型"},
    source=SourceRecord(path="Qwen/X", revision="abc", digest="s" * 64),
    parents=(ParentRecord(kind="statistics", digest="p" * 64),),
    modules=(ModuleRecord(name="a.b", dtype_before="BF16", dtype_after="INT4 g128", bytes_before=8, bytes_after=3),),
    layers=(LayerRecord(name="a.b", rounding_loss=0.5, loss=0.25, method="scale+clip"),),
    coverage={"images": 3},
    check=CheckRecord(passed=True, worst=1e-6, detail="a.b"),
    changes={"config.json": "quantization_config added"},
    versions={"torch": "2"},
    seconds=1.5,
    peak_rss_bytes=10,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An artifact of three files, one of them in a sub-folder."""
    (tmp_path / "sub").mkdir()
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    (tmp_path / "README.md").write_text("card")
    (tmp_path / "sub" / "é x.json").write_text("{}")
    write_manifest(tmp_path, FULL)
    return tmp_path


def edit(folder: Path, **fields: Any) -> None:
    path = folder / MANIFEST
    path.write_text(json.dumps({**json.loads(path.read_text(encoding="utf-8")), **fields}))


def test_a_manifest_reads_back_as_written_with_every_file_but_itself(folder: Path) -> None:
    read = read_manifest(folder)
    assert read == FULL.model_copy(update={"files": read.files})
    assert set(read.files) == {"model.safetensors", "README.md", "sub/é x.json"}
    assert read.files["README.md"].sha256 == hashlib.sha256(b"card").hexdigest()
    assert read.files["README.md"].bytes == 4


def test_an_untouched_artifact_has_no_problems(folder: Path) -> None:
    assert verify_files(folder) == []


def test_every_kind_of_damage_is_found_and_named(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"w3ights")
    (folder / "README.md").write_text("longer card")
    (folder / "sub" / "é x.json").unlink()
    (folder / "model-00002-of-00010.safetensors").write_bytes(b"")
    (folder / "notes.txt").write_text("a user's own file is no fault")
    assert verify_files(folder) == [
        "README.md has 11 bytes, expected 4",
        "model.safetensors has another content than the manifest says",
        "sub/é x.json is missing",
        "model-00002-of-00010.safetensors is not part of this artifact",
    ]


def test_without_hashes_only_sizes_are_compared(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"w3ights")
    assert verify_files(folder, hashes=False) == []
    (folder / "model.safetensors").write_bytes(b"short")
    assert verify_files(folder, hashes=False) == ["model.safetensors has 5 bytes, expected 7"]


def test_a_listed_file_that_is_a_link_outside_is_a_problem(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    outside = tmp_path_factory.mktemp("outside") / "README.md"
    (folder / "README.md").rename(outside)
    (folder / "README.md").symlink_to(outside)
    assert len(verify_files(folder)) == 1
    assert verify_files(folder)[0].startswith("README.md is refused")


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "a/../../x", "C:\\x", ""])
def test_a_manifest_that_names_paths_outside_is_broken(folder: Path, name: str) -> None:
    edit(folder, files={name: {"sha256": "0" * 64, "bytes": 1}})
    with pytest.raises(RunError, match=r"qvlopt\.json is broken at files\..*leaves the folder"):
        read_manifest(folder)


@pytest.mark.parametrize(
    ("fields", "where"),
    [
        ({"digest": 5}, "digest"),
        ({"unknown": 1}, "unknown"),
        ({"modules": [{"name": "a"}]}, r"modules\.0\.dtype_before"),
        ({"tool": "other"}, "tool"),
    ],
)
def test_a_broken_manifest_says_where(folder: Path, fields: dict[str, Any], where: str) -> None:
    edit(folder, **fields)
    with pytest.raises(RunError, match=rf"qvlopt\.json is broken at {where}: "):
        read_manifest(folder)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "[" * 100_000, '{"kind": "awq"'])
def test_a_manifest_that_is_no_json_object_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / MANIFEST).write_text(text)
    with pytest.raises(RunError, match=r"qvlopt\.json is broken"):
        read_manifest(tmp_path)


def test_a_manifest_of_a_newer_version_asks_for_an_update(folder: Path) -> None:
    edit(folder, schema_version=2, unknown=True)
    with pytest.raises(RunError, match="has schema version 2, this qvlopt reads 1") as caught:
        read_manifest(folder)
    assert caught.value.hint == "Update qvlopt."


def test_a_folder_without_a_manifest_is_named(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"has no readable qvlopt\.json: No such file"):
        read_manifest(tmp_path)


def test_a_link_has_no_place_in_an_artifact(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").symlink_to("/etc/passwd")
    with pytest.raises(RunError, match=r"model\.safetensors is not a regular file"):
        write_manifest(tmp_path, FULL)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "sub").symlink_to("/etc")
    with pytest.raises(RunError, match="sub is not a regular file"):
        write_manifest(tmp_path, FULL)


def test_a_loss_that_is_no_number_cannot_be_recorded() -> None:
    with pytest.raises(ValidationError, match="finite"):
        LayerRecord(name="a", rounding_loss=float("nan"), loss=0.0, method="rounding")


def test_writing_again_lists_the_files_of_now(folder: Path) -> None:
    (folder / "README.md").unlink()
    assert set(write_manifest(folder, read_manifest(folder)).files) == {"model.safetensors", "sub/é x.json"}


def test_an_artifact_is_read_only_if_its_files_are_as_listed(folder: Path) -> None:
    (folder / "README.md").write_text("a card that somebody edited")
    assert read_intact(folder).kind == FULL.kind
    (folder / "model.safetensors").write_bytes(b"w3ights")
    with pytest.raises(RunError, match=r"is damaged: model\.safetensors has another content"):
        read_intact(folder)
