"""Things that answer. `open_engine` is the one place that chooses; the engines themselves are imported when chosen."""

from __future__ import annotations

from typing import TYPE_CHECKING

from qvlopt.artifact.process import thread_count
from qvlopt.errors import RunError, UsageError
from qvlopt.recipe.load import LoadedRecipe

if TYPE_CHECKING:
    import torch

    from qvlopt.model.source import Source
    from qvlopt.runtime.torch_engine import TorchEngine

LATER = ("onnx", "openai")
"""Engines that a recipe may name and this version does not have."""


def open_engine(path: str, *, loaded: LoadedRecipe) -> TorchEngine:
    """The engine that answers for the checkpoint or artifact at `path`, as the recipe's evaluate section says.

    Sets torch's number of threads. Raises UsageError for an engine of a later version, RunError when the checkpoint
    cannot be run or the recipe asks for a GPU and there is none.
    """
    recipe = loaded.recipe
    if recipe.evaluate.engine in LATER:
        raise UsageError(f"evaluate.engine: {recipe.evaluate.engine} is not in this version", hint="use torch or auto")
    import torch

    from qvlopt.model.source import open_source
    from qvlopt.runtime.torch_engine import TorchEngine

    device = _device(recipe.hardware.device)
    torch.set_num_threads(thread_count(recipe.hardware.threads))
    source = open_source(path, revision=recipe.model.revision if path == recipe.model.path else None, folder=loaded.folder)
    return TorchEngine.open(source, dtype=_dtype(recipe.evaluate.dtype, device, source), device=device, pixels=recipe.pixels)


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
    from qvlopt.model.load import checkpoint_dtype

    if wanted != "auto":
        return DTYPES[wanted]
    return torch.float32 if device == "cpu" else checkpoint_dtype(source)
