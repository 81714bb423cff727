"""A stage with compensation: chosen on tokens that nothing was fitted to, and what is reported is what is stored."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch

from qvlopt.model.names import VISION, vision_stages
from qvlopt.model.quantize import QuantizedStage, quantize_stage
from qvlopt.model.round_layer import Search, dequantized
from qvlopt.model.token_draw import HELD_OUT
from qvlopt.model.vision import VisionConfig, VisionTower
from qvlopt.quant.objective import Gram
from qvlopt.quant.rounding import QuantSpec
from tests.tiny import tiny_config, tiny_tensors

SETTINGS = tiny_config(vision={"hidden_size": 64, "num_heads": 2, "intermediate_size": 128, "deepstack_visual_indexes": [1]})
CONFIG = VisionConfig.from_dict(SETTINGS["vision_config"])
STAGES = {stage.name: stage for stage in vision_stages(CONFIG)}
SPEC = QuantSpec(3, 32)
PLAIN = Search(torch.float32, scale=False, clip=False, bias=False)
USUAL = Search(torch.float32, grid=3)
BOTH = replace(USUAL, compensate=True)
NAMES = sorted(["blocks.0", "deepstack_merger_list.0", "merger"])


@cache
def weights() -> dict[str, torch.Tensor]:
    tensors = {name: tensor for name, tensor in tiny_tensors(SETTINGS).items() if name.startswith(VISION)}
    for name, tensor in tensors.items():
        if "norm" in name:
            tensor[[3, 17, 40]] *= 16
    return tensors


@cache
def inputs(seed: int) -> dict[str, torch.Tensor]:
    """What every linear reads of a few pictures: [T, K] by canonical name."""
    read: dict[str, torch.Tensor] = {}
    tower = VisionTower(CONFIG, {name.removeprefix(f"{VISION}."): tensor for name, tensor in weights().items()})

    def keep(name: str, x: torch.Tensor) -> torch.Tensor:
        read[f"{VISION}.{name}"] = x.flatten(0, -2)
        return tower._linear(name, x)

    pixels = torch.randn(24, 64, CONFIG.patch_dim, generator=torch.Generator().manual_seed(seed))
    VisionTower(CONFIG, tower.weights, linear=keep)(pixels, (8, 8))
    return read


@cache
def grams(seed: int) -> dict[str, Gram]:
    return {name: Gram.of(x) for name, x in inputs(seed).items()}


def quantised(name: str, search: Search, *, held_out: dict[str, Gram] | None = None, spec: QuantSpec = SPEC) -> QuantizedStage:
    stage = STAGES[name]
    own = {key: tensor for key, tensor in weights().items() if key.startswith(f"{VISION}.{name}.")}
    chosen = frozenset(f"{VISION}.{linear}" for linear in stage.linears)
    both = grams(0) | {name + HELD_OUT: gram for name, gram in (held_out or {}).items()}
    return quantize_stage(stage, own, both, spec, search=search, chosen=chosen)


def direct_loss(done: QuantizedStage, linear: str) -> float:
    """Error of a linear that nothing folds into or out of, over all tokens, as a share of its output without the bias."""
    x = torch.cat([inputs(0)[linear], inputs(1)[linear]]).double()
    weight, bias = weights()[f"{linear}.weight"].double(), weights()[f"{linear}.bias"].double()
    stored = dequantized(done.integers[linear], SPEC, torch.float32).double()
    new_bias = done.changed.get(f"{linear}.bias", bias).double()
    return float(((x @ (stored - weight).T) + new_bias - bias).square().sum() / (x @ weight.T).square().sum())


@pytest.mark.parametrize("name", NAMES)
def test_it_takes_a_quarter_of_the_loss_away_and_says_so_with_the_same_format(name: str) -> None:
    before, after = quantised(name, USUAL, held_out=grams(1)), quantised(name, BOTH, held_out=grams(1))
    assert sum(report.loss for report in after.reports) < 0.75 * sum(report.loss for report in before.reports)
    assert all("compensate" in report.method.split("+") for report in after.reports)
    assert not any("compensate" in report.method for report in before.reports)
    for linear, integers in after.integers.items():
        assert 0 <= int(integers.q.min()) <= int(integers.q.max()) <= SPEC.largest
        assert [part.shape for part in integers] == [part.shape for part in before.integers[linear]]


@pytest.mark.parametrize("name", NAMES)
def test_no_layer_is_worse_than_rounded_plainly_and_losses_are_of_all_tokens(name: str) -> None:
    done = quantised(name, BOTH, held_out=grams(1))
    for report in done.reports:
        assert report.loss <= report.rounding_loss
        assert report.held_out_loss is not None
        assert report.held_out_uncompensated is not None
        assert report.held_out_loss < report.held_out_uncompensated
    second = f"{VISION}.{name}.{'mlp.' if name.startswith('blocks') else ''}linear_fc2"
    found = next(report for report in done.reports if report.name == second)
    assert found.loss == pytest.approx(direct_loss(done, second), rel=1e-3)


def test_tokens_that_have_nothing_in_common_with_those_fitted_to_decide_against_it() -> None:
    """Held-out inputs whose channels do not go together: on one grid, nothing is better for those than the nearest point."""
    independent = {name: Gram.of(torch.randn(4000, len(gram.sum), generator=torch.Generator().manual_seed(5))) for name, gram in grams(0).items()}
    done, usual = (quantised("blocks.0", search, held_out=independent) for search in (replace(PLAIN, compensate=True), PLAIN))
    for report in done.reports:
        assert "compensate" not in report.method
        assert report.held_out_loss == report.held_out_uncompensated
    assert [report.loss for report in done.reports] == [report.loss for report in usual.reports]
    assert all(torch.equal(done.integers[name].q, usual.integers[name].q) for name in usual.integers)


def test_all_tokens_are_fitted_to_once_it_is_decided() -> None:
    name = f"{VISION}.blocks.0.mlp.linear_fc2"
    done = quantised("blocks.0", BOTH, held_out=grams(1))
    together = {key: gram.merge(grams(1)[key]) for key, gram in grams(0).items()}
    own = {key: tensor for key, tensor in weights().items() if key.startswith(f"{VISION}.blocks.0.")}
    same = quantize_stage(STAGES["blocks.0"], own, together, SPEC, search=BOTH, chosen=frozenset([name]))
    assert torch.equal(done.integers[name].q, same.integers[name].q)


def test_without_held_out_tokens_the_tokens_fitted_to_decide_and_nothing_is_said_of_others() -> None:
    done = quantised("blocks.0", BOTH)
    assert all("compensate" in report.method for report in done.reports)
    assert all(report.held_out_loss is None and report.held_out_uncompensated is None for report in done.reports)


def test_it_works_alone_on_the_grids_of_plain_rounding() -> None:
    done, plain = quantised("merger", replace(PLAIN, compensate=True), held_out=grams(1)), quantised("merger", PLAIN)
    assert done.changed == {}
    for report in done.reports:
        assert report.method == "compensate"
        assert report.loss < 0.8 * report.rounding_loss
        assert torch.equal(done.integers[report.name].scale, plain.integers[report.name].scale)
        assert torch.equal(done.integers[report.name].zero_point, plain.integers[report.name].zero_point)


def test_it_repeats_to_the_last_bit() -> None:
    first, second = (quantised("blocks.0", BOTH, held_out=grams(1)) for _ in range(2))
    assert first.reports == second.reports
    assert all(torch.equal(first.integers[name].q, second.integers[name].q) for name in first.integers)
