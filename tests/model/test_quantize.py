"""Folds, losses and dead channels of one stage, against a slow reference that runs the inputs through both layers."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Mapping
from functools import cache

import pytest
import torch
import torch.nn.functional as F

from qvlopt.model.fold import folded
from qvlopt.model.names import VISION, Fold, Stage, vision_stages
from qvlopt.model.quantize import QuantizedStage, quantize_stage
from qvlopt.model.round_layer import Search, dequantized
from qvlopt.model.vision import LAYER_NORM_EPS, VisionConfig, VisionTower
from qvlopt.quant.objective import Gram
from qvlopt.quant.rounding import SMALLEST_SCALE, QuantSpec, dequantize, qparams, quantize
from tests.tiny import tiny_config, tiny_tensors

SETTINGS = tiny_config(vision={"hidden_size": 64, "num_heads": 2, "intermediate_size": 128, "deepstack_visual_indexes": [1]})
CONFIG = VisionConfig.from_dict(SETTINGS["vision_config"])
STAGES = {stage.name: stage for stage in vision_stages(CONFIG)}
FOLDS = {f"{stage.name}: {fold.consumers[0]}": (stage, fold.under(VISION)) for stage in STAGES.values() for fold in stage.folds}
GRID = (8, 8)
OUTLIERS = [3, 17, 40]
Tensors = Mapping[str, torch.Tensor]


@cache
def tower_weights() -> dict[str, torch.Tensor]:
    """A tower whose norms and value rows have a few channels of 16 times the rest, as trained ones do; canonical names."""
    tensors = {name: tensor for name, tensor in tiny_tensors(SETTINGS).items() if name.startswith(VISION)}
    for name, tensor in tensors.items():
        if "norm" in name:
            tensor[OUTLIERS] *= 16
        if "norm2.bias" in name or "merger.norm.bias" in name:
            tensor *= 32  # what such biases lose to a 16-bit dtype once they are folded shows at 8 bits
        if "attn.qkv" in name:
            tensor[[2 * CONFIG.hidden_size + channel for channel in OUTLIERS]] *= 16
    return tensors


class Recording(VisionTower):
    """A tower that keeps what its linears and norms read: [T, K] by canonical name."""

    def __init__(self, weights: Tensors) -> None:
        super().__init__(CONFIG, {name.removeprefix(f"{VISION}."): tensor for name, tensor in weights.items()}, linear=self.apply)
        self.read: dict[str, list[torch.Tensor]] = defaultdict(list)

    def apply(self, name: str, x: torch.Tensor) -> torch.Tensor:
        self.read[f"{VISION}.{name}"].append(x.flatten(0, -2))
        return self._linear(name, x)

    def _norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        self.read[f"{VISION}.{name}"].append(x.flatten(0, -2))
        return super()._norm(name, x)


def pictures() -> torch.Tensor:
    return torch.randn(6, GRID[0] * GRID[1], CONFIG.patch_dim, generator=torch.Generator().manual_seed(0))


def inputs_of(weights: Tensors) -> dict[str, torch.Tensor]:
    tower = Recording(weights)
    tower(pictures(), GRID)
    return {name: torch.cat(parts) for name, parts in tower.read.items()}


@cache
def usual_inputs() -> dict[str, torch.Tensor]:
    return inputs_of(tower_weights())


def stage_weights(stage: Stage, weights: Tensors, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    return {name: tensor.to(dtype) for name, tensor in weights.items() if name.startswith(f"{VISION}.{stage.name}.")}


def fitting(stage: Stage, weights: Tensors, spec: QuantSpec) -> frozenset[str]:
    return frozenset(name for linear in stage.linears if weights[f"{(name := f'{VISION}.{linear}')}.weight"].shape[1] % spec.group_size == 0)


def quantised(
    stage: Stage,
    spec: QuantSpec,
    search: Search,
    *,
    weights: Tensors | None = None,
    inputs: Tensors | None = None,
    chosen: frozenset[str] | None = None,
) -> QuantizedStage:
    weights = stage_weights(stage, weights or tower_weights(), search.dtype)
    grams = {name: Gram.of(x) for name, x in (inputs or usual_inputs()).items()}
    return quantize_stage(stage, weights, grams, spec, search=search, chosen=fitting(stage, weights, spec) if chosen is None else chosen)


def value_scale(stage: Stage, done: QuantizedStage, weights: Tensors, spec: QuantSpec) -> torch.Tensor:
    """What the channels between value rows and proj were divided by: the power of two that explains proj's new weights."""
    name = f"{VISION}.{stage.name}.attn.proj"
    if name not in done.integers:
        return torch.ones(CONFIG.hidden_size, dtype=torch.float64)
    old, new = weights[f"{name}.weight"].double(), dequantized(done.integers[name], spec, torch.float32).double()
    return torch.exp2(((old * new).sum(0) / (old * old).sum(0)).log2().round())


def direct_loss(name: str, stage: Stage, done: QuantizedStage, spec: QuantSpec, dtype: torch.dtype) -> float:
    """Squared difference of outputs, original layer against what is stored, as a share of the output without its bias."""
    weights = stage_weights(stage, tower_weights())
    stored = {**weights, **{key: tensor.float() for key, tensor in done.changed.items()}}
    x = usual_inputs()[name].double()
    fold = next((fold for fold in stage.folds if f"{VISION}.{fold.consumers[0]}" == name), None)
    read = x
    if fold and fold.kind == "norm":
        norm = f"{VISION}.{fold.producer}"
        before = usual_inputs()[norm].double()
        gain, offset = stored[f"{norm}.weight"].double(), stored[f"{norm}.bias"].double()
        read = F.layer_norm(before, before.shape[-1:], gain, offset, LAYER_NORM_EPS).reshape(x.shape)
    scale = value_scale(stage, done, weights, spec)
    if name.endswith("attn.proj"):
        read = x / scale
    whole = x @ weights[f"{name}.weight"].double().T
    got = read @ dequantized(done.integers[name], spec, dtype).double().T + stored[f"{name}.bias"].double()
    if name.endswith("attn.qkv"):
        got[:, -len(scale) :] *= scale
    lost = got - (whole + weights[f"{name}.bias"].double())
    return float(lost.square().sum() / whole.square().sum())


def relative(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("which", sorted(FOLDS))
@pytest.mark.parametrize("spread", [0.5, 3.0])
def test_any_fold_leaves_the_towers_outputs_as_they_were(which: str, spread: float) -> None:
    _stage, fold = FOLDS[which]
    weights = tower_weights()
    width = weights[f"{fold.consumers[0]}.weight"].shape[1] // fold.repeats
    scale = torch.exp(spread * torch.randn(width, generator=torch.Generator().manual_seed(1))).clamp(1e-3, 1e3).repeat(fold.repeats)
    producer = folded(fold, weights, scale, QuantSpec(4, 32), torch.float32)
    assert producer is not None
    consumer = f"{fold.consumers[0]}.weight"
    moved = {**weights, **producer.tensors, consumer: weights[consumer] * producer.scale}
    assert not torch.equal(moved[consumer], weights[consumer])
    before, after = (Recording(tensors)(pictures(), GRID) for tensors in (weights, moved))
    assert relative(after.merged, before.merged) < 1e-4
    assert all(relative(new, old) < 1e-4 for new, old in zip(after.deepstack, before.deepstack, strict=True))


def test_the_tower_notices_a_fold_that_is_not_exact() -> None:
    """The tolerance above would see a norm bias, a value bias or one channel that was left out."""
    weights = tower_weights()
    before = Recording(weights)(pictures(), GRID).merged
    for name in ("blocks.0.norm1.bias", "blocks.1.attn.qkv.bias", "merger.norm.bias"):
        wrong = weights[f"{VISION}.{name}"].clone()
        wrong[OUTLIERS[0]] *= 2
        assert relative(Recording({**weights, f"{VISION}.{name}": wrong})(pictures(), GRID).merged, before) > 1e-4


VARIANTS = [Search(torch.float32, scale, clip, bias, grid=3) for scale, clip, bias in itertools.product((False, True), repeat=3)]


def label(search: Search) -> str:
    return "+".join(step for step, wanted in (("scale", search.scale), ("clip", search.clip), ("bias", search.bias)) if wanted) or "rounding"


@pytest.mark.parametrize("search", VARIANTS, ids=label)
@pytest.mark.parametrize("name", sorted(STAGES))
def test_a_layers_loss_is_the_error_of_its_outputs_and_never_above_plain_roundings(name: str, search: Search) -> None:
    spec = QuantSpec(3, 32)
    done = quantised(STAGES[name], spec, search)
    assert {report.name for report in done.reports} == {f"{VISION}.{linear}" for linear in STAGES[name].linears}
    for report in done.reports:
        assert report.loss <= report.rounding_loss
        assert report.loss == pytest.approx(direct_loss(report.name, STAGES[name], done, spec, search.dtype), rel=1e-3)
        assert set(report.method.split("+")) <= set(label(search).split("+")) | {"rounding"}
        plain = quantised(STAGES[name], spec, VARIANTS[0])
        assert report.rounding_loss == next(other.loss for other in plain.reports if other.name == report.name)


@pytest.mark.parametrize("name", sorted(STAGES))
def test_a_scale_pays_wherever_there_is_a_fold_for_it_and_is_nowhere_else(name: str) -> None:
    done = quantised(STAGES[name], QuantSpec(3, 32), Search(torch.float32, grid=8))
    scaled = {report.name for report in done.reports if "scale" in report.method}
    assert scaled == {f"{VISION}.{fold.consumers[0]}" for fold in STAGES[name].folds}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("name", ["blocks.0", "merger"])
def test_what_is_judged_is_what_a_16_bit_checkpoint_stores(name: str, bits: int, dtype: torch.dtype) -> None:
    spec = QuantSpec(bits, 32)
    done = quantised(STAGES[name], spec, Search(dtype, grid=3))
    assert all(tensor.dtype == dtype for tensor in done.changed.values())
    for report in done.reports:
        assert report.loss == pytest.approx(direct_loss(report.name, STAGES[name], done, spec, dtype), rel=1e-3)
        assert report.loss <= report.rounding_loss


@pytest.mark.parametrize(("bits", "group_size"), [*itertools.product(range(2, 9), (32, 64)), (2, 128), (4, 128), (8, 128)])
def test_no_width_or_group_makes_a_layer_worse_than_plain_rounding(bits: int, group_size: int) -> None:
    for name in ("blocks.1", "deepstack_merger_list.0"):
        done = quantised(STAGES[name], QuantSpec(bits, group_size), Search(torch.bfloat16, grid=2))
        assert done.reports
        assert all(report.loss <= report.rounding_loss for report in done.reports)
        assert sum(report.loss for report in done.reports) < sum(report.rounding_loss for report in done.reports)


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("name", sorted(STAGES))
def test_with_all_searches_off_the_sources_weights_are_rounded_and_nothing_else_changes(name: str, symmetric: bool) -> None:
    spec = QuantSpec(4, 32, symmetric=symmetric)
    done = quantised(STAGES[name], spec, Search(torch.bfloat16, scale=False, clip=False, bias=False))
    assert done.changed == {}
    for linear, integers in done.integers.items():
        weight = tower_weights()[f"{linear}.weight"]
        qp = qparams(weight, spec)
        assert torch.equal(integers.scale, qp.scale)
        assert torch.equal(integers.zero_point, qp.zero_point)
        assert torch.equal(integers.q, quantize(weight, qp, spec))
    assert all(report.loss == report.rounding_loss and report.method == "rounding" for report in done.reports)


def test_more_searches_cost_less_in_total() -> None:
    totals = {label(search): sum(report.loss for report in quantised(STAGES["blocks.0"], QuantSpec(3, 64), search).reports) for search in VARIANTS}
    assert totals["scale+clip+bias"] < totals["clip+bias"] < totals["bias"] < totals["rounding"]
    assert totals["scale"] < totals["rounding"]


def test_the_given_weights_are_not_modified() -> None:
    weights = stage_weights(STAGES["blocks.0"], tower_weights(), torch.bfloat16)
    before = {name: tensor.clone() for name, tensor in weights.items()}
    quantised(STAGES["blocks.0"], QuantSpec(3, 32), Search(torch.bfloat16, grid=2), weights=weights)
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights.items())


KEPT = [
    ("attn.qkv", {"attn.qkv.weight", "attn.qkv.bias", "norm1.weight", "norm1.bias"}),
    ("attn.proj", {"attn.proj.weight", "attn.proj.bias"}),
    ("mlp.linear_fc1", {"mlp.linear_fc1.weight", "mlp.linear_fc1.bias", "norm2.weight", "norm2.bias"}),
    ("mlp.linear_fc2", {"mlp.linear_fc2.weight", "mlp.linear_fc2.bias"}),
]


@pytest.mark.parametrize(("kept", "untouched"), KEPT, ids=[kept for kept, _ in KEPT])
def test_a_kept_linear_and_what_feeds_only_it_stay_as_they_are(kept: str, untouched: set[str]) -> None:
    stage, spec = STAGES["blocks.0"], QuantSpec(3, 32)
    chosen = frozenset(f"{VISION}.{linear}" for linear in stage.linears) - {f"{VISION}.blocks.0.{kept}"}
    done = quantised(stage, spec, Search(torch.float32, grid=3), chosen=chosen)
    assert set(done.integers) == chosen
    assert set(done.changed).isdisjoint(f"{VISION}.blocks.0.{name}" for name in untouched)
    assert any("scale" in report.method for report in done.reports)
    for report in done.reports:
        assert report.loss == pytest.approx(direct_loss(report.name, stage, done, spec, torch.float32), rel=1e-3)


def with_dead_parts() -> dict[str, torch.Tensor]:
    """A constant norm channel, an input channel that is always zero, a group and a row of zero weights."""
    weights = {name: tensor.clone() for name, tensor in tower_weights().items()}
    block = f"{VISION}.blocks.0"
    weights[f"{block}.norm1.weight"][[5, 6]] = 0
    weights[f"{block}.norm1.bias"][5] = 0  # nothing comes through channel 5, a constant through 6
    weights[f"{block}.norm2.weight"][9], weights[f"{block}.norm2.bias"][9] = 0.01, -3  # always negative
    weights[f"{block}.attn.qkv.weight"][:, 32:] = 0
    weights[f"{block}.attn.qkv.weight"][7] = 0
    weights[f"{block}.mlp.linear_fc2.weight"][4] = 0
    weights[f"{block}.attn.proj.weight"][:] = 0
    weights[f"{block}.attn.proj.bias"][:] = 0
    return weights


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_dead_channels_groups_and_rows_stay_finite_and_zero_stays_zero(dtype: torch.dtype) -> None:
    weights, spec = with_dead_parts(), QuantSpec(4, 32)
    done = quantised(STAGES["blocks.0"], spec, Search(dtype, grid=4), weights=weights, inputs=inputs_of(weights))
    for name, integers in done.integers.items():
        stored = dequantized(integers, spec, dtype)
        assert bool(torch.isfinite(stored).all())
        assert bool((stored[weights[f"{name}.weight"] == 0] == 0).all())
    assert all(bool(torch.isfinite(tensor).all()) for tensor in done.changed.values())
    norm = done.changed.get(f"{VISION}.blocks.0.norm1.weight", weights[f"{VISION}.blocks.0.norm1.weight"])
    assert bool((norm[[5, 6]] == 0).all())
    for report in done.reports:
        assert 0 <= report.loss <= report.rounding_loss


def test_a_layer_without_output_costs_nothing() -> None:
    weights = with_dead_parts()
    done = quantised(STAGES["blocks.0"], QuantSpec(4, 32), Search(torch.float32, grid=2), weights=weights, inputs=inputs_of(weights))
    proj = next(report for report in done.reports if report.name.endswith("proj"))
    assert (proj.loss, proj.rounding_loss, proj.method) == (0.0, 0.0, "rounding")


def with_faint_values() -> dict[str, torch.Tensor]:
    """Value rows that are constants more than values: large by their bias, with 8-bit grids near the smallest that float16 holds."""
    weights = {name: tensor.clone() for name, tensor in tower_weights().items()}
    qkv, width = f"{VISION}.blocks.0.attn.qkv", CONFIG.hidden_size
    weights[f"{qkv}.weight"] *= 2.0**-12
    weights[f"{qkv}.weight"][-width:] *= 2.0**7
    weights[f"{qkv}.weight"][[2 * width + channel for channel in OUTLIERS]] /= 16 * 16
    weights[f"{qkv}.bias"][-width:] *= 2.0**-5
    weights[f"{qkv}.bias"][[2 * width + channel for channel in OUTLIERS]] = 4
    weights[f"{VISION}.blocks.0.attn.proj.weight"] *= 2.0**5
    weights[f"{VISION}.blocks.0.norm1.weight"][OUTLIERS] /= 16
    return weights


def test_value_rows_are_not_divided_below_the_smallest_grid_that_can_be_stored() -> None:
    fold = Fold("blocks.0.attn.qkv", ("blocks.0.attn.proj",), "rows").under(VISION)
    weights, spec, width = with_faint_values(), QuantSpec(8, 32), CONFIG.hidden_size
    producer = folded(fold, weights, torch.full((width,), 300.0), spec, torch.float32)
    assert producer is not None
    rows, divided = (t[f"{VISION}.blocks.0.attn.qkv.weight"][-width:] for t in (weights, producer.tensors))
    before, after = qparams(rows, spec), qparams(divided, spec)
    assert float(producer.scale.max()) < 256
    assert float(after.scale.min()) >= SMALLEST_SCALE
    assert torch.equal(after.scale * producer.scale[:, None], before.scale)
    assert torch.equal(quantize(divided, after, spec), quantize(rows, before, spec))


def test_faint_value_rows_do_not_make_qkv_worse() -> None:
    weights, search = with_faint_values(), Search(torch.bfloat16, clip=False, bias=False, grid=4)
    done = quantised(STAGES["blocks.0"], QuantSpec(8, 32), search, weights=weights, inputs=inputs_of(weights))
    proj, qkv = done.reports[:2]
    assert proj.loss < proj.rounding_loss
    assert qkv.loss <= qkv.rounding_loss


def test_scales_of_value_rows_are_powers_of_two() -> None:
    fold = Fold("blocks.0.attn.qkv", ("blocks.0.attn.proj",), "rows").under(VISION)
    scale = torch.exp(torch.randn(CONFIG.hidden_size, generator=torch.Generator().manual_seed(2)))
    producer = folded(fold, tower_weights(), scale, QuantSpec(4, 32), torch.bfloat16)
    assert producer is not None
    assert torch.equal(producer.scale, torch.exp2(scale.log2().round()))
    assert bool((producer.row_scale[: 2 * CONFIG.hidden_size] == 1).all())


def test_a_value_bias_that_would_lose_bits_in_float16_keeps_its_channel_as_it_is() -> None:
    fold = Fold("blocks.0.attn.qkv", ("blocks.0.attn.proj",), "rows").under(VISION)
    weights = {name: tensor.clone() for name, tensor in tower_weights().items()}
    bias = weights[f"{VISION}.blocks.0.attn.qkv.bias"]
    bias[-CONFIG.hidden_size :] = torch.tensor([1.7e-4, 0.25]).repeat(CONFIG.hidden_size // 2).half().float()
    producer = folded(fold, weights, torch.full((CONFIG.hidden_size,), 64.0), QuantSpec(4, 32), torch.float16)
    assert producer is not None
    assert set(producer.scale[::2].tolist()) == {1.0}
    assert set(producer.scale[1::2].tolist()) == {64.0}
    stored = producer.tensors[f"{VISION}.blocks.0.attn.qkv.bias"].half().float()
    assert torch.equal(stored * producer.row_scale, bias.half().float())


@pytest.mark.parametrize(("part", "value"), [("weight", 60000.0), ("weight", 1e-7), ("bias", -60000.0)])
def test_a_norm_that_its_dtype_cannot_hold_once_folded_is_left_alone(part: str, value: float) -> None:
    fold = STAGES["blocks.0"].folds[1].under(VISION)
    weights = {name: tensor.clone() for name, tensor in tower_weights().items()}
    weights[f"{VISION}.blocks.0.norm1.{part}"][0] = value
    scale = torch.full((CONFIG.hidden_size,), 100.0 if value == 1e-7 else 0.01)
    assert folded(fold, weights, scale, QuantSpec(4, 32), torch.float16) is None
    assert folded(fold, weights, scale, QuantSpec(4, 32), torch.float32) is not None


def test_engines_see_the_float32_product_rounded_once() -> None:
    done = quantised(STAGES["merger"], QuantSpec(4, 32), Search(torch.bfloat16, grid=2))
    integers = done.integers[f"{VISION}.merger.linear_fc1"]
    exact = dequantize(integers.q, integers.qparams, QuantSpec(4, 32))
    assert torch.equal(dequantized(integers, QuantSpec(4, 32), torch.bfloat16), exact.bfloat16())
    assert dequantized(integers, QuantSpec(4, 32), torch.bfloat16).dtype == torch.bfloat16


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_a_weight_that_is_not_finite_is_refused(broken: float) -> None:
    weights = {name: tensor.clone() for name, tensor in tower_weights().items()}
    weights[f"{VISION}.blocks.0.attn.qkv.weight"][0, 0] = broken
    with pytest.raises(ValueError, match="NaN or infinity"):
        quantised(STAGES["blocks.0"], QuantSpec(4, 32), Search(torch.float32, grid=2), weights=weights)


def test_clipping_cuts_value_rows_and_leaves_queries_and_keys_their_range() -> None:
    spec = QuantSpec(3, 32)
    name = f"{VISION}.blocks.0.attn.qkv"
    done = quantised(STAGES["blocks.0"], spec, Search(torch.float32, scale=False, clip=True, bias=False))
    whole = qparams(tower_weights()[f"{name}.weight"], spec).scale
    both = 2 * CONFIG.hidden_size
    assert torch.equal(done.integers[name].scale[:both], whole[:both])
    assert not torch.equal(done.integers[name].scale[both:], whole[both:])
