"""An ONNX artifact, opened: the graphs, the tables that the host looks up, and the digests that caches go by."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from pathlib import Path

import onnxruntime as ort

from qvlopt.artifact.digest import digest_of
from qvlopt.artifact.manifest import Manifest, read_manifest
from qvlopt.errors import RunError
from qvlopt.graphs import names
from qvlopt.graphs.saturation import require_exact
from qvlopt.graphs.tables import EmbeddingRows, position_table
from qvlopt.model.config import ModelConfig, read_config
from qvlopt.runtime import ONNX_KINDS, language_model, vision_encoder
from qvlopt.runtime.language_model import LanguageModel, LanguageShape
from qvlopt.runtime.sessions import AGAIN, check_interface, open_session
from qvlopt.runtime.vision_encoder import VisionEncoder

FLOAT = "export"
"""The kind whose graphs multiply in float32 only."""


@dataclass(frozen=True)
class OnnxModel:
    """What runs.

    `vision_digest` and `digest` are SHA-256 of all that decides the tower's features, and of all that decides keys and
    values: graphs and weights by content, ONNX Runtime's version, the machine's architecture.
    """

    vision: VisionEncoder
    language: LanguageModel
    embeddings: EmbeddingRows
    settings: ModelConfig
    kind: str
    artifact_digest: str
    vision_digest: str
    digest: str
    threads: int


def load_onnx_model(folder: Path, *, threads: int) -> OnnxModel:
    """Opens the graphs. Raises RunError for a part that is missing, broken, or not of the form that this version writes."""
    manifest = read_manifest(folder)
    if manifest.kind not in ONNX_KINDS:
        raise RunError(f"{folder} is an artifact of kind {manifest.kind}, expected {' or '.join(ONNX_KINDS)}")
    require_exact(manifest)
    settings = read_config(folder)
    for graph in (names.VISION_GRAPH, names.DECODER_GRAPH):
        if not (folder / graph).is_file():
            raise RunError(f"{folder} has no {graph}, so it cannot answer", hint="export it with parts: [vision, decoder]")
    # The head is what a session reads and copies last, and the largest: its two forms are there at once, so it comes before the tower.
    language = _language_model(folder, manifest.kind, settings, threads)
    vision = open_session(folder / names.VISION_GRAPH, threads=threads, spins=False, prepack=manifest.kind != FLOAT)
    taps = len(settings.vision.deepstack_visual_indexes)
    inputs, outputs = vision_encoder.interface(taps)
    check_interface(vision, folder / names.VISION_GRAPH, inputs=inputs, outputs=outputs)
    embeddings = EmbeddingRows(folder)
    expected = (settings.text["vocab_size"], settings.text["hidden_size"])
    if embeddings.shape != expected:
        raise RunError(f"{folder / names.TABLES}: {names.EMBED_TABLE} is {embeddings.shape}, config.json says {expected}", hint=AGAIN)
    return OnnxModel(
        vision=VisionEncoder(vision, settings.vision, position_table(folder)),
        language=language,
        embeddings=embeddings,
        settings=settings,
        kind=manifest.kind,
        artifact_digest=manifest.digest,
        vision_digest=_content_digest(manifest, (names.VISION_GRAPH, names.data_file(names.VISION_GRAPH), names.TABLES)),
        digest=_content_digest(manifest, tuple(manifest.files)),
        threads=threads,
    )


def _language_model(folder: Path, kind: str, settings: ModelConfig, threads: int) -> LanguageModel:
    text = settings.text
    shape = LanguageShape(
        layers=text["num_hidden_layers"],
        kv_heads=text["num_key_value_heads"],
        head_dim=text["head_dim"],
        hidden=text["hidden_size"],
        taps=len(settings.vision.deepstack_visual_indexes),
        vocabulary=text["vocab_size"],
    )
    inputs, outputs = language_model.interface(shape)
    opened = []
    for graph in (names.DECODER_GRAPH, names.DECODE_GRAPH):
        if not (folder / graph).is_file():
            continue
        opened.append(open_session(folder / graph, threads=threads, spins=True, prepack=kind != FLOAT))
        check_interface(opened[-1], folder / graph, inputs=inputs, outputs=outputs)
    return LanguageModel(opened[0], shape, *opened[1:])


def _content_digest(manifest: Manifest, files: tuple[str, ...]) -> str:
    """The manifest's digests of these files, where they are weights or graphs, and what else may change a bit of the result."""
    content = {name: manifest.files[name].sha256 for name in files if name in manifest.files and _computes(name)}
    return digest_of({"files": content, "onnxruntime": ort.__version__, "machine": platform.machine()})


def _computes(name: str) -> bool:
    return name.endswith((".onnx", ".onnx.data", ".safetensors"))
