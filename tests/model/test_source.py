"""A checkpoint is found where the recipe says, and refused before any work when it cannot be run exactly."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from qvlopt.errors import RunError, UsageError
from qvlopt.model.shapes import canonical_name, parameter_shapes
from qvlopt.model.source import Source, open_source
from qvlopt.model.vision import VisionConfig
from tests.tiny import build_tiny, tensor_shapes, tiny_config


def opened(folder: Path) -> Source:
    return open_source(str(folder), folder=folder.parent)


def change_config(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))


def change_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def test_names_and_shapes_are_those_of_the_architecture() -> None:
    for tied in (True, False):
        config = tiny_config(tied=tied, vision={"depth": 3, "hidden_size": 96, "num_heads": 3})
        assert parameter_shapes(VisionConfig.from_dict(config["vision_config"]), config["text_config"], tied=tied) == tensor_shapes(config)


@pytest.mark.parametrize(("stored", "canonical"), [
    ("model.visual.merger.norm.weight", "model.visual.merger.norm.weight"),
    ("visual.merger.norm.weight", "model.visual.merger.norm.weight"),
    ("model.layers.0.mlp.up_proj.weight", "model.language_model.layers.0.mlp.up_proj.weight"),
    ("model.embed_tokens.weight", "model.language_model.embed_tokens.weight"),
    ("language_model.model.norm.weight", "model.language_model.norm.weight"),
    ("language_model.lm_head.weight", "lm_head.weight"),
    ("lm_head.weight", "lm_head.weight"),
])  # fmt: skip
def test_old_and_new_prefixes_have_one_canonical_name(stored: str, canonical: str) -> None:
    assert canonical_name(stored) == canonical


def test_a_folder_is_looked_up_beside_the_recipe_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    build_tiny(here / "model", seed=1)
    build_tiny(there / "model", seed=2)
    monkeypatch.chdir(there)
    assert open_source("model", folder=here).folder.resolve() == (here / "model").resolve()
    assert open_source("model", folder=tmp_path).folder.resolve() == (there / "model").resolve()


def test_old_prefixes_and_shards_open_as_the_same_parameters(tmp_path: Path) -> None:
    new = opened(build_tiny(tmp_path / "new"))
    old = opened(build_tiny(tmp_path / "old", old_prefix=True, shards=3))
    assert set(old.names) == set(new.names)
    assert old.names["model.visual.merger.norm.weight"] == "visual.merger.norm.weight"
    assert old.storages == new.storages


def test_the_digest_covers_what_decides_the_answers_and_nothing_else(tmp_path: Path) -> None:
    first, second = build_tiny(tmp_path / "first"), build_tiny(tmp_path / "second")
    (second / "README.md").write_text("another card")
    (second / "qvlopt.json").write_text('{"seconds": 1}')
    assert opened(first).digest == opened(second).digest
    for name, text in (("chat_template.jinja", "{{ 1 }}"), ("generation_config.json", "{}")):
        kept = (second / name).read_text()
        (second / name).write_text(text)
        assert opened(first).digest != opened(second).digest, name
        (second / name).write_text(kept)
    assert opened(first).digest != opened(build_tiny(tmp_path / "third", seed=1)).digest


def test_a_builtin_name_is_the_shipped_folder_and_an_unknown_one_a_usage_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qvlopt.recipe.shipped.shipped_root", lambda kind: tmp_path / kind)
    shipped = build_tiny(tmp_path / "assets" / "nano")
    source = open_source("builtin:nano", folder=tmp_path)
    assert (source.id, source.folder, source.revision) == ("builtin:nano", shipped, None)
    with pytest.raises(UsageError, match="builtin:nono"):
        open_source("builtin:nono", folder=tmp_path)


def test_a_path_that_leads_nowhere_is_named(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="no checkpoint at nowhere"):
        open_source("nowhere", folder=tmp_path)
    (tmp_path / "file").write_text("x")
    with pytest.raises(RunError, match="expected a folder, found a file"):
        open_source("file", folder=tmp_path)


def test_a_hub_id_offline_names_the_cache_and_touches_no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(RunError, match=r"nobody/nothing.*not in the cache .*HF_HUB_OFFLINE is set"):
        open_source("nobody/nothing", folder=tmp_path)


def test_a_hub_id_opens_from_the_caches_snapshot_of_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    repository = tmp_path / "hub" / "models--some--model"
    snapshot = repository / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("a" * 40)
    for file in build_tiny(repository / "blobs").iterdir():
        (snapshot / file.name).symlink_to(Path("../../blobs") / file.name)
    asked: dict[str, Any] = {}

    def from_cache(repo_id: str, **options: Any) -> str:
        asked.update(options, repo_id=repo_id)
        return str(snapshot)

    monkeypatch.setattr("huggingface_hub.snapshot_download", from_cache)
    source = open_source("some/model", revision="main", folder=tmp_path)
    assert (source.id, source.revision, source.folder) == ("some/model", "a" * 40, snapshot)
    assert source.tensors.read("model.visual.merger.norm.weight").shape == (128,)
    assert asked["local_files_only"] is True
    assert not any(pattern.endswith((".bin", ".py", ".pt")) for pattern in asked["allow_patterns"])


def test_a_folder_named_like_a_hub_id_goes_before_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qvlopt.model.source.download", lambda *_, **__: pytest.fail("asked the hub"))
    build_tiny(tmp_path / "some" / "model")
    assert open_source("some/model", folder=tmp_path).revision is None


def test_a_lora_adapter_is_refused_even_beside_a_whole_model(tmp_path: Path) -> None:
    folder = build_tiny(tmp_path / "tiny")
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    with pytest.raises(RunError, match=r"LoRA adapter .*merge it"):
        opened(folder)


def test_pickled_weights_are_refused(tmp_path: Path) -> None:
    folder = build_tiny(tmp_path / "tiny")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(RunError, match=r"pytorch_model.bin; only safetensors"):
        opened(folder)


@pytest.mark.parametrize(("change", "why"), [
    (lambda c: c.update(model_type="qwen2_5_vl"), "model_type is 'qwen2_5_vl', expected 'qwen3_vl'"),
    (lambda c: c.pop("vision_config"), "vision_config is missing"),
    (lambda c: c["vision_config"].pop("depth"), "vision_config lacks depth"),
    (lambda c: c["text_config"].pop("head_dim"), "text_config lacks head_dim"),
    (lambda c: c.pop("image_token_id"), "image_token_id is missing"),
    (lambda c: c["text_config"].update(dtype="int8"), "dtype is 'int8'"),
    (lambda c: c.update(quantization_config={"quant_method": "gptq"}), "quant_method is 'gptq', supported are awq"),
    (lambda c: c.update(quantization_config={"quant_method": "awq", "version": "gemv"}), "AWQ version is 'gemv'"),
    (lambda c: c.update(quantization_config={"quant_method": "awq"}), "says quant_method 'awq', the tensors are not quantised"),
])  # fmt: skip
def test_a_config_that_cannot_be_run_is_refused_by_its_key(tmp_path: Path, change: Callable[[dict[str, Any]], object], why: str) -> None:
    folder = build_tiny(tmp_path / "tiny")
    change_config(folder, change)
    with pytest.raises(RunError, match=why):
        opened(folder)


def test_missing_unknown_and_misshapen_tensors_are_named_all_at_once(tmp_path: Path) -> None:
    folder = build_tiny(tmp_path / "tiny")

    def change(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["model.visual.blocks.1.attn.qkv.bias"]
        tensors["model.visual.extra.weight"] = torch.zeros(2)
        tensors["model.language_model.norm.weight"] = torch.zeros(3)

    change_tensors(folder, change)
    missing, unknown = "missing: model.visual.blocks.1.attn.qkv.bias", "unknown: model.visual.extra.weight"
    with pytest.raises(RunError, match=rf"{missing}; {unknown}; of another shape: .*norm.weight is \[3\], expected \[128\]"):
        opened(folder)


def test_stored_rotary_frequencies_of_old_checkpoints_are_no_unknown_tensors(tmp_path: Path) -> None:
    folder = build_tiny(tmp_path / "tiny", old_prefix=True)
    change_tensors(folder, lambda t: t.update({"model.rotary_emb.inv_freq": torch.zeros(16)}))
    assert opened(folder).storages


def test_one_parameter_under_two_names_is_refused(tmp_path: Path) -> None:
    folder = build_tiny(tmp_path / "tiny")
    change_tensors(folder, lambda t: t.update({"visual.merger.norm.weight": torch.zeros(128)}))
    with pytest.raises(RunError, match="same parameter under two names"):
        opened(folder)


def test_untied_with_an_absent_head_is_refused(tmp_path: Path) -> None:
    folder = build_tiny(tmp_path / "tiny", tied=False)
    change_tensors(folder, lambda t: t.pop("lm_head.weight"))
    with pytest.raises(RunError, match="tie_word_embeddings false, but there is no lm_head"):
        opened(folder)


@pytest.mark.parametrize(
    ("flag", "head", "tied"), [(True, "none", True), (True, "same", True), (False, "own", False), (None, "none", True), (None, "own", False)]
)
def test_the_tie_follows_flag_and_tensors(tmp_path: Path, flag: bool | None, head: str, tied: bool) -> None:
    folder = build_tiny(tmp_path / "tiny", tied=head != "own")
    if head == "same":
        change_tensors(folder, lambda t: t.update({"lm_head.weight": t["model.language_model.embed_tokens.weight"].clone()}))
    for section in (lambda c: c, lambda c: c["text_config"]):
        change_config(folder, lambda c, of=section: of(c).pop("tie_word_embeddings") if flag is None else of(c).update(tie_word_embeddings=flag))
    assert opened(folder).tied is tied


def test_tied_with_a_head_of_its_own_is_refused(tmp_path: Path) -> None:
    folder = build_tiny(tmp_path / "tiny", tied=False)
    change_config(folder, lambda c: c.update(tie_word_embeddings=True))
    with pytest.raises(RunError, match=r"tie_word_embeddings true, but lm_head\.weight differs"):
        opened(folder)


def test_quantised_tensors_under_a_config_that_does_not_say_so_are_refused(tmp_path: Path) -> None:
    folder = build_tiny(tmp_path / "tiny", dtype="float8")
    change_config(folder, lambda c: c.pop("quantization_config"))
    with pytest.raises(RunError, match="says quant_method None, the tensors are fp8"):
        opened(folder)


def test_a_read_only_folder_with_blanks_and_accents_opens(tmp_path: Path) -> None:
    folder = build_tiny(tmp_path / "Modèle 模型 1")
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    folder.chmod(0o555)
    try:
        assert opened(folder).digest
    finally:
        folder.chmod(0o755)
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == before
    shutil.rmtree(folder)
