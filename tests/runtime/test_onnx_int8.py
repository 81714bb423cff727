"""INT8 artifacts answer through the same engine; a decoder and its twin agree on what stands in the buffers they share."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from qvlopt.commands.graphs_result import GraphsResult
from qvlopt.commands.quantize_int8 import quantize_int8
from qvlopt.model.source import open_source
from qvlopt.runtime.onnx_engine import OnnxEngine
from qvlopt.runtime.picture_cache import PictureCache
from qvlopt.runtime.prompt_cache import PromptCache
from qvlopt.runtime.torch_engine import TorchEngine
from tests.asked import one_by_one, prepared_in
from tests.tiny import build_tiny
from tests.tiny_run import SMALL, build_set, tiny_recipe

LAYOUTS = ("int8", "fast", "small")
HEAD_DIM = 32
"""Of tests/tiny.py. One key-value head, so a value channel is one row of v_proj."""
ANSWER = (40, 41, 42, 43, 44, 45)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Values with large channels, which W8A8 smooths and 4 bits do not need; what they are multiplied by is as much smaller.

    Two layers: what the first reads back from the buffer wrongly, the second shows.
    """
    folder = tmp_path_factory.mktemp("model") / "tiny"
    build_tiny(folder, tied=False, **{**SMALL, "text": SMALL["text"] | {"num_hidden_layers": 2}})
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith("v_proj.weight"):
            tensor[::5] *= 32  # exact in bfloat16
        if name.endswith("o_proj.weight"):
            tensor.view(tensor.shape[0], -1, HEAD_DIM)[:, :, ::5] /= 32
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def artifacts(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("int8")
    data = build_set(root / "set")
    folders = {}
    for layout in LAYOUTS:
        section = {"layout": layout, "max_layer_error": 0.2}
        result = quantize_int8(tiny_recipe(model, data, root / layout, quantize_int8=section, calibrate={"samples": 4}))
        assert isinstance(result, GraphsResult)
        folders[layout] = result.output
    return folders


def opened(folder: Path, n_bytes: int) -> OnnxEngine:
    return OnnxEngine.open(folder, threads=1, pictures=PictureCache(n_bytes), prompts=PromptCache(n_bytes))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_caches_change_no_bit_of_an_int8_answer(artifacts: dict[str, Path], tmp_path: Path, layout: str) -> None:
    warm, cold = opened(artifacts[layout], 1 << 24), opened(artifacts[layout], 0)
    prepared = prepared_in(warm, tmp_path)
    expected = one_by_one(cold, prepared)
    for _ in range(2):
        assert warm.generate(prepared[::-1], max_new_tokens=16)[::-1] == expected
    for item in prepared:
        assert torch.equal(warm.score(item, ANSWER).logits, cold.score(item, ANSWER).logits)
    assert warm.prompts.memory.hits > 0


def test_steps_of_every_layout_stay_near_the_source(artifacts: dict[str, Path], model: Path, tmp_path: Path) -> None:
    """In `fast` the steps run in another graph than the prompt: their error may not be more than that graph's own, as in `small`.

    Smoothing of o_proj is folded into the values, so it must be the same in both graphs.
    """
    source = TorchEngine.open(open_source(str(model), folder=model), dtype=torch.float32, device="cpu")
    errors: dict[str, torch.Tensor] = {}
    for layout, folder in artifacts.items():
        engine = opened(folder, 0)
        rows = []
        for item in prepared_in(engine, tmp_path):
            exact, got = source.score(item, ANSWER).logits, engine.score(item, ANSWER).logits
            rows.append((got - exact).norm(dim=-1) / exact.norm(dim=-1))
        errors[layout] = torch.stack(rows).mean(dim=0)
    assert errors["int8"].max() < 0.1
    assert torch.equal(errors["fast"][0], errors["int8"][0])
    assert errors["small"].max() < 0.3
    assert (errors["fast"][1:] < 1.2 * errors["small"][1:].max()).all()
