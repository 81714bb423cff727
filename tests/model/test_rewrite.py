"""A rewritten checkpoint is its source but for what was asked, checked with safetensors' own reader."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from qvlopt.errors import RunError
from qvlopt.model.rewrite import Rewrite, verify_rewritten, write_rewritten
from qvlopt.model.source import Source, open_source
from tests.tiny import build_tiny
from tests.tiny_run import SMALL, same_bits, stored, with_first_value

NORM, LINEAR, EMBEDDING = "model.visual.merger.norm.weight", "model.visual.merger.linear_fc1", "model.language_model.embed_tokens.weight"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny(tmp_path_factory.mktemp("source") / "tiny", **SMALL)


def opened(folder: Path) -> Source:
    return open_source(str(folder), folder=folder.parent)


def rewritten(source: Source, folder: Path, rewrite: Rewrite) -> dict[str, torch.Tensor]:
    folder.mkdir()
    write_rewritten(folder, source, rewrite)
    assert verify_rewritten(folder, source, rewrite) == len(stored(folder))
    return stored(folder)


def test_a_rewrite_of_nothing_has_the_same_tensors_config_and_files(tiny: Path, tmp_path: Path) -> None:
    got, expected = rewritten(opened(tiny), tmp_path / "out", Rewrite()), stored(tiny)
    assert set(got) == set(expected)
    assert all(same_bits(got[name], tensor) for name, tensor in expected.items())
    others = {path.name for path in tiny.iterdir()} - {"model.safetensors"}
    assert {path.name for path in (tmp_path / "out").iterdir()} == others | {"model.safetensors"}
    assert all((tmp_path / "out" / name).read_bytes() == (tiny / name).read_bytes() for name in others)


def test_tensors_go_come_and_change(tiny: Path, tmp_path: Path) -> None:
    added = {f"{LINEAR}.qweight": torch.arange(6, dtype=torch.int32).view(2, 3), f"{LINEAR}.scales": torch.ones(2, 3).half(), NORM: torch.zeros(64)}
    got = rewritten(opened(tiny), tmp_path / "out", Rewrite(removed=frozenset({f"{LINEAR}.weight"}), added=added))
    expected = {**stored(tiny), **added}
    del expected[f"{LINEAR}.weight"]
    assert set(got) == set(expected)
    assert all(same_bits(got[name], tensor) for name, tensor in expected.items())


def test_shards_become_one_file_and_the_old_index_and_stray_weights_stay_behind(tiny: Path, tmp_path: Path) -> None:
    sharded = build_tiny(tmp_path / "sharded", shards=3, **SMALL)
    (sharded / "pytorch_model.bin").write_bytes(b"old")
    got = rewritten(opened(sharded), tmp_path / "out", Rewrite())
    assert all(same_bits(got[name], tensor) for name, tensor in stored(tiny).items())
    weights = {path.name for path in (tmp_path / "out").iterdir() if "safetensors" in path.name or path.suffix == ".bin"}
    assert weights == {"model.safetensors"}


def test_large_checkpoints_get_shards_and_an_index_of_exactly_what_is_there(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from qvlopt.artifact.tensors import FolderWriter
    from qvlopt.model import rewrite

    monkeypatch.setattr(rewrite, "FolderWriter", lambda folder, plan: FolderWriter(folder, plan, max_shard_bytes=300_000))
    got = rewritten(opened(tiny), tmp_path / "out", Rewrite())
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 1
    assert set(index["weight_map"]) == set(got)
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in got.values())
    for name, file in index["weight_map"].items():
        with safe_open(tmp_path / "out" / file, "pt") as shard:
            assert name in shard.keys()  # noqa: SIM118


def test_old_prefixes_are_written_as_engines_know_them(tiny: Path, tmp_path: Path) -> None:
    old = build_tiny(tmp_path / "old", old_prefix=True, **SMALL)
    assert "visual.merger.norm.weight" in stored(old)
    got = rewritten(opened(old), tmp_path / "out", Rewrite(added={NORM: torch.zeros(64).bfloat16()}))
    expected = {**stored(tiny), NORM: torch.zeros(64).bfloat16()}
    assert set(got) == set(expected)
    assert all(same_bits(got[name], tensor) for name, tensor in expected.items())


def test_only_the_models_own_files_are_copied(tmp_path: Path) -> None:
    folder = build_tiny(tmp_path / "tiny", **SMALL)
    (folder / "LICENSE").write_text("free")
    (folder / "README.md").write_text("another card")
    (folder / "qvlopt.json").write_text("{}")
    (folder / ".gitattributes").write_text("*")
    (folder / "model.gguf").write_bytes(b"GGUF")
    (folder / "onnx").mkdir()
    (folder / "added_tokens.json").symlink_to(folder / "vocab.json")
    rewritten(opened(folder), tmp_path / "out", Rewrite())
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"LICENSE", "added_tokens.json", "chat_template.jinja", "tokenizer.json"} <= names
    assert names.isdisjoint({"README.md", "qvlopt.json", ".gitattributes", "model.gguf", "onnx"})
    copied = tmp_path / "out" / "added_tokens.json"
    assert not copied.is_symlink()
    assert copied.read_bytes() == (folder / "vocab.json").read_bytes()


def test_a_cast_reaches_every_float_tensor_and_says_so_in_the_config(tiny: Path, tmp_path: Path) -> None:
    added = {f"{LINEAR}.qweight": torch.zeros(2, 3, dtype=torch.int32)}
    got = rewritten(opened(tiny), tmp_path / "out", Rewrite(added=added, cast=torch.float16))
    for name, tensor in stored(tiny).items():
        assert same_bits(got[name], tensor.half())
    assert got[f"{LINEAR}.qweight"].dtype == torch.int32
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (tiny, tmp_path / "out"))
    assert after["text_config"].pop("dtype") == "float16"
    assert before["text_config"].pop("dtype") == "bfloat16"
    assert after == {**before, "dtype": "float16"}


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_the_dtype_is_set_wherever_the_config_names_one(tmp_path: Path, key: str) -> None:
    folder = build_tiny(tmp_path / "tiny", **SMALL)
    config = json.loads((folder / "config.json").read_text())
    config[key] = config["vision_config"][key] = "bfloat16"
    (folder / "config.json").write_text(json.dumps(config))
    rewritten(opened(folder), tmp_path / "out", Rewrite(cast=torch.float16))
    after = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (after[key], after["vision_config"][key]) == ("float16", "float16")


def test_a_config_without_a_dtype_gets_one_with_a_cast(tmp_path: Path) -> None:
    folder = build_tiny(tmp_path / "tiny", **SMALL)
    config = json.loads((folder / "config.json").read_text())
    del config["text_config"]["dtype"]
    (folder / "config.json").write_text(json.dumps(config))
    rewritten(opened(folder), tmp_path / "out", Rewrite(cast=torch.float16))
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {**config, "dtype": "float16"}


def test_a_quantisation_adds_one_key_to_the_config_and_keeps_the_rest_in_order(tiny: Path, tmp_path: Path) -> None:
    rewritten(opened(tiny), tmp_path / "out", Rewrite(quantization_config={"quant_method": "awq"}))
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (tiny, tmp_path / "out"))
    assert after.pop("quantization_config") == {"quant_method": "awq"}
    assert json.dumps(after) == json.dumps(before)


def test_what_does_not_fit_the_cast_is_named(tmp_path: Path) -> None:
    source = opened(with_first_value(build_tiny(tmp_path / "tiny", **SMALL), {EMBEDDING: 1e6}))
    (tmp_path / "out").mkdir()
    with pytest.raises(RunError, match=rf"^{EMBEDDING}: 999424 does not fit torch\.float16, whose largest is 65504 \(set .*dtype: source\)"):
        write_rewritten(tmp_path / "out", source, Rewrite(cast=torch.float16))


@pytest.mark.parametrize("cast", [None, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_a_tensor_outside_the_scope_that_is_not_finite_is_named_too(tmp_path: Path, value: float, cast: torch.dtype | None) -> None:
    source = opened(with_first_value(build_tiny(tmp_path / "tiny", **SMALL), {EMBEDDING: value}))
    (tmp_path / "out").mkdir()
    with pytest.raises(RunError, match=rf"{EMBEDDING} holds NaN or infinity"):
        write_rewritten(tmp_path / "out", source, Rewrite(cast=cast))


REWRITE = Rewrite(added={NORM: torch.full((64,), 2.0).bfloat16()})


@pytest.mark.parametrize("name", [NORM, LINEAR + ".weight", EMBEDDING])
@pytest.mark.parametrize("cast", [None, torch.float32], ids=str)
def test_the_check_finds_a_changed_tensor(tiny: Path, tmp_path: Path, name: str, cast: torch.dtype | None) -> None:
    (tmp_path / "out").mkdir()
    rewrite = Rewrite(added=REWRITE.added, cast=cast)
    write_rewritten(tmp_path / "out", opened(tiny), rewrite)
    with_first_value(tmp_path / "out", {name: 77.0})
    with pytest.raises(RunError, match=rf"self-check failed, {name} is not what was meant"):
        verify_rewritten(tmp_path / "out", opened(tiny), rewrite)


@pytest.mark.parametrize("change", ["missing", "foreign"])
def test_the_check_finds_a_tensor_too_few_or_too_many(tiny: Path, tmp_path: Path, change: str) -> None:
    (tmp_path / "out").mkdir()
    write_rewritten(tmp_path / "out", opened(tiny), REWRITE)
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    if change == "missing":
        del tensors[NORM]
    else:
        tensors["model.visual.merger.linear_fc1.weight_old"] = torch.zeros(1)
    save_file(tensors, tmp_path / "out" / "model.safetensors")
    with pytest.raises(RunError, match=r"self-check failed, the tensors are not those planned: model\.visual\.merger"):
        verify_rewritten(tmp_path / "out", opened(tiny), REWRITE)
