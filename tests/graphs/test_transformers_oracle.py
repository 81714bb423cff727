"""An oracle that shares no line with the builder: the graph that transformers' own exporter traces from its own model.

That exporter keeps DeepStack (it traces the features' addition by a mask), takes M-RoPE positions from outside because their rule
is no graph, and has every size built in. It needs onnxscript (`pip install onnxscript`) and half a minute, which is why neither the
package nor its tests ask for it: skipped where it is missing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("onnxscript", reason="transformers.exporters needs onnxscript")

from transformers import Qwen3VLForConditionalGeneration
from transformers.exporters.exporter_onnx import OnnxConfig, OnnxExporter

from qvlopt.runtime.engine import Prepared
from qvlopt.runtime.onnx_engine import OnnxEngine
from tests.asked import prepared_in
from tests.tiny import build_tiny
from tests.tiny_onnx import build_onnx
from tests.tiny_run import SMALL

ANSWER = (40, 41, 42)


def inputs_of(model: Qwen3VLForConditionalGeneration, item: Prepared) -> dict[str, Any]:
    """Prompt and answer as transformers takes them; positions by its own rule."""
    ids = torch.tensor([[*item.token_ids, *ANSWER]])
    grids = torch.tensor([[1, *picture.grid] for picture in item.pictures])
    kinds = (ids == model.config.image_token_id).long()
    positions, _ = model.model.get_rope_index(ids, kinds, image_grid_thw=grids)
    pixels = torch.cat([picture.pixel_values for picture in item.pictures])
    shown = {"pixel_values": pixels, "image_grid_thw": grids, "mm_token_type_ids": kinds}
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "position_ids": positions, **shown}


def error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest relative error of a row."""
    return float(((got - expected).norm(dim=-1) / expected.norm(dim=-1)).max())


@pytest.mark.conformance
@pytest.mark.slow
def test_our_graphs_compute_what_transformers_own_export_does(tmp_path: Path) -> None:
    checkpoint = build_tiny(tmp_path / "model", tied=False, seed=3, **SMALL | {"text": SMALL["text"] | {"num_hidden_layers": 2}})
    model = Qwen3VLForConditionalGeneration.from_pretrained(checkpoint, dtype=torch.float32).eval()
    engine = OnnxEngine.open(build_onnx(checkpoint, tmp_path / "onnx"), threads=1)
    item = prepared_in(engine, tmp_path, [("What is it?", [(96, 64)])])[0]
    inputs = inputs_of(model, item)
    exported = OnnxExporter().export(model, inputs | {"use_cache": False}, config=OnnxConfig(dynamic=False))
    rows = slice(len(item.token_ids) - 1, len(item.token_ids) - 1 + len(ANSWER))
    oracle = torch.as_tensor(exported(**inputs)["logits"])[0, rows, : engine.prompter.vocabulary_size]
    assert error(engine.score(item, ANSWER).logits, oracle) < 1e-4
    for name, parameter in model.named_parameters():
        if "deepstack" in name:
            parameter.data.zero_()
    with torch.no_grad():
        without = model(**inputs, use_cache=False).logits[0, rows, : engine.prompter.vocabulary_size]
    assert error(without, oracle) > 1e-2, "the oracle sees DeepStack"
