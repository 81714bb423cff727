"""Tensors come back as they were stored, and folders that are not one whole checkpoint are refused by name."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from qvlopt.artifact import byte_ranges
from qvlopt.artifact.tensors import TensorFiles
from qvlopt.errors import RunError
from tests.tiny import build_tiny

DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu, torch.uint16, torch.int16, torch.float16,
    torch.bfloat16, torch.uint32, torch.int32, torch.float32, torch.uint64, torch.int64, torch.float64,
]  # fmt: skip


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.reshape(-1).view(torch.uint8).tolist() == b.reshape(-1).view(torch.uint8).tolist()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_is_read_to_the_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    raw = torch.arange(48, dtype=torch.uint8)
    tensor = (raw % 2).bool() if dtype == torch.bool else raw.view(dtype)
    save_file({"t": tensor.reshape(2, -1), "scalar": tensor[0].clone(), "empty": tensor[:0].reshape(0, 3).clone()}, tmp_path / "model.safetensors")
    files = TensorFiles.open(tmp_path)
    assert same_bits(files.read("t"), tensor.reshape(2, -1))
    assert same_bits(files.read("scalar"), tensor[0])
    assert same_bits(files.read("empty"), tensor[:0].reshape(0, 3))
    assert files.read_bytes("t") == bytes(tensor.view(torch.uint8).tolist())
    assert files.sha256("t") == hashlib.sha256(files.read_bytes("t")).hexdigest()


@pytest.mark.parametrize("shards", [1, 2, 3])
def test_shards_read_as_one_checkpoint(tmp_path: Path, shards: int) -> None:
    files = TensorFiles.open(build_tiny(tmp_path, shards=shards))
    stored = {name: tensor for file in sorted(tmp_path.glob("*.safetensors")) for name, tensor in load_file(file).items()}
    assert set(files.entries) == set(stored)
    assert all(same_bits(files.read(name), stored[name]) for name in stored)


def test_a_read_tensor_is_its_own_and_leaves_the_file_alone(tmp_path: Path) -> None:
    save_file({"t": torch.ones(4)}, tmp_path / "model.safetensors")
    files = TensorFiles.open(tmp_path)
    files.read("t").zero_()
    assert torch.equal(files.read("t"), torch.ones(4))


def test_short_reads_and_small_chunks_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.randn(100, generator=torch.Generator().manual_seed(0))
    save_file({"t": tensor}, tmp_path / "model.safetensors")
    files = TensorFiles.open(tmp_path)
    digest = files.sha256("t")
    whole = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, views, position: whole(fd, [views[0][:7]], position))
    monkeypatch.setattr(byte_ranges, "CHUNK_BYTES", 33)
    assert torch.equal(files.read("t"), tensor)
    assert files.sha256("t") == digest


def test_an_unknown_name_says_which_folder_lacks_it(tmp_path: Path) -> None:
    files = TensorFiles.open(build_tiny(tmp_path))
    with pytest.raises(RunError, match=r"has no tensor 'lm_head\.weight' among its 69"):
        files.read("lm_head.weight")


def test_a_cut_shard_is_named_with_expected_and_got_bytes(tmp_path: Path) -> None:
    build_tiny(tmp_path, shards=3)
    shard = tmp_path / "model-00002-of-00003.safetensors"
    size = shard.stat().st_size
    os.truncate(shard, size - 1000)
    with pytest.raises(RunError, match=rf"model-00002-of-00003.safetensors is cut: expected {size} bytes by its header, got {size - 1000}"):
        TensorFiles.open(tmp_path)


def test_a_file_that_is_cut_after_opening_is_named(tmp_path: Path) -> None:
    save_file({"t": torch.ones(1000)}, tmp_path / "model.safetensors")
    files = TensorFiles.open(tmp_path)
    size = (tmp_path / "model.safetensors").stat().st_size
    os.truncate(tmp_path / "model.safetensors", size - 100)
    with pytest.raises(RunError, match=rf"model.safetensors is cut: tensor 't' needs {size} bytes, got {size - 100}"):
        files.read("t")


def test_a_shard_that_vanished_after_opening_is_named(tmp_path: Path) -> None:
    files = TensorFiles.open(build_tiny(tmp_path))
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(RunError, match=r"model\.safetensors cannot be read: No such file"):
        files.read("model.visual.pos_embed.weight")


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    build_tiny(tmp_path, shards=3)
    (tmp_path / "model-00003-of-00003.safetensors").unlink()
    with pytest.raises(RunError, match=r"names the shard model-00003-of-00003\.safetensors, which is missing"):
        TensorFiles.open(tmp_path)


def edit_index(folder: Path, name: str, shard: str | None) -> None:
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    if shard is None:
        del index["weight_map"][name]
    else:
        index["weight_map"][name] = shard
    path.write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("name", "shard", "said"),
    [
        ("model.language_model.norm.weight", None, "1 tensors are only in the file, such as 'model.language_model.norm.weight'"),
        ("lm_head.weight", "model-00001-of-00002.safetensors", "1 tensors are only in the index, such as 'lm_head.weight'"),
        ("model.visual.pos_embed.weight", "model-00002-of-00002.safetensors", "'model.visual.pos_embed.weight'"),
    ],
    ids=["not in the index", "only in the index", "in the wrong shard"],
)
def test_an_index_that_disagrees_with_the_headers_is_refused(tmp_path: Path, name: str, shard: str | None, said: str) -> None:
    edit_index(build_tiny(tmp_path, shards=2), name, shard)
    with pytest.raises(RunError, match=r"index\.json and the header of .* disagree") as caught:
        TensorFiles.open(tmp_path)
    assert said in caught.value.message


@pytest.mark.parametrize("shard", ["../other/model.safetensors", "/etc/passwd", "sub/../../x.safetensors"])
def test_an_index_that_leaves_the_folder_is_refused(tmp_path: Path, shard: str) -> None:
    edit_index(build_tiny(tmp_path, shards=2), "lm_head.weight", shard)
    with pytest.raises(RunError, match=r"names the path .* which leaves"):
        TensorFiles.open(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": {}}', '{"weight_map": []}', '{"weight_map": {"a": 1}}', "[" * 100_000])
def test_an_index_without_a_weight_map_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(RunError, match=r"model\.safetensors\.index\.json (cannot be read|has no weight_map)"):
        TensorFiles.open(tmp_path)


def test_a_folder_without_weights_says_what_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"has neither model\.safetensors nor model\.safetensors\.index\.json"):
        TensorFiles.open(tmp_path)
    with pytest.raises(RunError, match="is not a folder"):
        TensorFiles.open(tmp_path / "absent")


def test_pickled_weights_are_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(RunError, match=r"only pytorch_model\.bin, which can run code"):
        TensorFiles.open(tmp_path)


def test_two_sets_of_weights_in_one_folder_are_refused(tmp_path: Path) -> None:
    build_tiny(tmp_path / "both", shards=2)
    build_tiny(tmp_path / "both", shards=1)
    with pytest.raises(RunError, match=r"two sets of weights: model\.safetensors does not belong"):
        TensorFiles.open(tmp_path / "both")
    build_tiny(tmp_path / "stray", shards=1)
    save_file({"t": torch.ones(1)}, tmp_path / "stray" / "model-00004-of-00010.safetensors")
    with pytest.raises(RunError, match=r"two sets of weights: model-00004-of-00010\.safetensors"):
        TensorFiles.open(tmp_path / "stray")


def test_a_hub_cache_of_links_is_read(tmp_path: Path) -> None:
    build_tiny(tmp_path / "plain", shards=2)
    repository = tmp_path / "models--Qwen--Tiny"
    snapshot = repository / "snapshots" / "0123abc"
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    for number, file in enumerate(sorted((tmp_path / "plain").iterdir())):
        file.rename(repository / "blobs" / f"{number:040x}")
        (snapshot / file.name).symlink_to(f"../../blobs/{number:040x}")
    files = TensorFiles.open(snapshot)
    assert files.read("model.visual.pos_embed.weight").shape == (16, 128)


def test_a_shard_that_is_a_link_to_elsewhere_is_refused_with_a_hint(tmp_path: Path) -> None:
    build_tiny(tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").rename(tmp_path / "moved.safetensors")
    (tmp_path / "model" / "model.safetensors").symlink_to(tmp_path / "moved.safetensors")
    with pytest.raises(RunError, match=r"is a link to .*moved\.safetensors, outside") as caught:
        TensorFiles.open(tmp_path / "model")
    assert "Copy the file" in (caught.value.hint or "")


def test_unusual_letters_and_a_read_only_folder_are_no_matter(tmp_path: Path) -> None:
    folder = build_tiny(tmp_path / "模型 für alle é", shards=2)
    before = {path.name: (path.stat().st_mtime_ns, path.stat().st_size) for path in folder.iterdir()}
    for path in folder.iterdir():
        path.chmod(0o444)
    folder.chmod(0o555)
    try:
        files = TensorFiles.open(folder)
        assert all(files.read(name).shape == entry.shape for name, entry in files.entries.items())
    finally:
        folder.chmod(0o755)
    assert {path.name: (path.stat().st_mtime_ns, path.stat().st_size) for path in folder.iterdir()} == before


def test_listing_and_hashing_tensors_does_not_load_torch(tmp_path: Path) -> None:
    build_tiny(tmp_path)
    code = (
        "import sys; from pathlib import Path; from qvlopt.artifact.tensors import TensorFiles;"
        "files = TensorFiles.open(Path(sys.argv[1])); [files.sha256(name) for name in files.entries];"
        "sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False).returncode == 0
