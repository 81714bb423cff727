"""Error-compensated rounding: the integers of textbook GPTQ, never worse than plain rounding, and calm about dead channels."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qvlopt.quant.compensate import DAMPING, compensate, factored
from qvlopt.quant.objective import Gram, rescaled, row_error
from qvlopt.quant.rounding import QParams, QuantSpec, dequantize, qparams, quantize

EXAMPLES = settings(deadline=None, derandomize=True, max_examples=40)
SPECS = st.builds(QuantSpec, bits=st.sampled_from([2, 3, 4, 8]), group_size=st.sampled_from([8, 16, 32]), symmetric=st.booleans())


def inputs(seed: int, *, tokens: int = 96, width: int = 32, outliers: float = 30.0) -> torch.Tensor:
    """Correlated inputs with a mean and an outlier channel, as after a LayerNorm."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, width // 8, generator=generator) @ torch.randn(width // 8, width, generator=generator)
    x = x + torch.randn(tokens, width, generator=generator) + torch.randn(width, generator=generator)
    x[:, torch.randperm(width, generator=generator)[:1]] *= outliers
    return x


def weight(seed: int, *, rows: int = 6, width: int = 32) -> torch.Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)) * 0.02


def lost(q: torch.Tensor, w: torch.Tensor, h: torch.Tensor, qp: QParams, spec: QuantSpec) -> torch.Tensor:
    """Squared output error of every row in float64 throughout."""
    dw = (dequantize(q, qp, spec) - w.float()).double()
    return ((dw @ h.double()) * dw).sum(1)


def textbook(w: torch.Tensor, h: torch.Tensor, qp: QParams, spec: QuantSpec, damping: float) -> torch.Tensor:
    """GPTQ as in algorithm 1 of the paper, in float64, one column at a time, by the Cholesky factor of the inverse."""
    h = h.double() + torch.diag(damping * h.double().diagonal())
    order = h.diagonal().argsort(descending=True, stable=True)
    inverse = torch.linalg.cholesky(torch.linalg.inv(h[order][:, order]), upper=True)
    left, q = w.double()[:, order].clone(), torch.zeros_like(w, dtype=torch.int32)
    for i, column in enumerate(order.tolist()):
        scale, zero = (values[:, column // spec.group_size].double() for values in qp)
        rounded = (torch.round(left[:, i] / scale) + zero).clamp(0, spec.largest)
        q[:, column] = rounded.int()
        error = (left[:, i] - (rounded - zero) * scale) / inverse[i, i]
        left[:, i + 1 :] -= error.unsqueeze(1) * inverse[i, i + 1 :]
    return q


@pytest.mark.parametrize(("seed", "bits", "group_size"), [(0, 4, 32), (1, 3, 16), (2, 2, 8), (3, 4, 8), (4, 8, 32)])
def test_the_first_pass_gives_the_integers_of_textbook_gptq(seed: int, bits: int, group_size: int) -> None:
    spec, w, h = QuantSpec(bits, group_size), weight(seed, rows=40, width=320), Gram.of(inputs(seed, tokens=900, width=320)).gram
    qp = qparams(w, spec)
    found, expected = compensate(w, h, qp, spec, factor=factored(h, damping=0.02), sweeps=0), textbook(w, h, qp, spec, 0.02)
    assert bool((lost(expected, w, h, qp, spec) < lost(quantize(w, qp, spec), w, h, qp, spec)).all())
    assert float((found == expected).double().mean()) > 0.999
    torch.testing.assert_close(lost(found, w, h, qp, spec), lost(expected, w, h, qp, spec), rtol=0.02, atol=0)


@EXAMPLES
@given(spec=SPECS, seed=st.integers(0, 10**6), damping=st.sampled_from([0.0, 0.01, 1.0]), tokens=st.sampled_from([1, 7, 96]))
def test_no_row_is_worse_than_plain_rounding_and_integers_stay_in_range(spec: QuantSpec, seed: int, damping: float, tokens: int) -> None:
    w, h = weight(seed), Gram.of(inputs(seed, tokens=tokens)).gram
    qp = qparams(w, spec)
    q = compensate(w, h, qp, spec, factor=factored(h, damping=damping))
    assert q.dtype == torch.int32
    assert q.shape == w.shape
    assert 0 <= int(q.min()) <= int(q.max()) <= spec.largest
    plain = quantize(w, qp, spec)
    assert bool((lost(q, w, h, qp, spec) <= lost(plain, w, h, qp, spec) * (1 + 1e-5)).all())


@EXAMPLES
@given(spec=SPECS, seed=st.integers(0, 10**6))
def test_channels_that_do_not_go_together_are_rounded_plainly(spec: QuantSpec, seed: int) -> None:
    w, energy = weight(seed), torch.rand(32, generator=torch.Generator().manual_seed(seed)) * 100
    qp = qparams(w, spec)
    assert torch.equal(compensate(w, torch.diag(energy), qp, spec), quantize(w, qp, spec))


def test_it_takes_more_than_half_of_the_loss_away_also_on_unseen_inputs() -> None:
    spec, w = QuantSpec(4, 64), weight(0, rows=64, width=128)
    seen, fresh = inputs(0, tokens=4096, width=128).chunk(2)
    h, qp = Gram.of(seen).gram, qparams(w, spec)
    q, plain = compensate(w, h, qp, spec), quantize(w, qp, spec)
    for statistics in (h, Gram.of(fresh).gram):
        assert float(lost(q, w, statistics, qp, spec).sum()) < 0.5 * float(lost(plain, w, statistics, qp, spec).sum())


@pytest.mark.parametrize("seed", range(3))
def test_after_enough_sweeps_no_other_integer_in_any_one_place_is_better(seed: int) -> None:
    spec, w, h = QuantSpec(2, 8), weight(seed, rows=4, width=16), Gram.of(inputs(seed, width=16)).gram
    qp = qparams(w, spec)
    q = compensate(w, h, qp, spec, factor=factored(h, damping=0.0), sweeps=50)
    best = lost(q, w, h, qp, spec)
    for column, value in product(range(16), range(4)):
        other = q.clone()
        other[:, column] = value
        assert bool((lost(other, w, h, qp, spec) >= best * (1 - 1e-4)).all())


def test_a_sweep_never_costs_and_pays_somewhere() -> None:
    spec, w, h = QuantSpec(3, 16), weight(1, rows=64), Gram.of(inputs(1)).gram
    qp = qparams(w, spec)
    before, after = (lost(compensate(w, h, qp, spec, factor=factored(h, damping=0.0), sweeps=sweeps), w, h, qp, spec) for sweeps in (0, 4))
    assert bool((after <= before * (1 + 1e-5)).all())
    assert float(after.sum()) < 0.99 * float(before.sum())


def test_dead_channels_are_rounded_plainly_and_zero_weights_stay_zero() -> None:
    x, w, spec = inputs(3), weight(3), QuantSpec(4, 8)
    x[:, 3] = 0.0
    x[:, 9] = 2.5
    w[:, 16:24] = 0.0
    w[2] = 0.0
    h, qp = Gram.of(x).covariance(), qparams(w, spec)
    q = compensate(w, h, qp, spec)
    assert torch.equal(q[:, [3, 9]], quantize(w, qp, spec)[:, [3, 9]])
    result = dequantize(q, qp, spec)
    assert not result[:, 16:24].any()
    assert not result[2].any()


def test_without_any_input_it_is_plain_rounding() -> None:
    spec, w = QuantSpec(4, 8), weight(4)
    qp = qparams(w, spec)
    assert torch.equal(compensate(w, torch.zeros(32, 32), qp, spec), quantize(w, qp, spec))


def test_statistics_that_no_inputs_could_have_are_borne() -> None:
    """An indefinite matrix, as float32 sums of large means may leave: more damping, or plain rounding."""
    spec, w = QuantSpec(4, 8), weight(5)
    h = torch.full((32, 32), 2.0).fill_diagonal_(1.0)
    qp = qparams(w, spec)
    q = compensate(w, h, qp, spec)
    assert 0 <= int(q.min()) <= int(q.max()) <= spec.largest


@pytest.mark.parametrize("factor", [1e-30, 1e-12, 1e12])
def test_the_unit_of_the_inputs_does_not_matter(factor: float) -> None:
    spec, w, h = QuantSpec(3, 16), weight(6, rows=32), Gram.of(inputs(6)).gram
    qp = qparams(w, spec)
    usual, other = compensate(w, h, qp, spec), compensate(w, h * factor, qp, spec)
    assert float((usual == other).double().mean()) > 0.99


def test_rows_are_rounded_alike_however_many_are_taken_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    spec, w, h = QuantSpec(4, 16), weight(7, rows=50, width=160), Gram.of(inputs(7, tokens=400, width=160)).gram
    qp = qparams(w, spec)
    whole = lost(compensate(w, h, qp, spec), w, h, qp, spec)
    monkeypatch.setattr("qvlopt.quant.compensate._ROWS", 7)
    monkeypatch.setattr("qvlopt.quant.compensate._BLOCK", 33)
    torch.testing.assert_close(lost(compensate(w, h, qp, spec), w, h, qp, spec), whole, rtol=0.05, atol=0)


def test_it_repeats_to_the_last_bit_and_modifies_nothing() -> None:
    spec, w, h = QuantSpec(4, 8), weight(8).to(torch.bfloat16), Gram.of(inputs(8)).gram
    qp = qparams(w, spec)
    before = w.clone(), h.clone(), qp.scale.clone(), qp.zero_point.clone()
    assert torch.equal(compensate(w, h, qp, spec), compensate(w, h, qp, spec))
    assert all(torch.equal(now, then) for now, then in zip((w, h, *qp), before, strict=True))


def test_the_energies_are_what_one_columns_error_costs_when_later_ones_make_up_for_it() -> None:
    """The least of e H e^T over the later columns of e, by solving for them."""
    h = Gram.of(inputs(11)).gram.double()
    factor = factored(h.float(), damping=0.0)
    assert factor is not None
    order = factor.order.tolist()
    for place in (0, 7, 30, 31):
        now, later = order[place], order[place + 1 :]
        free = h[now, later] @ torch.linalg.solve(h[later][:, later], h[later, now]) if later else 0.0
        assert float(factor.energy[now]) == pytest.approx(float(h[now, now] - free), rel=1e-3)


def test_a_dead_channels_error_costs_nothing_in_whatever_unit_the_others_are() -> None:
    x = inputs(13)
    x[:, [3, 9]] = 0.0
    h = Gram.of(x).gram
    for unit in (1.0, 1e-9):
        factor = factored(h * unit)
        assert factor is not None
        assert factor.energy[[3, 9]].tolist() == [0.0, 0.0]
        assert int((factor.energy > 0).sum()) == 30
        assert not factor.rescaled(torch.full((32,), 0.5)).energy[[3, 9]].any()


def test_a_factor_moves_with_the_scale_of_the_inputs() -> None:
    h, scale = Gram.of(inputs(12)).gram, torch.rand(32, generator=torch.Generator().manual_seed(0)) + 0.5
    factor = factored(h)
    assert factor is not None
    moved = factor.rescaled(scale)
    ordered = rescaled(h, scale)[moved.order][:, moved.order]
    expected = ordered + torch.diag(DAMPING * ordered.diagonal())
    torch.testing.assert_close(moved.upper @ moved.upper.T, expected, rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(moved.energy, factor.energy / scale.square(), rtol=1e-5, atol=0)


def test_a_loss_is_measured_as_everywhere_else() -> None:
    spec, w, h = QuantSpec(4, 8), weight(9), Gram.of(inputs(9)).gram
    qp = qparams(w, spec)
    q = compensate(w, h, qp, spec)
    torch.testing.assert_close(row_error(dequantize(q, qp, spec) - w, h), lost(q, w, h, qp, spec), rtol=1e-4, atol=0)


def test_what_does_not_fit_is_refused() -> None:
    spec, w, h = QuantSpec(4, 8), weight(10), Gram.of(inputs(10)).gram
    qp = qparams(w, spec)
    with pytest.raises(ValueError, match=r"\(6, 32\).*\(16, 16\)"):
        compensate(w, h[:16, :16], qp, spec)
    with pytest.raises(ValueError, match="damping -1"):
        factored(h, damping=-1)
    with pytest.raises(ValueError, match="-1 sweeps"):
        compensate(w, h, qp, spec, sweeps=-1)
    with pytest.raises(ValueError, match="NaN or infinity"):
        compensate(w, h * float("nan"), qp, spec)
    broken = w.clone()
    broken[0, 0] = float("inf")
    with pytest.raises(ValueError, match="weight: holds NaN"):
        compensate(broken, h, qp, spec)
