"""Positions of a prompt's tokens for Qwen3-VL's three-axis rotary embedding (M-RoPE): time, row, column.

Built once a prompt and used by every engine. The rule is `Qwen3VLModel.get_rope_index` of transformers (the oracle in
the tests): text counts all three axes up together; a picture keeps time still while rows and columns count from where
the text stopped; the text after it goes on behind the longer side of the picture, not behind its number of tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch

from qvlopt.errors import RunError

Grid = tuple[int, int]
"""Rows and columns of patches of a preprocessed picture, before merging."""


class RopePositions(NamedTuple):
    """`positions` int64 [3, T]; the token after the prompt has position T + `delta` on all three axes."""

    positions: torch.Tensor
    delta: int


def merged_tokens(grid: Grid, merge: int) -> int:
    """How many tokens a picture of `grid` patches takes in the prompt."""
    return (grid[0] // merge) * (grid[1] // merge)


def rope_positions(ids: Sequence[int], grids: Sequence[Grid], *, image_token_id: int, merge: int) -> RopePositions:
    """Positions of the prompt `ids`, whose pictures stand as runs of `image_token_id`, in the order of `grids`.

    Raises RunError when the image tokens are not those of the grids: more, fewer, or a run cut short.
    """
    pieces: list[torch.Tensor] = []
    at, start = 0, 0  # index into ids; position that comes next
    for number, grid in enumerate(grids):
        first = _find(ids, image_token_id, at)
        count = merged_tokens(grid, merge)
        if first is None or any(token != image_token_id for token in ids[first : first + count]) or first + count > len(ids):
            raise RunError(f"picture {number + 1} of the prompt needs {count} image tokens in a row for its {grid[0]}x{grid[1]} patches")
        pieces.append(_text(first - at, start))
        start += first - at
        pieces.append(_picture(grid, merge) + start)
        start += max(grid) // merge
        at = first + count
    if _find(ids, image_token_id, at) is not None:
        raise RunError(f"the prompt has more image tokens than its {len(grids)} pictures take")
    pieces.append(_text(len(ids) - at, start))
    return RopePositions(torch.cat(pieces, dim=1), start - at)


def _find(ids: Sequence[int], token: int, at: int) -> int | None:
    try:
        return ids.index(token, at)
    except ValueError:
        return None


def _text(length: int, start: int) -> torch.Tensor:
    return torch.arange(start, start + length).expand(3, -1)


@functools.lru_cache(maxsize=1024)
def _picture(grid: Grid, merge: int) -> torch.Tensor:
    """Time, row and column of every merged token, int64 [3, M], row by row from zero. Shared: not to be modified."""
    rows, cols = grid[0] // merge, grid[1] // merge
    row = torch.arange(rows).repeat_interleave(cols)
    return torch.stack((torch.zeros_like(row), row, torch.arange(cols).repeat(rows)))
