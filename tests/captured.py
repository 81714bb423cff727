"""A tower's statistics all at once, for tests."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch

from qvlopt.artifact.unfinished import Parts
from qvlopt.model.capture import Capture
from qvlopt.model.input_sums import GramSum
from qvlopt.model.source import Source
from qvlopt.model.stage_forward import Batch
from qvlopt.model.token_draw import MOST_TOKENS
from qvlopt.quant.objective import Gram


def capture_vision(
    source: Source, batches: Iterable[Batch], folder: Path, *, seed: int = 0, most_tokens: int = MOST_TOKENS, sums: type[GramSum] = GramSum
) -> dict[str, Gram]:
    """`folder` holds the hidden states meanwhile."""
    capture = Capture(source, Parts(folder), torch.device("cpu"), seed, most_tokens, sums=sums)
    try:
        return {name: gram for _, grams in capture.stages(lambda: batches) for name, gram in grams.items()}
    finally:
        capture.parts.remove()
