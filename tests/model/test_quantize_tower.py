"""The tower stage by stage: what is written in place of what, and what stops it by name."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from qvlopt.errors import RunError
from qvlopt.model import quantize_tower as module
from qvlopt.model.awq_choice import choose
from qvlopt.model.names import vision_linears
from qvlopt.model.quantize import QuantizedStage, quantize_stage
from qvlopt.model.quantize_tower import QuantizedTower, quantize_tower
from qvlopt.model.source import Source, open_source
from qvlopt.quant.objective import Gram
from qvlopt.recipe.load import load_recipe
from tests.captured import capture_vision
from tests.tiny import build_tiny
from tests.tiny_run import SMALL, with_first_value

CPU = torch.device("cpu")
NORM = "model.visual.blocks.0.norm1.weight"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Source:
    return opened(build_tiny(tmp_path_factory.mktemp("tower") / "tiny", **SMALL))


def opened(folder: Path) -> Source:
    return open_source(str(folder), folder=folder.parent)


def statistics(source: Source) -> dict[str, Gram]:
    pixels = torch.randn(2, 16, source.settings.vision.patch_dim, generator=torch.Generator().manual_seed(0))
    with tempfile.TemporaryDirectory() as folder:
        return capture_vision(source, [(pixels, (4, 4))], Path(folder) / "hidden")


def quantised(source: Source, *, read: Callable[[str], Gram] | None = None, seen: Any = lambda _n, _t: None, **section: Any) -> QuantizedTower:
    recipe = load_recipe({"model": {"path": "x"}, "quantize_awq": {"group_size": 64, "search": {"grid": 2}, **section}}).recipe
    choice = choose(source, recipe.quantize_awq)
    return quantize_tower(source, recipe.quantize_awq, choice, read=read or statistics(source).__getitem__, device=CPU, seen=seen)


def test_packed_tensors_replace_the_weights_and_nothing_outside_the_tower_is_touched(source: Source) -> None:
    rewrite, reports = quantised(source)
    linears = vision_linears(source.settings.vision)
    assert rewrite.removed == {f"{name}.weight" for name in linears}
    packed = {f"{name}.{suffix}" for name in linears for suffix in ("qweight", "qzeros", "scales")}
    assert packed <= set(rewrite.added)
    assert {name.rpartition(".")[2] for name in set(rewrite.added) - packed} <= {"weight", "bias"}
    assert all(name.startswith("model.visual.") for name in rewrite.added)
    assert {report.name for report in reports} == set(linears)
    assert rewrite.cast is None


def test_a_dequantised_weight_keeps_its_name(source: Source) -> None:
    rewrite, _ = quantised(source, format="bf16", bits=3)
    assert rewrite.removed == frozenset()
    assert rewrite.quantization_config is None
    assert {f"{name}.weight" for name in vision_linears(source.settings.vision)} <= set(rewrite.added)


def test_one_stage_after_the_other_is_told(source: Source) -> None:
    told: list[tuple[int, str]] = []
    quantised(source, seen=lambda count, text: told.append((count, text)), keep=["lm_head", "merger.*", "blocks.0.attn.qkv"])
    assert [count for count, _ in told] == [3, 4, 2]
    assert [text.split(" (")[0] for _, text in told] == ["quantise blocks.0", "quantise blocks.1", "quantise deepstack_merger_list.0"]


def test_statistics_are_read_for_chosen_layers_only(source: Source) -> None:
    asked: list[str] = []
    found = statistics(source)

    def read(name: str) -> Gram:
        asked.append(name)
        return found[name]

    quantised(source, read=read, scope="vision.blocks")
    assert sorted(asked) == sorted(vision_linears(source.settings.vision, "vision.blocks"))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "source"])
def test_new_norms_and_biases_are_in_the_dtype_that_is_written(source: Source, dtype: str) -> None:
    rewrite, _ = quantised(source, dtype=dtype)
    expected = {"source": torch.bfloat16}.get(dtype) or getattr(torch, dtype)
    assert {tensor.dtype for name, tensor in rewrite.added.items() if name.endswith((".weight", ".bias"))} == {expected}
    assert rewrite.cast == (None if dtype == "source" else expected)


def test_a_layer_that_saw_no_token_is_named(source: Source) -> None:
    found = statistics(source)
    empty = Gram.empty(len(found["model.visual.merger.linear_fc2"].sum))
    with pytest.raises(RunError, match=r"^model\.visual\.merger\.linear_fc2: the statistics saw no token"):
        quantised(source, read=lambda name: empty if name == "model.visual.merger.linear_fc2" else found[name])


def test_statistics_that_are_not_finite_are_named_with_their_stage(source: Source) -> None:
    found = statistics(source)
    name = "model.visual.blocks.1.mlp.linear_fc1"
    found[name] = dataclasses.replace(found[name], centred=found[name].centred * float("nan"))
    with pytest.raises(RunError, match=r"^model\.visual\.blocks\.1: statistics: hold NaN or infinity"):
        quantised(source, read=found.__getitem__)


def test_a_layer_worse_than_plain_rounding_stops_the_run(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    def worse(*args: Any, **how: Any) -> QuantizedStage:
        done = quantize_stage(*args, **how)
        return done._replace(reports=tuple(report._replace(loss=report.rounding_loss * 1.01) for report in done.reports))

    monkeypatch.setattr(module, "quantize_stage", worse)
    with pytest.raises(RunError, match=r"^model\.visual\.blocks\.0\.attn\.proj: the loss .* is not at or below plain rounding's"):
        quantised(source)


def test_a_corrected_bias_that_overflows_float16_is_named(tmp_path: Path) -> None:
    name = "model.visual.blocks.1.mlp.linear_fc2.bias"
    source = opened(with_first_value(build_tiny(tmp_path / "tiny", **SMALL), {name: 70000.0}))
    rewrite, _ = quantised(source)
    assert name in rewrite.added
    with pytest.raises(RunError, match=rf"^{name} does not fit torch\.float16, whose largest is 65504"):
        quantised(source, dtype="float16")
