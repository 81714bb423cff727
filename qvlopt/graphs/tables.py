"""The tables that the host looks up: rows of the embedding, through a memory map, and the position table, which is small."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

import numpy as np
import torch

from qvlopt.artifact.tensors import TensorEntry, TensorFiles, TensorWriter, dtype_code
from qvlopt.graphs.names import EMBED_SCALE, EMBED_TABLE, POS_TABLE, TABLES
from qvlopt.graphs.weights import Weights
from qvlopt.model.names import VISION
from qvlopt.model.shapes import EMBEDDING

U8_ZERO = 128
"""What a u8 table holds for 0, as MatMulNBits of 8 bits does without zero points."""
_NUMPY = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16, "U8": np.uint8}


def write_tables(folder: Path, weights: Weights, parts: Collection[str]) -> None:
    """Writes what `parts` (vision, decoder) need: the position table in float32, the embedding in its stored dtype."""
    tensors: dict[str, torch.Tensor] = {}
    if "decoder" in parts:
        embedding = weights(EMBEDDING)
        tensors[EMBED_TABLE] = embedding if embedding.dtype in (torch.float32, torch.float16, torch.bfloat16) else embedding.float()
    if "vision" in parts:
        tensors[POS_TABLE] = weights(f"{VISION}.pos_embed.weight").float()
    plan = [(name, dtype_code(tensor.dtype), tuple(tensor.shape)) for name, tensor in tensors.items()]
    with TensorWriter(folder / TABLES, plan) as writer:
        for name, tensor in tensors.items():
            writer.write(name, tensor)


def position_table(folder: Path) -> torch.Tensor:
    """The learned position table, float32 [side * side, D]. Raises RunError when the folder has none."""
    return TensorFiles.open(folder, weights=TABLES).read(POS_TABLE)


class EmbeddingRows:
    """Rows of the embedding table of an artifact folder, read from the file as they are asked for."""

    def __init__(self, folder: Path) -> None:
        """Raises RunError when the folder has no embedding."""
        files = TensorFiles.open(folder, weights=TABLES)
        self._table = _mapped(files.entry(EMBED_TABLE))
        self._is_bfloat16 = files.entry(EMBED_TABLE).dtype == "BF16"
        self._scale = _mapped(files.entry(EMBED_SCALE)) if EMBED_SCALE in files.entries else None

    @property
    def shape(self) -> tuple[int, int]:
        """(vocab, hidden)"""
        rows, columns = self._table.shape
        return rows, columns

    def rows(self, ids: Sequence[int] | np.ndarray) -> np.ndarray:
        """float32 [len(ids), hidden]. Raises IndexError for an id that the table does not have."""
        found = np.asarray(self._table[np.asarray(ids, dtype=np.int64)])
        if self._scale is not None:
            scale = np.asarray(self._scale[np.asarray(ids, dtype=np.int64)], dtype=np.float32).reshape(len(found), -1)
            centred = found.astype(np.float32) - U8_ZERO
            return centred * np.repeat(scale, found.shape[1] // scale.shape[1], axis=1)
        if self._is_bfloat16:
            return (found.astype(np.uint32) << 16).view(np.float32)
        return found.astype(np.float32)


def _mapped(entry: TensorEntry) -> np.ndarray:
    """The tensor's bytes in the file as an array; bfloat16 as uint16."""
    return np.memmap(entry.file, dtype=_NUMPY[entry.dtype], mode="r", offset=entry.start, shape=entry.shape)
