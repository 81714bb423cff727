"""The language model part by part is the one that the engine runs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from qvlopt.model.language_stages import LanguageStages
from tests.damage.forced import engine_of, source_of
from tests.tiny import build_tiny


@pytest.mark.parametrize("tied", [True, False])
def test_the_parts_in_a_row_are_the_whole(tmp_path: Path, tied: bool) -> None:
    folder = build_tiny(tmp_path / "tiny", dtype="float32", tied=tied)
    model = engine_of(folder).model
    ids = torch.tensor([3, 1, 4, 1, 5, 9, 2, 6])
    positions = torch.stack((torch.arange(8), torch.arange(8) // 2, torch.arange(8) % 3))
    with torch.inference_mode():
        expected = model.text(inputs_embeds=model.text.embed_tokens(ids)[None], position_ids=positions[:, None], use_cache=False).last_hidden_state
        logits = expected @ model.head.T
        stages = LanguageStages(source_of(folder), dtype=torch.float32, device=torch.device("cpu"))
        (hidden,) = stages.embed([ids])
        hidden, angles = hidden[None], stages.angles(positions)
        for index in range(stages.layers):
            hidden = stages.layer(index)(hidden, angles)
        found = stages.head()(hidden)
    assert torch.allclose(found, logits, atol=1e-4)
