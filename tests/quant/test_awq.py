"""AWQ's searches: never worse than plain rounding, as good as slow references, and calm about dead channels."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qvlopt.quant.awq import search_clip, search_scale
from qvlopt.quant.objective import Gram, error, rescaled, row_error
from qvlopt.quant.rounding import QuantSpec, dequantize, qparams, quantize, rounding_error

EXAMPLES = settings(deadline=None, derandomize=True, max_examples=25)
SPECS = st.builds(QuantSpec, bits=st.sampled_from([2, 3, 4, 8]), group_size=st.sampled_from([8, 16]), symmetric=st.booleans())


def inputs(seed: int, *, tokens: int = 96, width: int = 32, outliers: float = 30.0) -> torch.Tensor:
    """Correlated inputs with a mean and a few outlier channels, as after a LayerNorm."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, width // 8, generator=generator) @ torch.randn(width // 8, width, generator=generator)
    x = x + torch.randn(tokens, width, generator=generator) + torch.randn(width, generator=generator)
    x[:, torch.randperm(width, generator=generator)[: max(1, width // 32)]] *= outliers
    return x


def weight(seed: int, *, rows: int = 6, width: int = 32) -> torch.Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)) * 0.02


def rounded(w: torch.Tensor, spec: QuantSpec, clip: torch.Tensor | None = None) -> torch.Tensor:
    qp = qparams(w, spec, clip)
    return dequantize(quantize(w, qp, spec), qp, spec)


def slow_candidates(w: torch.Tensor, mean_abs: list[float], group_size: int, grid: int) -> list[list[float]]:
    """AWQ's two families of channel scales, one number at a time."""
    rows, width = w.shape
    share = [0.0] * width
    for n, k in product(range(rows), range(width)):
        group = w[n, k // group_size * group_size :][:group_size]
        share[k] += abs(float(w[n, k])) / max(abs(float(value)) for value in group) / rows
    largest = max(mean_abs)
    x = [value / largest for value in mean_abs]
    families = [[value ** (i / grid) for value in x] for i in range(grid + 1)]
    families += [[a ** (i / grid) / (b ** (1 - i / grid) + 1e-4) for a, b in zip(x, share, strict=True)] for i in range(grid)]
    return [[value / (max(s) * min(s)) ** 0.5 for value in s] for s in families]


def slow_clip(w: torch.Tensor, h: torch.Tensor, spec: QuantSpec, steps: int) -> torch.Tensor:
    """One sweep of coordinate descent over a row's groups, every candidate rounded and judged as a whole row in float64."""
    groups = w.shape[1] // spec.group_size
    clip = torch.ones(w.shape[0], groups, 2)
    shrinks = [1 - 0.5 * i / steps for i in range(steps + 1)]

    def loss(n: int, candidate: torch.Tensor) -> float:
        dw = (rounded(w[n : n + 1], spec, candidate) - w[n : n + 1]).double()
        return float(dw @ h.double() @ dw.T)

    for n, group, ends in product(range(w.shape[0]), range(groups), ([0, 1], [0], [1])):
        options = [clip[n : n + 1].clone()]
        for shrink in shrinks:
            option = clip[n : n + 1].clone()
            option[0, group, ends] = shrink
            options.append(option)
        clip[n] = min(options, key=lambda option: loss(n, option))[0]
    return clip


@EXAMPLES
@given(spec=SPECS, seed=st.integers(0, 10**6))
def test_a_scale_is_never_worse_than_plain_rounding_and_its_losses_are_the_output_errors(spec: QuantSpec, seed: int) -> None:
    x, weights = inputs(seed), [weight(seed), weight(seed + 1, rows=3)]
    gram = Gram.of(x)
    found = search_scale(weights, gram.gram, gram.mean_abs, spec, grid=5)
    plain = sum(float((x @ (rounded(w, spec) - w).T).double().square().sum()) for w in weights)
    scaled = sum(float((x @ (rounded(w * found.scale, spec) / found.scale - w).T).double().square().sum()) for w in weights)
    assert found.rounding_loss == pytest.approx(plain, rel=1e-3)
    assert found.loss == pytest.approx(scaled, rel=1e-3)
    assert found.loss <= found.rounding_loss
    assert bool((torch.isfinite(found.scale) & (found.scale > 0)).all())


@pytest.mark.parametrize("seed", range(4))
def test_the_best_scale_of_the_slow_reference_is_found(seed: int) -> None:
    spec, w, x = QuantSpec(4, 16), weight(seed), inputs(seed)
    gram = Gram.of(x)
    losses = []
    for scale in slow_candidates(w, gram.mean_abs.tolist(), spec.group_size, grid=6):
        s = torch.tensor(scale)
        losses.append(float((x @ (rounded(w * s, spec) / s - w).T).double().square().sum()))
    found = search_scale([w], gram.gram, gram.mean_abs, spec, grid=6)
    assert found.loss == pytest.approx(min(losses), rel=1e-3)


@pytest.mark.parametrize("bits", [3, 4])
def test_outliers_lose_less_than_half_of_it_and_clipping_takes_a_fifth_off_also_on_unseen_inputs(bits: int) -> None:
    spec, w = QuantSpec(bits, 64), weight(0, rows=64, width=128)
    seen, fresh = inputs(0, tokens=2048, width=128).chunk(2)
    gram = Gram.of(seen)
    found = search_scale([w], gram.gram, gram.mean_abs, spec)
    assert found.loss < 0.5 * found.rounding_loss
    scaled, h = w * found.scale, rescaled(gram.gram, found.scale)
    clip = search_clip(scaled, h, spec)
    assert error(rounding_error(scaled, spec, clip), h) < 0.8 * found.loss
    change, plain = rounded(scaled, spec, clip) / found.scale - w, rounding_error(w, spec)
    assert (fresh @ change.T).square().sum() < 0.4 * (fresh @ plain.T).square().sum()


def test_a_scaled_layer_computes_the_same_before_rounding() -> None:
    x, w = inputs(1), weight(1)
    gram = Gram.of(x)
    scale = search_scale([w], gram.gram, gram.mean_abs, QuantSpec(4, 16)).scale
    assert not torch.equal(scale, torch.ones(32))
    torch.testing.assert_close((x / scale) @ (w * scale).T, x @ w.T, rtol=1e-4, atol=1e-4)


def test_ranking_on_some_rows_finds_what_all_rows_would(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = QuantSpec(4, 16)
    weights = [weight(2, rows=512) * torch.logspace(-2, 0, 512).unsqueeze(1), weight(3, rows=256) * 1e-4]
    gram = Gram.of(inputs(2))
    whole = search_scale(weights, gram.gram, gram.mean_abs, spec)
    monkeypatch.setattr("qvlopt.quant.awq._RANKING_ELEMENTS", 64 * 32)
    part = search_scale(weights, gram.gram, gram.mean_abs, spec)
    assert part.rounding_loss == whole.rounding_loss
    assert part.loss <= 1.01 * whole.loss


def test_dead_channels_keep_scale_one_and_zeros_stay_zero() -> None:
    x, w = inputs(3), weight(3)
    x[:, 3] = 0.0
    w[:, 5] = 0.0
    w[:, 16:24] = 0.0
    x[:, 9] = -x[:, 9].abs() - 1
    gram = Gram.of(x)
    spec = QuantSpec(4, 8)
    found = search_scale([w], gram.gram, gram.mean_abs, spec)
    assert found.scale[[3, 5, *range(16, 24)]].tolist() == [1.0] * 10
    assert torch.isfinite(found.scale).all()
    clip = search_clip(w * found.scale, rescaled(gram.gram, found.scale), spec)
    result = rounded(w * found.scale, spec, clip)
    assert not result[:, [5, *range(16, 24)]].any()
    assert clip[:, 2].tolist() == [[1.0, 1.0]] * 6


def test_without_activations_or_weights_the_scale_is_one() -> None:
    spec, nothing, w = QuantSpec(4, 8), Gram.of(torch.zeros(4, 32)), weight(4)
    assert torch.equal(search_scale([w], nothing.gram, nothing.mean_abs, spec).scale, torch.ones(32))
    live = Gram.of(inputs(4))
    assert torch.equal(search_scale([torch.zeros(6, 32)], live.gram, live.mean_abs, spec).scale, torch.ones(32))
    assert torch.equal(search_clip(w, nothing.gram, spec), torch.ones(6, 4, 2))


@pytest.mark.parametrize("factor", [1e-40, 1e-20, 1e15])
def test_activations_of_any_size_give_finite_moderate_scales(factor: float) -> None:
    x, w = inputs(5), weight(5)
    x[:, :8] *= factor
    gram = Gram.of(x)
    found = search_scale([w], gram.gram, gram.mean_abs, QuantSpec(4, 8))
    assert found.loss <= found.rounding_loss
    assert 2**-10.01 <= float(found.scale.min()) <= float(found.scale.max()) <= 2**10.01


def test_a_tied_scale_repeats_over_the_merged_blocks() -> None:
    x, w = inputs(6), weight(6)
    gram = Gram.of(x)
    found = search_scale([w], gram.gram, gram.mean_abs, QuantSpec(4, 8), channels=torch.arange(8).repeat(4))
    blocks = found.scale.view(4, 8)
    assert not torch.equal(blocks[0], torch.ones(8))
    assert all(torch.equal(blocks[0], block) for block in blocks)
    assert found.loss < found.rounding_loss


def test_inputs_of_one_channel_share_a_scale_wherever_they_stand() -> None:
    gram = Gram.of(inputs(6))
    channels = torch.arange(16).view(2, 8).repeat_interleave(2, 0).flatten()  # heads of 8, two of which share their values
    found = search_scale([weight(6)], gram.gram, gram.mean_abs, QuantSpec(4, 8), channels=channels)
    heads = found.scale.view(2, 2, 8)
    assert torch.equal(heads[:, 0], heads[:, 1])
    assert not torch.equal(heads[0], heads[1])
    assert found.loss < found.rounding_loss


def test_channels_that_do_not_fit_the_width_are_refused() -> None:
    gram = Gram.of(inputs(7))
    with pytest.raises(ValueError, match=r"\(8,\).*32"):
        search_scale([weight(7)], gram.gram, gram.mean_abs, QuantSpec(4, 8), channels=torch.arange(8))


@EXAMPLES
@given(spec=SPECS, seed=st.integers(0, 10**6), outliers=st.sampled_from([1.0, 100.0]))
def test_no_row_gets_worse_by_clipping(spec: QuantSpec, seed: int, outliers: float) -> None:
    w, h = weight(seed), Gram.of(inputs(seed, outliers=outliers)).gram
    clip = search_clip(w, h, spec)
    plain, clipped = (rounding_error(w, spec, c).double() for c in (None, clip))
    before, after = (((dw @ h.double()) * dw).sum(1) for dw in (plain, clipped))
    assert bool((after <= before * (1 + 1e-12)).all())
    assert clip.shape == (6, 32 // spec.group_size, 2)
    assert 0.5 <= float(clip.min()) <= float(clip.max()) <= 1
    if spec.symmetric:
        assert torch.equal(clip[..., 0], clip[..., 1])


def test_a_row_that_gains_too_little_keeps_its_whole_range(monkeypatch: pytest.MonkeyPatch) -> None:
    spec, w, h = QuantSpec(4, 8), weight(13, rows=40), Gram.of(inputs(13)).gram
    before = row_error(rounding_error(w, spec), h)
    gain = 1 - row_error(rounding_error(w, spec, search_clip(w, h, spec)), h) / before
    middle = float(gain.median())
    monkeypatch.setattr("qvlopt.quant.awq._MIN_GAIN", middle)
    untouched = (search_clip(w, h, spec) == 1).all(-1).all(-1)
    assert bool(untouched[gain < 0.99 * middle].all())
    assert not bool(untouched[gain > 1.01 * middle].any())


@pytest.mark.parametrize(("seed", "bits"), [(0, 4), (1, 4), (2, 3), (3, 2)])
def test_clipping_is_as_good_as_the_slow_reference(seed: int, bits: int) -> None:
    spec, w, h = QuantSpec(bits, 8), weight(seed, rows=3), Gram.of(inputs(seed)).gram
    found = row_error(rounding_error(w, spec, search_clip(w, h, spec, steps=5, sweeps=1)), h)
    expected = row_error(rounding_error(w, spec, slow_clip(w, h, spec, steps=5)), h)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=0)


def test_rows_are_clipped_alike_however_many_are_taken_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    spec, w, h = QuantSpec(4, 8), weight(8), Gram.of(inputs(8)).gram
    whole = row_error(rounding_error(w, spec, search_clip(w, h, spec)), h)
    monkeypatch.setattr("qvlopt.quant.awq._CHUNK", 2 * 32)
    parts = row_error(rounding_error(w, spec, search_clip(w, h, spec)), h)
    torch.testing.assert_close(parts, whole, rtol=1e-3, atol=0)


def test_searches_repeat_to_the_last_bit_and_modify_nothing() -> None:
    spec, w, gram = QuantSpec(4, 8), weight(9).to(torch.bfloat16), Gram.of(inputs(9))
    h = gram.gram
    before = w.clone(), h.clone()
    first, second = (search_scale([w], h, gram.mean_abs, spec) for _ in range(2))
    assert torch.equal(first.scale, second.scale)
    assert first.loss == second.loss
    assert torch.equal(search_clip(w, h, spec), search_clip(w, h, spec))
    assert torch.equal(w, before[0])
    assert torch.equal(h, before[1])


def test_statistics_of_another_width_are_refused_with_the_shapes() -> None:
    gram = Gram.of(inputs(10))
    with pytest.raises(ValueError, match=r"\(6, 64\).*\(32, 32\)"):
        search_scale([weight(10, width=64)], gram.gram, gram.mean_abs, QuantSpec(4, 8))
    with pytest.raises(ValueError, match=r"\(6, 64\).*\(32, 32\)"):
        search_clip(weight(10, width=64), gram.gram, QuantSpec(4, 8))
    with pytest.raises(ValueError, match="no weight"):
        search_scale([], gram.gram, gram.mean_abs, QuantSpec(4, 8))


def test_broken_weights_or_statistics_are_refused() -> None:
    spec, gram, w = QuantSpec(4, 8), Gram.of(inputs(11)), weight(11)
    broken = w.clone()
    broken[0, 0] = float("nan")
    with pytest.raises(ValueError, match="weight: holds NaN"):
        search_scale([broken], gram.gram, gram.mean_abs, spec)
    with pytest.raises(ValueError, match="weight: holds NaN"):
        search_clip(broken, gram.gram, spec)
    with pytest.raises(ValueError, match="statistics: hold NaN"):
        search_clip(w, gram.gram * float("inf"), spec)


@pytest.mark.parametrize(("steps", "sweeps", "max_shrink"), [(0, 1, 0.5), (10, 0, 0.5), (10, 1, 1.0), (10, 1, 0.0)])
def test_impossible_clip_searches_are_refused(steps: int, sweeps: int, max_shrink: float) -> None:
    with pytest.raises(ValueError, match="clip search"):
        search_clip(weight(12), Gram.of(inputs(12)).gram, QuantSpec(4, 8), steps=steps, sweeps=sweeps, max_shrink=max_shrink)


@pytest.mark.parametrize("seed", range(4))
def test_later_sweeps_over_large_weights_find_about_as_much_nearby(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    spec, w, h = QuantSpec(4, 8), weight(seed, rows=40), Gram.of(inputs(seed)).gram
    before = row_error(rounding_error(w, spec), h).sum()
    everywhere = row_error(rounding_error(w, spec, search_clip(w, h, spec)), h).sum()
    once = row_error(rounding_error(w, spec, search_clip(w, h, spec, sweeps=1)), h).sum()
    monkeypatch.setattr("qvlopt.quant.awq._LARGE", 1)
    clip = search_clip(w, h, spec)
    nearby = row_error(rounding_error(w, spec, clip), h).sum()
    assert 0.5 <= float(clip.min()) <= float(clip.max()) <= 1
    assert float(nearby) < float(once)
    assert float(before - nearby) > 0.95 * float(before - everywhere)
