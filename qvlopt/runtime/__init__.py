"""Things that answer. `open_engine` is the one place that chooses; the engines themselves are imported when chosen."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from qvlopt.artifact.manifest import MANIFEST, read_manifest
from qvlopt.artifact.process import thread_count
from qvlopt.errors import RunError
from qvlopt.recipe.load import LoadedRecipe
from qvlopt.recipe.paths import resolve_path
from qvlopt.recipe.schema import Attention

if TYPE_CHECKING:
    import torch

    from qvlopt.model.source import Source
    from qvlopt.runtime.engine import Engine, LocalEngine

ONNX_KINDS = ("export", "int8")
"""Kinds of artifact that ONNX Runtime answers for; torch does for checkpoints and for all others."""


def open_engine(path: str, *, loaded: LoadedRecipe, attention: Attention = "sdpa", compiled: bool = False) -> Engine:
    """The engine that answers for the checkpoint or artifact at `path`, or at `URL#model`, as the recipe's evaluate section says.

    What is at `path` decides, not `evaluate.engine`, which is about candidates: their base may need another engine.
    `attention` and `compiled` are about torch's language model. Sets torch's number of threads. Raises RunError when it cannot
    be run or the recipe asks for a GPU and there is none.
    """
    if "://" in path:
        from qvlopt.runtime.openai_engine import OpenAIEngine

        return OpenAIEngine.open(path, loaded=loaded)
    folder = resolve_path(path, loaded.folder, kind="assets")
    kind = read_manifest(folder).kind if folder is not None and (folder / MANIFEST).is_file() else "checkpoint"
    return _onnx(folder, loaded) if folder is not None and kind in ONNX_KINDS else _torch(path, loaded, attention, compiled)


def _onnx(folder: Path, loaded: LoadedRecipe) -> LocalEngine:
    from qvlopt.runtime.onnx_engine import OnnxEngine

    recipe = loaded.recipe
    if recipe.hardware.device == "cuda":
        raise RunError(f"hardware.device: cuda was asked for, {folder} runs on the CPU only", hint="set hardware.device to cpu or auto")
    return OnnxEngine.open(folder, threads=thread_count(recipe.hardware.threads), pixels=recipe.pixels)


def _torch(path: str, loaded: LoadedRecipe, attention: Attention, compiled: bool) -> LocalEngine:
    import torch

    from qvlopt.model.source import open_source
    from qvlopt.runtime.torch_engine import TorchEngine

    recipe = loaded.recipe
    device = _device(recipe.hardware.device)
    torch.set_num_threads(thread_count(recipe.hardware.threads))
    source = open_source(path, revision=recipe.model.revision if path == recipe.model.path else None, folder=loaded.folder)
    dtype = _dtype(recipe.evaluate.dtype, device, source)
    engine = TorchEngine.open(source, dtype=dtype, device=device, pixels=recipe.pixels, attn_implementation=attention)
    if compiled:
        engine.compile()
    return engine


def _device(wanted: str) -> str:
    import torch

    available = torch.cuda.is_available()
    if wanted == "cuda" and not available:
        raise RunError("hardware.device: cuda was asked for, torch sees no GPU", hint="set hardware.device to cpu or auto")
    return "cuda" if available and wanted != "cpu" else "cpu"


def _dtype(wanted: str, device: str, source: Source) -> torch.dtype:
    """auto: float32 on the CPU, where answers must not depend on the batch; the checkpoint's own on a GPU."""
    import torch

    from qvlopt.model.config import DTYPES
    from qvlopt.model.parameters import checkpoint_dtype

    if wanted != "auto":
        return DTYPES[wanted]
    return torch.float32 if device == "cpu" else checkpoint_dtype(source)
