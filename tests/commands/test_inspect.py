"""`inspect` shows every module once, quantised ones by what they amount to."""

from __future__ import annotations

import hashlib
import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file

from qvlopt.artifact.manifest import Manifest, write_manifest
from qvlopt.commands.inspect import InspectResult, ModuleRow, inspect
from qvlopt.errors import RunError, UsageError
from tests.tiny import build_tiny

N, K, GROUP = 256, 384, 128


def int32(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32)


def layer(bits: int = 4) -> dict[str, dict[str, torch.Tensor]]:
    """One linear layer [N, K] of bfloat16 bias in every packing, by the shapes of the formats' own definitions."""
    bias = {"bias": torch.zeros(N, dtype=torch.bfloat16)}
    grouped = torch.zeros(N, K // GROUP, dtype=torch.bfloat16)
    shape = torch.tensor([N, K])
    words = K * bits // 32
    return {
        "awq": {"qweight": int32(K, N // 8), "qzeros": int32(K // GROUP, N // 8), "scales": torch.zeros(K // GROUP, N).half(), **bias},
        "gptq": {"qweight": int32(K // 8, N), "qzeros": int32(K // GROUP, N // 8), "scales": torch.zeros(K // GROUP, N).half(), "g_idx": int32(K)},
        "packed": {"weight_packed": int32(N, words), "weight_scale": grouped, "weight_shape": shape, **bias},
        "packed by channel": {"weight_packed": int32(N, words), "weight_scale": grouped[:, :1].clone(), "weight_shape": shape},
        "int8": {"weight": torch.zeros(N, K, dtype=torch.int8), "weight_scale": torch.zeros(N, 1), **bias},
        "fp8 blocks": {"weight": torch.zeros(N, K).to(torch.float8_e4m3fn), "weight_scale_inv": torch.zeros(2, 3)},
        "fp8 one column of blocks": {"weight": torch.zeros(N, K)[:, :128].to(torch.float8_e4m3fn), "weight_scale_inv": torch.zeros(2, 1)},
        "fp8 tensor": {"weight": torch.zeros(N, K).to(torch.float8_e4m3fn), "weight_scale": torch.zeros(1)},
        "plain": {"weight": torch.zeros(N, K, dtype=torch.bfloat16), **bias},
    }


def save(path: Path, tensors: dict[str, torch.Tensor]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path)
    return path


@pytest.mark.parametrize(
    ("packing", "bits", "shown"),
    [
        ("awq", 4, "INT4 g128"),
        ("gptq", 4, "INT4 g128"),
        ("packed", 4, "INT4 g128"),
        ("packed", 8, "INT8 g128"),
        ("packed", 3, "INT3 g128"),
        ("packed by channel", 4, "INT4 channel"),
        ("int8", 8, "INT8 channel"),
        ("fp8 blocks", 8, "FP8 128x128"),
        ("fp8 one column of blocks", 8, "FP8 128x128"),
        ("fp8 tensor", 8, "FP8 tensor"),
        ("plain", 16, "BF16"),
    ],
)
def test_a_layer_is_one_row_with_its_shape_and_all_its_bytes(tmp_path: Path, packing: str, bits: int, shown: str) -> None:
    tensors = layer(bits)[packing]
    save(tmp_path / "model.safetensors", {f"model.visual.blocks.0.attn.qkv.{name}": tensor for name, tensor in tensors.items()})
    (row,) = inspect(tmp_path).modules
    shape = tuple(tensors["weight"].shape) if "weight" in tensors else (N, K)
    assert row[:4] == ("model.visual.blocks.0.attn.qkv", shown, shape, sum(tensor.nbytes for tensor in tensors.values()))


def test_every_stored_tensor_counts_once(tmp_path: Path) -> None:
    result = inspect(build_tiny(tmp_path, tied=False, shards=3))
    stored = {name: tensor for file in tmp_path.glob("*.safetensors") for name, tensor in load_file(file).items()}
    assert {row.name for row in result.modules} == {name.rpartition(".")[0] for name in stored}
    assert result.totals["tensors"] == len(stored)
    assert result.totals["bytes"] == sum(tensor.nbytes for tensor in stored.values()) == sum(row.bytes for row in result.modules)
    assert result.totals["vision_bytes"] == sum(tensor.nbytes for name, tensor in stored.items() if ".visual." in name)
    assert result.totals["bytes BF16"] == result.totals["bytes"]


def test_old_names_of_the_tower_count_as_vision(tmp_path: Path) -> None:
    new, old = (inspect(build_tiny(tmp_path / str(old), old_prefix=old)).totals for old in (False, True))
    assert new == old


def test_float8_checkpoints_show_their_blocks(tmp_path: Path) -> None:
    rows = {row.name: row.dtype for row in inspect(build_tiny(tmp_path, dtype="float8")).modules}
    assert rows["model.language_model.layers.0.mlp.gate_proj"] == "FP8 128x128"
    assert rows["model.visual.blocks.0.attn.qkv"] == "BF16"


def test_rows_come_in_natural_order(tmp_path: Path) -> None:
    save(tmp_path / "model.safetensors", {f"blocks.{i}.norm.weight": torch.zeros(1) for i in (10, 2, 1)} | {"head": torch.zeros(1)})
    assert [row.name for row in inspect(tmp_path).modules] == ["blocks.1.norm", "blocks.2.norm", "blocks.10.norm", "head"]


def test_a_digest_is_that_of_the_bytes_and_can_be_left_out(tmp_path: Path) -> None:
    tensors = {"a.bias": torch.ones(2), "a.weight": torch.full((2, 2), 3.0)}
    save(tmp_path / "model.safetensors", tensors)
    expected = hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in tensors.values())).hexdigest()
    assert inspect(tmp_path).modules == (ModuleRow("a", "F32", (2, 2), 24, expected),)
    assert inspect(tmp_path, digests=False).modules == (ModuleRow("a", "F32", (2, 2), 24, None),)


def test_packed_tensors_of_unexpected_shapes_are_listed_as_they_are(tmp_path: Path) -> None:
    awq = {"a.qweight": int32(4), "a.qzeros": int32(1), "a.scales": torch.zeros(0, 3)}
    save(tmp_path / "model.safetensors", awq | {"b.weight_packed": int32(2, 2), "b.weight_scale": torch.zeros(2, 1)})
    assert [(row.dtype, row.shape) for row in inspect(tmp_path).modules] == [("I32", (4,)), ("I32", (2, 2))]


def test_one_file_can_be_inspected(tmp_path: Path) -> None:
    path = save(tmp_path / "part.safetensors", {"a.weight": torch.zeros(2)})
    assert [row.name for row in inspect(path).modules] == ["a"]


def test_an_artifact_that_is_no_checkpoint_shows_the_files_it_lists(tmp_path: Path) -> None:
    save(tmp_path / "statistics.safetensors", {"a.sum": torch.zeros(2)})
    save(tmp_path / "parts" / "more.safetensors", {"b.sum": torch.zeros(3)})
    write_manifest(tmp_path, Manifest(kind="statistics", digest="0", recipe={}))
    assert [(row.name, row.bytes) for row in inspect(tmp_path).modules] == [("a", 8), ("b", 12)]


def test_a_name_in_two_files_is_refused(tmp_path: Path) -> None:
    save(tmp_path / "x.safetensors", {"a.sum": torch.zeros(2)})
    save(tmp_path / "y.safetensors", {"a.sum": torch.zeros(2)})
    write_manifest(tmp_path, Manifest(kind="statistics", digest="0", recipe={}))
    with pytest.raises(RunError, match=r"tensor 'a\.sum' in two files, x\.safetensors and y\.safetensors"):
        inspect(tmp_path)


def test_a_path_that_is_not_there_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no file or folder"):
        inspect(tmp_path / "absent")


def test_json_has_the_keys_of_the_contract(tmp_path: Path) -> None:
    result = inspect(build_tiny(tmp_path))
    document = json.loads(json.dumps(result.to_json()))
    assert result.exit_code == 0
    assert {"output", "modules", "totals"} <= set(document)
    assert document["totals"] == result.totals
    assert all({"name", "dtype", "shape", "bytes"} <= set(row) for row in document["modules"])
    row = next(row for row in document["modules"] if row["name"] == "model.visual.blocks.0.attn.qkv")
    assert (row["dtype"], row["shape"], row["bytes"]) == ("BF16", [384, 128], 2 * (384 * 128 + 384))


def shown(result: InspectResult) -> str:
    console = Console(file=io.StringIO(), width=200, markup=True, force_terminal=False)
    result.render(console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_table_names_every_module_and_total(tmp_path: Path) -> None:
    result = inspect(build_tiny(tmp_path))
    text = shown(result)
    assert all(row.name in text for row in result.modules)
    assert f"{result.totals['vision_bytes']:,}" in text
    assert "384 x 128" in text


def test_names_in_a_file_cannot_act_on_the_terminal(tmp_path: Path) -> None:
    save(tmp_path / "model.safetensors", {"\x1b[31mred.weight": torch.zeros(1), "[bold]b[/bold].weight": torch.zeros(1)})
    text = shown(inspect(tmp_path))
    assert "\x1b" not in text
    assert "[bold]b[/bold]" in text


def test_inspecting_loads_no_torch(tmp_path: Path) -> None:
    build_tiny(tmp_path)
    code = (
        "import sys; from pathlib import Path; from qvlopt.commands.inspect import inspect; inspect(Path(sys.argv[1]));"
        "sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False).returncode == 0
