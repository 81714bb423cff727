"""A decoder layer: what folds into what, through transformers' own layer; grouped heads; layers that engines fuse."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLTextConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextDecoderLayer, Qwen3VLTextRotaryEmbedding

from qvlopt.model.config import rope_parameters
from qvlopt.model.fold import folded, read_channels
from qvlopt.model.names import LANGUAGE, language_stages
from qvlopt.model.quantize import QuantizedStage, quantize_stage
from qvlopt.model.round_layer import Search, dequantized
from qvlopt.quant.objective import Gram
from qvlopt.quant.rounding import QuantSpec
from tests.tiny import tiny_config, tiny_tensors

TEXT = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
SETTINGS: dict[str, Any] = tiny_config(text=TEXT)["text_config"]
STAGE = language_stages(SETTINGS)[0]
FOLDS = {fold.producer.rpartition(".")[2]: fold.under(LANGUAGE) for fold in STAGE.folds}
LAYER = f"{LANGUAGE}.layers.0."
SPEC = QuantSpec(3, 32)
Tensors = dict[str, torch.Tensor]


@cache
def weights() -> Tensors:
    """One layer by canonical name, with a few large channels, as trained ones have them."""
    tensors = {name: tensor for name, tensor in tiny_tensors(tiny_config(text=TEXT)).items() if name.startswith(LAYER)}
    for name, tensor in tensors.items():
        if "layernorm" in name:
            tensor[[3, 17, 40]] *= 8
        if "up_proj" in name or "v_proj" in name:
            tensor[[2, 21]] *= 16
    return tensors


@torch.no_grad()
def run(tensors: Tensors, read: Tensors | None = None) -> torch.Tensor:
    """transformers' layer on seeded hidden states [2, 24, D]; `read` gets what every linear reads."""
    config = Qwen3VLTextConfig(**{k: v for k, v in SETTINGS.items() if k not in ("rope_scaling", "rope_theta", "dtype")})
    config.rope_parameters = rope_parameters(SETTINGS, "tiny")
    config._attn_implementation = "sdpa"
    layer = Qwen3VLTextDecoderLayer(config, 0)
    layer.load_state_dict({name.removeprefix(LAYER): tensor for name, tensor in tensors.items()})
    for name, module in layer.named_modules():
        if isinstance(module, torch.nn.Linear) and read is not None:
            module.register_forward_pre_hook(lambda _m, inputs, name=name: read.__setitem__(f"{LAYER}{name}", inputs[0].flatten(0, 1)))
    hidden = torch.randn(2, 24, 64, generator=torch.Generator().manual_seed(0))
    angles = Qwen3VLTextRotaryEmbedding(config)(hidden, torch.arange(24).expand(3, 2, -1))
    output: torch.Tensor = layer(hidden, position_embeddings=angles)
    return output


@cache
def inputs() -> Tensors:
    read: Tensors = {}
    run(weights(), read)
    return read


def quantised(search: Search, *, names: frozenset[str] | None = None) -> QuantizedStage:
    own = {name: tensor.to(search.dtype) for name, tensor in weights().items()}
    chosen = names or frozenset(f"{LANGUAGE}.{linear}" for linear in STAGE.linears)
    return quantize_stage(STAGE, own, {name: Gram.of(x) for name, x in inputs().items()}, SPEC, search=search, chosen=chosen)


def relative(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("producer", sorted(FOLDS))
def test_any_fold_leaves_the_layers_output_as_it_was(producer: str) -> None:
    fold = FOLDS[producer]
    width = weights()[f"{fold.consumers[0]}.weight"].shape[1]
    channels = read_channels(fold, width)
    scale = torch.exp(2 * torch.randn(int(channels.max()) + 1, generator=torch.Generator().manual_seed(1)))[channels]
    made = folded(fold, weights(), scale, SPEC, torch.float32)
    assert made is not None
    new = {**weights(), **made.tensors} | {f"{name}.weight": weights()[f"{name}.weight"] * made.scale for name in fold.consumers}
    assert all(not torch.equal(new[f"{name}.weight"], weights()[f"{name}.weight"]) for name in fold.consumers)
    assert relative(run(new), run(weights())) < 1e-5


def test_the_layer_notices_a_scale_that_is_not_shared_by_the_heads_of_a_group() -> None:
    fold = FOLDS["v_proj"]
    assert (fold.repeats, fold.head) == (2, 16)
    assert read_channels(fold, 64).tolist() == [*range(16), *range(16), *range(16, 32), *range(16, 32)]
    made = folded(fold, weights(), torch.full((64,), 4.0), SPEC, torch.float32)
    assert made is not None
    wrong = made.scale.clone()
    wrong[16:32] = 1.0  # the second head of the first group
    name = f"{fold.consumers[0]}.weight"
    assert relative(run({**weights(), **made.tensors, name: weights()[name] * wrong}), run(weights())) > 1e-2


def test_what_folds_into_what() -> None:
    short = {fold.producer.removeprefix("layers.0."): [name.rpartition(".")[2] for name in fold.consumers] for fold in STAGE.folds}
    assert short == {
        "self_attn.v_proj": ["o_proj"],
        "input_layernorm": ["q_proj", "k_proj", "v_proj"],
        "mlp.up_proj": ["down_proj"],
        "post_attention_layernorm": ["gate_proj", "up_proj"],
    }


SEARCHES = {
    "rounding": Search(torch.float32, scale=False, clip=False),
    "scale": Search(torch.float32, clip=False, grid=6),
    "clip": Search(torch.float32, scale=False),
    "both": Search(torch.float32, grid=6),
    "compensate": Search(torch.float32, grid=6, compensate=True),
    "bfloat16": Search(torch.bfloat16, grid=6, compensate=True),
}


@pytest.mark.parametrize("which", sorted(SEARCHES))
def test_a_layers_loss_is_the_error_of_its_outputs_and_never_above_plain_roundings(which: str) -> None:
    """Each linear by itself: its stored weights on what it reads now, against the source's on what it read."""
    search = SEARCHES[which]
    done = quantised(search)
    scales = _input_scales(done)
    for report in done.reports:
        x, old = inputs()[report.name].double(), weights()[f"{report.name}.weight"].double()
        new = dequantized(done.integers[report.name], SPEC, search.dtype).double() / scales[report.name][0] * scales[report.name][1].unsqueeze(1)
        loss = float((x @ (new - old).T).square().sum() / (x @ old.T).square().sum())
        assert report.loss == pytest.approx(loss, rel=1e-2)
        assert report.loss <= report.rounding_loss
    assert not any(name.endswith("bias") for name in done.changed)


def _input_scales(done: QuantizedStage) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """What every linear's inputs and rows were divided by, told from the stored norms and, by powers of two, from stored rows."""
    ones = {name: (torch.ones(tensor.shape[1]).double(), torch.ones(tensor.shape[0]).double()) for name, tensor in _linears().items()}
    for fold in FOLDS.values():
        old, new = weights()[f"{fold.producer}.weight"].double(), done.changed.get(f"{fold.producer}.weight")
        if fold.kind == "norm" and new is not None:
            ones.update({name: (old / new.double(), ones[name][1]) for name in fold.consumers})
    for fold in FOLDS.values():
        if fold.kind == "rows":
            old = _linears()[fold.producer].double()
            new = dequantized(done.integers[fold.producer], SPEC, torch.float32).double() / ones[fold.producer][0]
            rows = torch.exp2(-((old * new).sum(1) / (old * old).sum(1)).log2().round())
            consumer = fold.consumers[0]
            ones[consumer] = (rows[read_channels(fold, _linears()[consumer].shape[1])], ones[consumer][1])
            ones[fold.producer] = (ones[fold.producer][0], rows)
    return ones


def _linears() -> Tensors:
    return {f"{LANGUAGE}.{linear}": weights()[f"{LANGUAGE}.{linear}.weight"] for linear in STAGE.linears}


def test_scales_pay_and_compensation_pays_more() -> None:
    totals = {which: sum(report.loss for report in quantised(SEARCHES[which]).reports) for which in ("rounding", "scale", "both", "compensate")}
    assert totals["compensate"] < 0.8 * totals["both"]
    assert totals["both"] < totals["scale"] < totals["rounding"]


def test_the_whole_layer_is_what_its_losses_promise() -> None:
    """The stored tensors together, folds and all, in transformers' layer: nearer to the source than plain rounding."""
    errors = {}
    for which in ("rounding", "both", "compensate"):
        done = quantised(SEARCHES[which])
        stored = {f"{name}.weight": dequantized(integers, SPEC, torch.float32) for name, integers in done.integers.items()}
        errors[which] = relative(run({**weights(), **done.changed, **stored}), run(weights()))
    assert errors["compensate"] < errors["both"] < errors["rounding"] < 1


def test_queries_and_keys_keep_their_range() -> None:
    done = quantised(replace(SEARCHES["clip"]))
    methods = {report.name.rpartition(".")[2]: report.method for report in done.reports}
    assert methods["q_proj"] == methods["k_proj"] == "rounding"
    assert "clip" in methods["v_proj"]


def test_a_norm_stays_when_one_of_its_consumers_does() -> None:
    """Kept linears read the norm as it is, so nothing may fold into it."""
    kept = f"{LAYER}self_attn.k_proj"
    done = quantised(SEARCHES["both"], names=frozenset(f"{LANGUAGE}.{linear}" for linear in STAGE.linears) - {kept})
    assert f"{LAYER}input_layernorm.weight" not in done.changed
    assert f"{kept}.weight" not in done.changed
    assert kept not in done.integers
