"""What a command computes on: threads from recipe, affinity and quota; a GPU where there is one and none is refused."""

from __future__ import annotations

import logging

import torch

from qvlopt.artifact.process import thread_count
from qvlopt.recipe.load import LoadedRecipe

log = logging.getLogger(__name__)


def prepare(loaded: LoadedRecipe) -> torch.device:
    """Sets torch's threads and returns the device. Without CUDA a recipe that asks for it goes on with the CPU and says so."""
    torch.set_num_threads(thread_count(loaded.recipe.hardware.threads))
    asked = loaded.recipe.hardware.device
    if asked == "cuda" and not torch.cuda.is_available():
        log.warning("hardware.device: cuda is not available here, going on with the cpu")
    return torch.device("cuda" if asked != "cpu" and torch.cuda.is_available() else "cpu")
