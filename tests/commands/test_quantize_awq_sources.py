"""quantize-awq on sources as they come: hub caches of links, shards, dtypes, layouts of files, and what must be refused by name."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

from qvlopt.artifact.manifest import read_manifest, verify_files
from qvlopt.commands import awq_stages
from qvlopt.commands.quantize_awq import QuantizeResult, quantize_awq
from qvlopt.errors import QvloptError, RunError, UsageError
from qvlopt.model.load_tower import load_vision
from qvlopt.model.preprocess import PictureProcessor
from qvlopt.model.source import open_source
from tests.tiny import CHAT_TEMPLATE, Dtype, build_tiny
from tests.tiny_run import PLAIN, SMALL, build_set, same_bits, stored, tiny_recipe


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_set(tmp_path_factory.mktemp("data") / "set")


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory, data: Path) -> Path:
    """The artifact of an ordinary source."""
    root = tmp_path_factory.mktemp("plain")
    return quantised(build_tiny(root / "tiny", **SMALL), data, root / "out").output


def quantised(model: Path, data: Path, output: Path, **section: Any) -> QuantizeResult:
    result = quantize_awq(tiny_recipe(model, data, output, quantize_awq={"search": PLAIN, **section}))
    assert isinstance(result, QuantizeResult)
    return result


def tree(folder: Path) -> dict[str, tuple[int, int]]:
    return {str(path): (path.lstat().st_mtime_ns, path.lstat().st_size) for path in folder.rglob("*")}


def hub_cache(root: Path, model: Path) -> Path:
    """A hub's cache as huggingface_hub leaves it: blobs, a snapshot of links into them, and the name of a branch."""
    commit, repository = "a" * 40, root / "hub" / "models--some--model"
    snapshot = repository / "snapshots" / commit
    for folder in (snapshot, repository / "blobs", repository / "refs"):
        folder.mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    for index, file in enumerate(sorted(model.iterdir())):
        file.rename(repository / "blobs" / f"{index:040x}")
        (snapshot / file.name).symlink_to(Path("../../blobs") / f"{index:040x}")
    return snapshot


@pytest.mark.slow
@pytest.mark.parametrize("shards", [1, 3])
def test_a_hub_id_is_read_from_its_cache_of_links_without_network_and_the_cache_is_not_touched(
    data: Path, tmp_path: Path, plain: Path, shards: int
) -> None:
    snapshot = hub_cache(tmp_path, build_tiny(tmp_path / "tiny", shards=shards, **SMALL))
    before = tree(tmp_path / "hub")
    recipe = tmp_path / "r.yaml"
    section = {"group_size": 64, "search": PLAIN}
    calibrate = {"data": str(data), "split": None, "samples": 6}
    hardware = {"device": "cpu", "threads": 1}
    recipe.write_text(json.dumps({"model": {"path": "some/model"}, "calibrate": calibrate, "quantize_awq": section, "hardware": hardware}))
    words = ["quantize-awq", "--recipe", str(recipe), "--output", str(tmp_path / "awq"), "--json"]
    environment = os.environ | {"HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, "-m", "qvlopt", *words], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert tree(tmp_path / "hub") == before
    artifact = tmp_path / "awq"
    assert not any(path.is_symlink() for path in artifact.rglob("*"))
    assert (artifact / "model.safetensors").read_bytes() == (plain / "model.safetensors").read_bytes()
    assert os.stat(artifact / "tokenizer.json").st_nlink == 1
    manifest = read_manifest(artifact)
    assert manifest.source is not None
    assert (manifest.source.path, manifest.source.revision) == ("some/model", snapshot.name)


def test_a_folder_of_links_is_copied_not_linked(data: Path, tmp_path: Path, plain: Path) -> None:
    snapshot = hub_cache(tmp_path, build_tiny(tmp_path / "tiny", **SMALL))
    artifact = quantised(snapshot, data, tmp_path / "out").output
    assert not any(path.is_symlink() for path in artifact.rglob("*"))
    assert (artifact / "model.safetensors").read_bytes() == (plain / "model.safetensors").read_bytes()


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_wider_and_narrower_sources_keep_their_dtype_and_get_the_same_integers(data: Path, tmp_path: Path, plain: Path, dtype: Dtype) -> None:
    model = build_tiny(tmp_path / "tiny", dtype=dtype, **SMALL)
    result = quantised(model, data, tmp_path / "out")
    before, after, expected = stored(model), stored(result.output), stored(plain)
    packed = {name for name in after if name.endswith(("qweight", "qzeros", "scales"))}
    assert packed == {name for name in expected if name.endswith(("qweight", "qzeros", "scales"))}
    assert all(same_bits(after[name], expected[name]) for name in packed)
    assert all(same_bits(after[name], before[name]) for name in set(after) - packed)


def test_a_float32_source_can_be_kept_in_float16(data: Path, tmp_path: Path) -> None:
    result = quantised(build_tiny(tmp_path / "tiny", dtype="float32", **SMALL), data, tmp_path / "out", dtype="float16")
    assert {tensor.dtype for tensor in stored(result.output).values()} == {torch.float16, torch.int32}


@pytest.mark.parametrize("dtype", ["float8", "float8_vision"])
def test_an_fp8_source_is_refused_by_name_before_any_work(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: Dtype) -> None:
    monkeypatch.setattr(awq_stages, "captured", None)
    wide = {"vision": {**SMALL["vision"], "hidden_size": 128, "intermediate_size": 256}, "text": {**SMALL["text"], "hidden_size": 128}}
    model = build_tiny(tmp_path / "tiny", dtype=dtype, **wide)
    with pytest.raises(UsageError, match=r"is quantised already \(fp8\)") as refused:
        quantised(model, data, tmp_path / "out")
    assert "16-bit" in (refused.value.hint or "")
    assert not (tmp_path / "out").exists()


def lora(folder: Path) -> None:
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA"}')


def cut_shard(folder: Path) -> None:
    path = sorted(folder.glob("*.safetensors"))[1]
    os.truncate(path, path.stat().st_size - 10)


def lost_shard(folder: Path) -> None:
    sorted(folder.glob("*.safetensors"))[2].unlink()


def lost_in_index(folder: Path) -> None:
    index = folder / "model.safetensors.index.json"
    fields = json.loads(index.read_text())
    del fields["weight_map"]["model.visual.merger.norm.weight"]
    index.write_text(json.dumps(fields))


def old_file_beside(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"")


def other_tower(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["vision_config"]["depth"] += 1
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lora, r"holds a LoRA adapter \(adapter_config\.json\)"),
        (cut_shard, r"model-00002-of-00003\.safetensors is cut"),
        (lost_shard, r"model-00003-of-00003\.safetensors, which is missing"),
        (lost_in_index, r"tensors are only in the file, such as 'model\.visual\.merger\.norm\.weight'"),
        (old_file_beside, r"holds two sets of weights"),
        (other_tower, r"missing: model\.visual\.blocks\.2\.norm1\.weight"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_broken_source_is_named_before_any_work(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: Callable[[Path], None], said: str
) -> None:
    monkeypatch.setattr(awq_stages, "captured", None)
    model = build_tiny(tmp_path / "tiny", shards=3, **SMALL)
    damage(model)
    with pytest.raises(RunError, match=said) as refused:
        quantised(model, data, tmp_path / "out")
    assert refused.value.exit_code == 5
    assert refused.value.hint
    assert not (tmp_path / "out").exists()


def test_a_generation_config_that_transformers_refuses_keeps_its_bytes(data: Path, tmp_path: Path) -> None:
    model = build_tiny(tmp_path / "tiny", **SMALL)
    text = '{"do_sample": false, "temperature": 0.01, "num_return_sequences": 2,\n "eos_token_id": [1, 2]}'
    (model / "generation_config.json").write_text(text)
    with pytest.raises(ValueError, match="num_return_sequences"):
        GenerationConfig.from_pretrained(str(model)).save_pretrained(tmp_path / "by transformers")
    assert (quantised(model, data, tmp_path / "out").output / "generation_config.json").read_text() == text


def combined(folder: Path) -> None:
    """As transformers 5 writes it: one file for all processors."""
    image = json.loads((folder / "preprocessor_config.json").read_text())
    (folder / "preprocessor_config.json").unlink()
    (folder / "video_preprocessor_config.json").unlink()
    (folder / "processor_config.json").write_text(json.dumps({"image_processor": image, "processor_class": "Qwen3VLProcessor"}))


def template_in_json(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": CHAT_TEMPLATE}))


def template_in_tokenizer(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": CHAT_TEMPLATE}))


@pytest.mark.parametrize("layout", [combined, template_in_json, template_in_tokenizer], ids=lambda layout: layout.__name__)
def test_every_layout_of_the_other_files_arrives_whole_and_reads_alike(data: Path, tmp_path: Path, layout: Callable[[Path], None]) -> None:
    model = build_tiny(tmp_path / "tiny", **SMALL)
    layout(model)
    artifact = quantised(model, data, tmp_path / "out").output
    names = {path.name for path in model.iterdir()} - {"config.json", "model.safetensors"}
    assert all((artifact / name).read_bytes() == (model / name).read_bytes() for name in names)
    assert {path.name for path in artifact.iterdir()} == names | {"config.json", "model.safetensors", "README.md", "qvlopt.json"}
    tower = load_vision(open_source(str(artifact), folder=artifact), dtype=torch.float32, device="cpu").config
    assert PictureProcessor.for_tower(artifact, tower) == PictureProcessor.for_tower(model, tower)
    assert verify_files(artifact) == []


@pytest.mark.slow
def test_a_file_that_may_not_grow_leaves_no_artifact_and_the_run_goes_on_later(data: Path, tmp_path: Path, plain: Path) -> None:
    model = build_tiny(tmp_path / "tiny", **SMALL)
    script = """
import resource, sys
limit = int(sys.argv[1])
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
import signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
from qvlopt.cli.app import main
main(sys.argv[2:])
"""
    recipe = tmp_path / "r.yaml"
    fields = {"model": {"path": str(model)}, "output": str(tmp_path / "out"), "hardware": {"device": "cpu", "threads": 1}}
    calibrate = {"data": str(data), "split": None, "samples": 6}
    recipe.write_text(json.dumps(fields | {"calibrate": calibrate, "quantize_awq": {"group_size": 64, "search": PLAIN}}))
    size = (plain / "model.safetensors").stat().st_size
    words = ["quantize-awq", "--recipe", str(recipe)]
    done = subprocess.run([sys.executable, "-c", script, str(size // 2), *words], capture_output=True, text=True, check=False)
    assert done.returncode == 5
    assert "larger than allowed" in done.stderr
    assert os.listdir(tmp_path / "out") == [".awq.part"]
    again = subprocess.run([sys.executable, "-m", "qvlopt", *words, "--resume"], capture_output=True, text=True, check=False)
    assert again.returncode == 0, again.stderr
    assert (tmp_path / "out" / "awq" / "model.safetensors").read_bytes() == (plain / "model.safetensors").read_bytes()
    assert os.listdir(tmp_path / "out") == ["awq"]


def test_every_refusal_is_one_of_ours(data: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for path in (tmp_path / "empty", tmp_path / "nowhere"):
        with pytest.raises(QvloptError):
            quantised(path, data, tmp_path / "out")
