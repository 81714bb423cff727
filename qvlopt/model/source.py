"""A checkpoint, found and checked from its config and tensor headers alone; no weight is read until somebody asks.

What cannot be run exactly is refused here, before any work: adapters, pickled weights, another model family, tensors
that are missing, unknown or of another shape, a tie flag that the tensors contradict.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qvlopt.artifact.digest import digest_of, sha256_file
from qvlopt.artifact.manifest import MANIFEST
from qvlopt.artifact.tensors import TensorFiles
from qvlopt.errors import RunError
from qvlopt.model.config import ModelConfig, read_config
from qvlopt.model.hub import download, is_hub_id
from qvlopt.model.shapes import EMBEDDING, canonical_name, parameter_shapes
from qvlopt.model.stored import METHODS, Storage, storage_of
from qvlopt.recipe.paths import resolve_path
from qvlopt.recipe.shipped import BUILTIN

DIGESTED = ("*.safetensors", "*.json", "*.jinja", "*.txt", "*.model")
"""Files that decide what a model computes: weights, settings, tokenizer, template."""
NAMED_IN_ERRORS = 3


@dataclass(frozen=True)
class Source:
    """A checked checkpoint folder.

    `names` maps canonical tensor names to stored ones, `storages` every parameter (canonical, `.weight` or `.bias`) to how
    it is stored. `id` is the path as the user wrote it, `revision` the hub's commit.
    """

    folder: Path
    settings: ModelConfig
    tensors: TensorFiles
    id: str
    revision: str | None
    names: Mapping[str, str]
    storages: Mapping[str, Storage]
    tied: bool

    @property
    def config(self) -> dict[str, Any]:
        """config.json as it stands in the folder."""
        return self.settings.raw

    @functools.cached_property
    def digest(self) -> str:
        """SHA-256 over the files that decide what the model computes, by name and content. Reads all weights once."""
        files = sorted({path for pattern in DIGESTED for path in self.folder.glob(pattern) if path.is_file()})
        return digest_of({path.name: sha256_file(path) for path in files if path.name != MANIFEST and not path.name.startswith(".")})


def open_source(path: str, *, revision: str | None = None, folder: Path, cached: bool = False) -> Source:
    """The checkpoint that `path` names: `builtin:NAME`, a folder (of the recipe's `folder` first), or a hub id.

    The hub is asked only for a path written ORGANISATION/NAME that no folder has, with `cached` only its cache. Raises RunError for whatever is wrong
    with the checkpoint, UsageError for an unknown builtin name.
    """
    place, commit = _find(path, revision, folder, cached=cached)
    _refuse_unusable(place)
    settings = read_config(place)
    tensors = TensorFiles.open(place)
    names = _canonical_names(tensors)
    tied = _is_tied(settings, names, tensors)
    storages = _check_tensors(settings, names, tensors, tied)
    _check_method(settings, storages, place)
    return Source(place, settings, tensors, path, commit, names, storages, tied)


def _find(path: str, revision: str | None, folder: Path, *, cached: bool) -> tuple[Path, str | None]:
    """The folder of a checkpoint, and the commit when it came from the hub."""
    place = resolve_path(path, folder, kind="assets")
    if place is None and not path.startswith(BUILTIN) and is_hub_id(path):
        snapshot = download(path, revision=revision, cached=cached)
        return snapshot, snapshot.name
    if place is None or not place.is_dir():
        found = "a file" if place is not None else "nothing"
        raise RunError(f"no checkpoint at {path}: expected a folder, found {found}", hint="give a folder, a hub id ORGANISATION/NAME or builtin:nano")
    return place, None


def _refuse_unusable(folder: Path) -> None:
    adapters = [name for name in ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin") if (folder / name).exists()]
    if adapters:
        raise RunError(
            f"{folder} holds a LoRA adapter ({adapters[0]}), not a whole model",
            hint="merge it into its base first (peft: merge_and_unload, then save_pretrained) and name the merged folder",
        )
    pickled = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth", "*.ckpt") for path in folder.glob(pattern))
    if pickled and not any(folder.glob("*.safetensors")):
        raise RunError(f"{folder} has its weights only as {pickled[0]}; only safetensors are read", hint="convert the checkpoint to safetensors")


def _canonical_names(tensors: TensorFiles) -> dict[str, str]:
    names: dict[str, str] = {}
    for stored in tensors.entries:
        if stored.endswith("rotary_emb.inv_freq"):  # old checkpoints stored what the config already says
            continue
        canonical = canonical_name(stored)
        if canonical in names:
            raise RunError(f"{tensors.folder}: {names[canonical]} and {stored} are the same parameter under two names")
        names[canonical] = stored
    return names


def _is_tied(settings: ModelConfig, names: Mapping[str, str], tensors: TensorFiles) -> bool:
    """Whether the head is the embedding. transformers 4 leaves `tie_word_embeddings` out when it is true."""
    heads = [name for name in names if name.startswith("lm_head.")]
    if not heads and settings.tied is False:
        raise RunError(
            f"{tensors.folder}: config.json says tie_word_embeddings false, but there is no lm_head.weight",
            hint="set tie_word_embeddings to true if the head is the embedding, else get the missing tensor",
        )
    if not heads or settings.tied is not True:
        return not heads
    stored = names[heads[0]]
    embedding = names.get(EMBEDDING, EMBEDDING)
    if tensors.entry(stored).dtype == tensors.entry(embedding).dtype and tensors.sha256(stored) == tensors.sha256(embedding):
        return True
    raise RunError(
        f"{tensors.folder}: config.json says tie_word_embeddings true, but {stored} differs from {embedding}",
        hint="set tie_word_embeddings to false if the head is to be used, else remove it from the checkpoint",
    )


def _check_tensors(settings: ModelConfig, names: Mapping[str, str], tensors: TensorFiles, tied: bool) -> dict[str, Storage]:
    """How every parameter is stored; what is missing, unknown or of another shape is refused, all at once."""
    storages: dict[str, Storage] = {}
    used = {name for name in names if tied and name.startswith("lm_head.")}
    missing, misshapen = [], []
    for parameter, shape in parameter_shapes(settings.vision, settings.text, tied=tied).items():
        storage = storage_of(parameter, names)
        if storage is None:
            missing.append(parameter)
            continue
        storages[parameter] = storage
        used.update(storage.tensors)
        if parameter in storage.tensors and tensors.entry(names[parameter]).shape != shape:
            misshapen.append(f"{names[parameter]} is {list(tensors.entry(names[parameter]).shape)}, expected {list(shape)}")
    unknown = [names[name] for name in names if name not in used]
    problems = [f"{what}: {_some(found)}" for what, found in (("missing", missing), ("unknown", unknown), ("of another shape", misshapen)) if found]
    if problems:
        raise RunError(
            f"{tensors.folder}: tensors and config.json do not belong together; {'; '.join(problems)}",
            hint="is the download complete, and is config.json this checkpoint's own?",
        )
    return storages


def _check_method(settings: ModelConfig, storages: Mapping[str, Storage], folder: Path) -> None:
    """The config's quant_method and the tensors must tell the same, or an engine would read noise."""
    said = settings.quant_method
    version = (settings.raw.get("quantization_config") or {}).get("version", "gemm")
    if said == "awq" and str(version).lower() != "gemm":
        raise RunError(f"{folder}: AWQ version is {version!r}, only gemm is supported", hint="start from the unquantised checkpoint")
    kinds = {storage.kind for storage in storages.values()} - {"plain"}
    if said is not None and said not in METHODS:
        raise RunError(f"{folder}: quant_method is {said!r}, supported are {', '.join(METHODS)}", hint="start from the unquantised checkpoint")
    expected = {METHODS[said]} if said is not None else set()
    if kinds != expected:
        raise RunError(
            f"{folder}: config.json says quant_method {said!r}, the tensors are {' and '.join(sorted(kinds)) or 'not quantised'}",
            hint="a save that broke off, or files of two checkpoints in one folder: get it again",
        )


def _some(found: list[str]) -> str:
    more = f" and {len(found) - NAMED_IN_ERRORS} more" if len(found) > NAMED_IN_ERRORS else ""
    return ", ".join(found[:NAMED_IN_ERRORS]) + more
