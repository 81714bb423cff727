"""Headers of safetensors files: what the reference implementation writes is read, and what is broken is named."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from qvlopt.artifact.header import DTYPE_BYTES, Planned, build_header, read_header
from qvlopt.errors import RunError


def write_raw(path: Path, header: bytes, data: bytes = b"") -> Path:
    path.write_bytes(struct.pack("<Q", len(header)) + header + data)
    return path


def write(path: Path, fields: Any, data: bytes = b"") -> Path:
    return write_raw(path, json.dumps(fields).encode(), data)


def field(start: int, end: int, *, dtype: str = "U8", shape: list[Any] | None = None) -> dict[str, Any]:
    return {"dtype": dtype, "shape": [end - start] if shape is None else shape, "data_offsets": [start, end]}


def test_a_file_of_the_reference_implementation_is_read(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(2, 3), "b": torch.zeros(5, dtype=torch.int64)}, tmp_path / "m.safetensors", metadata={"format": "pt"})
    entries = read_header(tmp_path / "m.safetensors")
    assert {name: (entry.dtype, entry.shape, entry.nbytes) for name, entry in entries.items()} == {"a": ("F32", (2, 3), 24), "b": ("I64", (5,), 40)}
    assert max(entry.end for entry in entries.values()) == (tmp_path / "m.safetensors").stat().st_size


@settings(max_examples=40)
@given(st.dictionaries(st.text(min_size=1), st.tuples(st.sampled_from(sorted(DTYPE_BYTES)), st.lists(st.integers(0, 4), max_size=3)), max_size=6))
def test_a_built_header_reads_back_as_the_plan(tmp_path_factory: pytest.TempPathFactory, plan: dict[str, tuple[str, list[int]]]) -> None:
    planned = [Planned(name, dtype, tuple(shape)) for name, (dtype, shape) in plan.items() if name != "__metadata__"]
    header, offsets = build_header(planned, metadata={"format": "pt"})
    path = tmp_path_factory.mktemp("header") / "m.safetensors"
    path.write_bytes(header + bytes(sum(item.nbytes for item in planned)))
    entries = read_header(path)
    assert {(entry.name, entry.dtype, entry.shape) for entry in entries.values()} == set(planned)
    assert {name: (entry.start, entry.end) for name, entry in entries.items()} == offsets
    assert all(entry.start % DTYPE_BYTES[entry.dtype] == 0 for entry in entries.values())


def test_a_cut_file_names_expected_and_got_bytes(tmp_path: Path) -> None:
    path = write(tmp_path / "shard.safetensors", {"a": field(0, 100)}, bytes(60))
    size = path.stat().st_size
    with pytest.raises(RunError, match=rf"shard.safetensors is cut: expected {size + 40} bytes by its header, got {size}"):
        read_header(path)


@pytest.mark.parametrize("content", [b"", b"\x01\x02", struct.pack("<Q", 50) + b"{}"])
def test_a_file_cut_inside_its_header_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "m.safetensors").write_bytes(content)
    with pytest.raises(RunError, match=rf"m.safetensors is cut or is no safetensors file: expected at least \d+ bytes, got {len(content)}"):
        read_header(tmp_path / "m.safetensors")


BROKEN = {
    "offsets outside the file": ({"a": field(0, 8)}, 4, "is cut"),
    "bytes after the last tensor": ({"a": field(0, 8)}, 9, "bytes after its last tensor"),
    "overlap": ({"a": field(0, 8), "b": field(4, 12)}, 12, "tensor 'b' overlaps"),
    "the same bytes twice": ({"a": field(0, 8), "b": field(0, 8)}, 8, "tensor 'b' overlaps"),
    "gap": ({"a": field(0, 4), "b": field(6, 8)}, 8, "tensor 'b' leaves a gap"),
    "a gap at the start": ({"a": field(2, 8)}, 8, "tensor 'a' leaves a gap"),
    "size unlike dtype and shape": ({"a": field(0, 8, dtype="F32", shape=[3])}, 8, "needs 12 bytes"),
    "negative size": ({"a": field(8, 0, shape=[0])}, 8, "needs 0 bytes"),
    "negative offset": ({"a": {"dtype": "U8", "shape": [8], "data_offsets": [-8, 0]}}, 8, "whole numbers"),
    "negative shape": ({"a": field(0, 4, shape=[-2, -2])}, 4, "whole numbers"),
    "a fraction as shape": ({"a": field(0, 4, shape=[4.0])}, 4, "whole numbers"),
    "a boolean as shape": ({"a": field(0, 1, shape=[True])}, 1, "whole numbers"),
    "three offsets": ({"a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 2, 4]}}, 4, "whole numbers"),
    "unknown dtype": ({"a": field(0, 4, dtype="F4")}, 4, "has dtype 'F4'"),
    "dtype that is no text": ({"a": {"dtype": ["U8"], "shape": [4], "data_offsets": [0, 4]}}, 4, "has dtype"),
    "missing key": ({"a": {"dtype": "U8", "shape": [4]}}, 4, "needs exactly"),
    "extra key": ({"a": {**field(0, 4), "x": 1}}, 4, "needs exactly"),
    "a list": ([], 0, "not a JSON object"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_header_is_refused_with_the_file_and_the_fault(tmp_path: Path, case: str) -> None:
    fields, size, fault = BROKEN[case]
    path = write(tmp_path / "m.safetensors", fields, bytes(size))
    with pytest.raises(RunError) as caught:
        read_header(path)
    assert str(path) in caught.value.message
    assert fault in caught.value.message


@pytest.mark.parametrize(
    "text",
    [b"not json", b'{"a": ', b"\xff\xfe", b"[" * 100_000, b'{"a": {"dtype": "U8", "shape": [], "data_offsets": [0, 1]}, "a": {}}'],
    ids=["words", "cut", "no UTF-8", "deep", "a name twice"],
)
def test_a_header_that_is_no_sound_json_is_refused(tmp_path: Path, text: bytes) -> None:
    with pytest.raises(RunError, match=r"m\.safetensors is not a valid safetensors file: the header is not valid JSON"):
        read_header(write_raw(tmp_path / "m.safetensors", text, b"\0"))


def test_a_header_longer_than_the_limit_is_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    with open(path, "wb") as stream:
        stream.write(struct.pack("<Q", 200_000_000))
        stream.truncate(200_000_008)
    with pytest.raises(RunError, match="the header claims 200000000 bytes"):
        read_header(path)
