"""The check of quantised graphs, on prompts of every kind that a set may hold."""

from __future__ import annotations

from pathlib import Path

from qvlopt.graphs.int8_check import measure_damage
from qvlopt.graphs.torch_layers import Prompt
from qvlopt.graphs.weights import weights_of
from qvlopt.model.positions import rope_positions
from qvlopt.model.prompt import Prompter
from qvlopt.model.source import open_source
from tests.tiny import build_tiny
from tests.tiny_onnx import build_onnx


def test_a_prompt_without_pictures_is_checked_like_any_other(tmp_path: Path) -> None:
    model = build_tiny(tmp_path / "model")
    source, prompter = open_source(str(model), folder=tmp_path), Prompter.from_folder(model)
    ids = prompter.encode("hello there")
    positions, _ = rope_positions(ids, [], image_token_id=prompter.image_token_id, merge=prompter.merge)
    folder = build_onnx(model, tmp_path / "out")
    damage = measure_damage(folder, source.settings, weights_of(source), [Prompt(tuple(ids), positions, ())], threads=1)
    assert damage.positions == len(ids)
    assert max(damage.kl.values()) < 1e-6
    assert damage.cosines == {}
