"""Written files are what the reference implementation reads, complete, and the same bytes for the same content."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from qvlopt.artifact import byte_ranges, tensor_writer
from qvlopt.artifact.header import DTYPE_BYTES
from qvlopt.artifact.tensors import FolderWriter, TensorFiles, TensorWriter, dtype_code, write_index
from qvlopt.errors import RunError

PLAN = [("a", "F32", (2, 3)), ("b", "I32", (4,)), ("c", "BF16", ())]
VALUES = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.arange(4, dtype=torch.int32), "c": torch.tensor(1.5, dtype=torch.bfloat16)}


def write_all(path: Path, order: str = "abc") -> Path:
    with TensorWriter(path, PLAN) as writer:
        for name in order:
            writer.write(name, VALUES[name])
    return path


def test_the_reference_implementation_reads_what_was_written(tmp_path: Path) -> None:
    path = write_all(tmp_path / "model.safetensors")
    loaded = load_file(path)
    assert set(loaded) == set(VALUES)
    assert all(torch.equal(loaded[name], VALUES[name]) and loaded[name].dtype == VALUES[name].dtype for name in VALUES)
    with safe_open(path, "pt") as opened:
        assert opened.metadata() == {"format": "pt"}


@pytest.mark.parametrize("code", sorted(DTYPE_BYTES))
def test_every_dtype_goes_to_the_file_and_back(tmp_path: Path, code: str) -> None:
    raw = torch.arange(48, dtype=torch.uint8)
    tensor = (raw % 2).bool() if code == "BOOL" else raw.view(tensor_writer.torch_dtype(code))
    with TensorWriter(tmp_path / "model.safetensors", [("t", code, tuple(tensor.shape))]) as writer:
        writer.write("t", tensor)
    assert dtype_code(tensor.dtype) == code
    assert load_file(tmp_path / "model.safetensors")["t"].view(torch.uint8).tolist() == tensor.view(torch.uint8).tolist()


def test_a_dtype_that_safetensors_lacks_is_refused() -> None:
    with pytest.raises(ValueError, match=r"torch\.complex128 cannot be stored"):
        dtype_code(torch.complex128)


def test_the_order_of_writing_does_not_change_the_bytes(tmp_path: Path) -> None:
    assert write_all(tmp_path / "1", "abc").read_bytes() == write_all(tmp_path / "2", "cba").read_bytes()


def test_strided_and_grad_tensors_are_written_by_value(tmp_path: Path) -> None:
    tensor = torch.arange(12.0).reshape(3, 4).T.requires_grad_()
    with TensorWriter(tmp_path / "model.safetensors", [("t", "F32", (4, 3))]) as writer:
        writer.write("t", tensor)
    assert torch.equal(load_file(tmp_path / "model.safetensors")["t"], tensor)


@settings(max_examples=40)
@given(st.integers(0, 70), st.integers(1, 9))
def test_chunks_and_short_writes_of_any_size_copy_every_byte(tmp_path_factory: pytest.TempPathFactory, size: int, chunk: int) -> None:
    folder = tmp_path_factory.mktemp("chunks")
    data = torch.arange(size, dtype=torch.uint8)
    save_file({"t": data, "before": torch.ones(3)}, folder / "model.safetensors")
    entry = TensorFiles.open(folder).entries["t"]
    whole = os.pwrite
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(byte_ranges, "CHUNK_BYTES", chunk)
        patch.setattr(tensor_writer, "CHUNK_BYTES", chunk)
        patch.setattr(os, "pwrite", lambda fd, view, position: whole(fd, view[:3], position))
        with TensorWriter(folder / "copy", [("entry", "U8", (size,)), ("tensor", "U8", (size,)), ("bytes", "U8", (size,))]) as writer:
            writer.write("entry", entry)
            writer.write("tensor", data)
            writer.write("bytes", bytes(data.tolist()))
    assert all(torch.equal(tensor, data) for tensor in load_file(folder / "copy").values())


def test_an_entry_is_copied_undecoded_even_where_values_have_many_forms(tmp_path: Path) -> None:
    signalling = torch.tensor([0x7FA1, 0xFFC1, 0x8000, 0x0001], dtype=torch.uint16)
    save_file({"t": signalling.view(torch.bfloat16)}, tmp_path / "model.safetensors")
    entry = TensorFiles.open(tmp_path).entries["t"]
    with TensorWriter(tmp_path / "copy", [("renamed", "BF16", (4,))]) as writer:
        writer.write("renamed", entry)
    assert torch.equal(load_file(tmp_path / "copy")["renamed"].view(torch.uint16), signalling)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("z", torch.zeros(1), "'z' is not in the plan"),
        ("a", torch.zeros(3, 2), r"planned as F32 \(2, 3\), got F32 \(3, 2\)"),
        ("a", torch.zeros(2, 3, dtype=torch.float64), r"got F64 \(2, 3\)"),
        ("a", bytes(23), "needs 24 bytes, got 23"),
    ],
)
def test_a_value_unlike_the_plan_is_refused(tmp_path: Path, name: str, value: torch.Tensor | bytes, said: str) -> None:
    writer = TensorWriter(tmp_path / "model.safetensors", PLAN)
    with pytest.raises(ValueError, match=said):
        writer.write(name, value)
    writer.abandon()


def test_a_tensor_is_written_once(tmp_path: Path) -> None:
    writer = TensorWriter(tmp_path / "model.safetensors", PLAN)
    writer.write("b", VALUES["b"])
    with pytest.raises(ValueError, match="'b' is written already"):
        writer.write("b", VALUES["b"])
    writer.abandon()


@pytest.mark.parametrize(
    ("plan", "said"),
    [([("a", "F32", (1,)), ("a", "F32", (1,))], "'a' twice"), ([("a", "FP4", (1,))], "dtype 'FP4'"), ([("__metadata__", "F32", (1,))], "reserved")],
)
def test_an_unsound_plan_is_refused_and_no_file_is_made(tmp_path: Path, plan: list[tuple[str, str, tuple[int, ...]]], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        TensorWriter(tmp_path / "model.safetensors", plan)
    assert not any(tmp_path.iterdir())


def test_closing_an_incomplete_file_names_a_missing_tensor(tmp_path: Path) -> None:
    writer = TensorWriter(tmp_path / "model.safetensors", PLAN)
    writer.write("a", VALUES["a"])
    with pytest.raises(RunError, match="2 of 3 tensors not written, such as 'b'"):
        writer.close()


def test_an_error_inside_the_block_is_not_hidden_by_incompleteness(tmp_path: Path) -> None:
    with pytest.raises(KeyError, match="mine"), TensorWriter(tmp_path / "model.safetensors", PLAN):
        raise KeyError("mine")


def test_an_existing_file_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"precious")
    with pytest.raises(FileExistsError):
        TensorWriter(tmp_path / "model.safetensors", PLAN)
    assert (tmp_path / "model.safetensors").read_bytes() == b"precious"


def write_folder_of(folder: Path, tensors: dict[str, torch.Tensor], max_shard_bytes: int) -> tuple[str, ...]:
    folder.mkdir()
    plan = [(name, dtype_code(tensor.dtype), tuple(tensor.shape)) for name, tensor in tensors.items()]
    with FolderWriter(folder, plan, max_shard_bytes=max_shard_bytes) as writer:
        for name, tensor in tensors.items():
            writer.write(name, tensor)
        return writer.files


@pytest.mark.parametrize(("limit", "shards"), [(1000, 1), (120, 2), (100, 3), (40, 5), (1, 5)])
def test_shards_and_their_index_are_exactly_the_plan(tmp_path: Path, limit: int, shards: int) -> None:
    tensors = {name: torch.full((10,), float(i)) for i, name in enumerate("edcba")}
    files = write_folder_of(tmp_path / "out", tensors, limit)
    assert len(files) == shards
    assert sorted(files) == sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert (tmp_path / "out" / "model.safetensors.index.json").exists() is (shards > 1)
    read = TensorFiles.open(tmp_path / "out")
    assert set(read.entries) == set(tensors)
    assert all(torch.equal(read.read(name), tensors[name]) for name in tensors)
    assert all(path.stat().st_size < max(limit, 40) + 1000 for path in (tmp_path / "out").glob("*.safetensors"))


def test_the_index_states_the_bytes_of_all_tensors(tmp_path: Path) -> None:
    write_folder_of(tmp_path / "out", {"a": torch.zeros(10), "b": torch.zeros(5, dtype=torch.int8)}, 40)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text(encoding="utf-8"))
    assert index == {
        "metadata": {"total_size": 45},
        "weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"},
    }


def test_an_index_can_be_written_for_files_of_other_names(tmp_path: Path) -> None:
    save_file({"é": torch.zeros(2)}, tmp_path / "part.safetensors")
    write_index(tmp_path, {"é": "part.safetensors"}, total_bytes=8)
    assert list(TensorFiles.open(tmp_path).entries) == ["é"]


def test_a_folder_refuses_names_outside_its_plan_and_closes_incomplete(tmp_path: Path) -> None:
    writer = FolderWriter(tmp_path, PLAN)
    with pytest.raises(ValueError, match="'z' is not in the plan"):
        writer.write("z", torch.zeros(1))
    with pytest.raises(RunError, match="3 of 3 tensors not written"):
        writer.close()


def chunks(tensor: torch.Tensor, size: int) -> Iterator[memoryview]:
    data = memoryview(tensor.numpy().tobytes())
    return (data[start : start + size] for start in range(0, len(data), size))


@pytest.mark.parametrize("size", [1, 5, 24, 100])
def test_chunks_of_any_size_are_the_tensor_that_they_make_up(tmp_path: Path, size: int) -> None:
    with TensorWriter(tmp_path / "model.safetensors", PLAN[:1]) as writer:
        writer.write("a", chunks(VALUES["a"], size))
    assert torch.equal(load_file(tmp_path / "model.safetensors")["a"], VALUES["a"])


@pytest.mark.parametrize(("count", "said"), [(5, "needs 24 bytes, got 20"), (7, "needs 24 bytes, got more")])
def test_chunks_of_another_length_than_planned_are_refused_and_touch_no_other_tensor(tmp_path: Path, count: int, said: str) -> None:
    writer = TensorWriter(tmp_path / "model.safetensors", PLAN)
    writer.write("b", VALUES["b"])
    writer.write("c", VALUES["c"])
    with pytest.raises(ValueError, match=said):
        writer.write("a", chunks(torch.arange(float(count)), 8))
    with pytest.raises(RunError, match="1 of 3 tensors not written"):
        writer.close()
    assert VALUES["b"].numpy().tobytes() in (tmp_path / "model.safetensors").read_bytes()
