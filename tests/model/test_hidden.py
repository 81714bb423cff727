"""Hidden states come back from their file bit for bit."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest
import torch

from qvlopt.errors import RunError
from qvlopt.model.hidden import HiddenStates, HiddenWriter

SHAPES = [(1, 4, 3), (2, 5, 3), (1, 1, 3)]


def written(path: Path) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    states = [torch.randn(shape, generator=generator) for shape in SHAPES]
    with HiddenWriter(path) as writer:
        for state in states:
            writer.append(state.transpose(1, 2).contiguous().transpose(1, 2))  # whatever the strides
    assert writer.digest == hashlib.sha256(path.read_bytes()).hexdigest()
    return states


def test_every_batch_is_read_as_it_was_written_in_any_order(tmp_path: Path) -> None:
    states = written(tmp_path / "h")
    hidden = HiddenStates(tmp_path / "h", SHAPES)
    assert len(hidden) == len(states)
    assert (tmp_path / "h").stat().st_size == sum(state.nbytes for state in states)
    for index in (2, 0, 1, 0):
        assert torch.equal(hidden.read(index), states[index])


def test_what_is_read_is_memory_of_its_own(tmp_path: Path) -> None:
    states = written(tmp_path / "h")
    hidden = HiddenStates(tmp_path / "h", SHAPES)
    hidden.read(0).zero_()
    assert torch.equal(hidden.read(0), states[0])


def test_a_file_that_was_cut_is_named(tmp_path: Path) -> None:
    written(tmp_path / "h")
    os.truncate(tmp_path / "h", 4 * 12 + 8)
    hidden = HiddenStates(tmp_path / "h", SHAPES)
    hidden.read(0)
    with pytest.raises(RunError, match=r"h is cut: batch 1 needs 30 values, got 2"):
        hidden.read(1)
