"""The quadratic form against the loss that it stands for, and statistics that merge."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qvlopt.quant.objective import Gram, bias_correction, error, relative_error, rescaled, row_error

EXAMPLES = settings(deadline=None, derandomize=True, max_examples=30)


def inputs(seed: int, tokens: int = 200, width: int = 16) -> torch.Tensor:
    """Inputs with a mean and with outlier channels of 100 times the rest."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, width, generator=generator) + torch.randn(width, generator=generator)
    x[:, :: max(2, width // 4)] *= 100
    return x


def change(seed: int, rows: int = 5, width: int = 16) -> torch.Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)) * 0.01


def assert_close(one: Gram, other: Gram) -> None:
    assert one.count == other.count
    torch.testing.assert_close(one.sum, other.sum, rtol=1e-9, atol=1e-6)
    torch.testing.assert_close(one.abs_sum, other.abs_sum, rtol=1e-9, atol=1e-6)
    assert torch.equal(one.abs_max, other.abs_max)
    size = one.centred.diagonal().sqrt()
    assert bool(((one.centred - other.centred).abs() <= 1e-5 * torch.outer(size, size)).all())


def test_statistics_equal_sums_taken_one_number_at_a_time() -> None:
    x = inputs(0, tokens=7, width=5)
    gram = Gram.of(x)
    rows = x.double().tolist()
    assert gram.count == 7
    for i in range(5):
        column = [row[i] for row in rows]
        assert float(gram.sum[i]) == pytest.approx(sum(column))
        assert float(gram.abs_sum[i]) == pytest.approx(sum(abs(value) for value in column))
        assert float(gram.abs_max[i]) == max(abs(value) for value in column)
        assert float(gram.mean[i]) == pytest.approx(sum(column) / 7)
        assert float(gram.mean_abs[i]) == pytest.approx(sum(abs(value) for value in column) / 7)
        for j in range(5):
            product = sum(row[i] * row[j] for row in rows)
            centred = product - sum(column) * sum(row[j] for row in rows) / 7
            assert float(gram.gram[i, j]) == pytest.approx(product, rel=1e-5, abs=1e-3)
            assert float(gram.covariance()[i, j]) == pytest.approx(centred, rel=1e-4, abs=1e-2)


@EXAMPLES
@given(seed=st.integers(0, 10**6))
def test_error_is_the_squared_output_error(seed: int) -> None:
    x, dw = inputs(seed), change(seed)
    direct = (x.double() @ dw.double().T).square().sum()
    assert error(dw, Gram.of(x).gram) == pytest.approx(float(direct), rel=1e-5)


@EXAMPLES
@given(seed=st.integers(0, 10**6))
def test_centred_error_is_the_squared_output_error_after_the_best_bias(seed: int) -> None:
    x, dw = inputs(seed), change(seed)
    gram = Gram.of(x)
    output = x.double() @ dw.double().T
    best = (output - output.mean(0)).square().sum()
    corrected = (output + bias_correction(dw, gram.mean).double()).square().sum()
    assert error(dw, gram.covariance()) == pytest.approx(float(best), rel=1e-5)
    assert float(corrected) == pytest.approx(float(best), rel=1e-5)


def test_error_equals_a_triple_loop() -> None:
    dw, h = change(1, rows=2, width=4), Gram.of(inputs(1, width=4)).gram
    loop = sum(float(dw[n, i]) * float(h[i, j]) * float(dw[n, j]) for n in range(2) for i in range(4) for j in range(4))
    assert error(dw, h) == pytest.approx(loop, rel=1e-5)


def test_row_errors_add_up_and_are_never_negative() -> None:
    x = inputs(2, tokens=3)  # fewer tokens than channels: many changes cost nothing
    dw = torch.cat([change(2), torch.linalg.svd(x)[2][3:]])
    rows = row_error(dw, Gram.of(x).gram)
    assert rows.shape == (5 + 13,)
    assert bool((rows >= 0).all())
    assert error(dw, Gram.of(x).gram) == pytest.approx(float(rows.sum()))


@pytest.mark.parametrize("width", [255, 256, 257, 600])
def test_row_errors_of_wide_layers_are_those_of_the_whole_square(width: int) -> None:
    """Only one triangle is multiplied."""
    x, dw = inputs(4, tokens=700, width=width), change(4, rows=3, width=width)
    direct = (x.double() @ dw.double().T).square().sum(0)
    torch.testing.assert_close(row_error(dw, Gram.of(x).gram), direct, rtol=1e-5, atol=0)


def test_row_errors_do_not_depend_on_how_many_rows_are_taken_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    dw, h = change(3, rows=9), Gram.of(inputs(3)).gram
    whole = row_error(dw, h)
    monkeypatch.setattr("qvlopt.quant.objective._CHUNK", 2 * 16)
    torch.testing.assert_close(row_error(dw, h), whole, rtol=1e-5, atol=0)


@EXAMPLES
@given(seed=st.integers(0, 10**6), cuts=st.lists(st.integers(0, 200), max_size=4))
def test_statistics_do_not_depend_on_batches_or_their_order(seed: int, cuts: list[int]) -> None:
    x = inputs(seed)
    edges = [0, *sorted(cuts), 200]
    parts = [Gram.of(x[start:stop]) for start, stop in pairwise(edges)]
    forward, backward = Gram.empty(16), Gram.empty(16)
    for part in parts:
        forward = forward.merge(part)
    for part in reversed(parts):
        backward = part.merge(backward)
    assert_close(forward, Gram.of(x))
    assert_close(backward, Gram.of(x))


@EXAMPLES
@given(seed=st.integers(0, 10**6))
def test_merging_is_associative(seed: int) -> None:
    a, b, c = (Gram.of(inputs(seed + i, tokens=20 * (i + 1))) for i in range(3))
    assert_close(a.merge(b).merge(c), a.merge(b.merge(c)))


def test_a_mean_ten_thousand_times_the_spread_leaves_the_variance_intact() -> None:
    generator = torch.Generator().manual_seed(4)
    spread = torch.randn(500, 4, generator=generator)
    x = (spread + 10000).double()
    batches = Gram.of(x[:100].float()).merge(Gram.of(x[100:].float()))
    exact = x.float().double()
    exact = (exact - exact.mean(0)).T @ (exact - exact.mean(0))
    torch.testing.assert_close(batches.covariance().double(), exact, rtol=1e-4, atol=1e-2)


@pytest.mark.parametrize("width", [3, 256, 257, 600])
def test_gram_is_symmetric_and_right_at_every_width(width: int) -> None:
    x = torch.randn(40, width, generator=torch.Generator().manual_seed(5))
    gram = Gram.of(x).gram
    torch.testing.assert_close(gram, x.T @ x, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(gram, gram.T, rtol=1e-6, atol=1e-5)


def test_leading_dimensions_are_tokens() -> None:
    x = inputs(6)
    assert_close(Gram.of(x.view(4, 50, 16)), Gram.of(x))


def test_bfloat16_inputs_give_the_statistics_of_their_float32_values() -> None:
    x = inputs(7).to(torch.bfloat16)
    assert_close(Gram.of(x), Gram.of(x.float()))


def test_merging_does_not_modify_either_side() -> None:
    a, b = Gram.of(inputs(8)), Gram.of(inputs(9))
    before = a.centred.clone(), b.centred.clone()
    a.merge(b)
    assert torch.equal(a.centred, before[0])
    assert torch.equal(b.centred, before[1])


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_inputs_that_are_not_finite_are_refused(value: float) -> None:
    x = inputs(10)
    x[3, 2] = value
    with pytest.raises(ValueError, match="NaN or infinity"):
        Gram.of(x)


def test_statistics_of_layers_of_unequal_width_do_not_merge() -> None:
    with pytest.raises(ValueError, match=r"16.*8"):
        Gram.of(inputs(11)).merge(Gram.of(inputs(11, width=8)))


def test_relative_error_is_a_share_of_the_output_and_defined_without_one() -> None:
    h = Gram.of(inputs(12)).gram
    w = change(12)
    assert relative_error(0.1 * w, w, h) == pytest.approx(0.01, rel=1e-5)
    assert relative_error(torch.zeros_like(w), torch.zeros_like(w), h) == 0
    assert relative_error(w, torch.zeros_like(w), h) == float("inf")


def test_rescaled_is_the_gram_of_the_divided_inputs() -> None:
    x = inputs(13)
    scale = torch.linspace(0.25, 4, 16)
    torch.testing.assert_close(rescaled(Gram.of(x).gram, scale), Gram.of(x / scale).gram, rtol=1e-5, atol=1e-3)
