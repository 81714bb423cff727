"""What a stage needs at least, against counts made by torch's own counter and against arithmetic done by hand."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import cycle
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import DynamicCache

from qvlopt.model.load import load_model
from qvlopt.model.source import open_source
from qvlopt.runtime.torch_engine import CACHE
from qvlopt.timing.probes import PACE_STEPS, fastest, measure_limits, measure_pace
from qvlopt.timing.roofline import Limits, Need, attained, count_weights, stage_needs, stored_bytes
from tests.clock import FakeClock
from tests.tiny import build_tiny

GRID, PROMPT = (8, 12), 40


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny(tmp_path_factory.mktemp("tiny") / "model")


def test_operations_are_what_torch_counts(folder: Path) -> None:
    """Exactly; of the prompt's attention torch multiplies the whole square, where half of it is needed."""
    source = open_source(str(folder), folder=folder.parent)
    model = load_model(source, dtype=torch.float32, device="cpu")
    needs = stage_needs(source.settings, stored_bytes(source.settings, 4), patches=GRID[0] * GRID[1], prompt_tokens=PROMPT)
    patch_dim = 3 * 2 * 16 * 16
    with torch.inference_mode(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model.vision(torch.zeros(1, GRID[0] * GRID[1], patch_dim), GRID)
    assert counter.get_total_flops() == needs["vision"].operations
    with torch.inference_mode(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        hidden = model.text(
            inputs_embeds=torch.zeros(1, PROMPT, model.head.shape[1]),
            attention_mask=torch.ones(1, PROMPT, dtype=torch.int64),
            position_ids=torch.arange(PROMPT).expand(3, 1, -1),
            **{CACHE: DynamicCache(config=model.text.config)},
        ).last_hidden_state
        torch.nn.functional.linear(hidden[:, -1], model.head)
    text = source.settings.text
    masked = 2 * PROMPT**2 * text["num_attention_heads"] * text["head_dim"] * text["num_hidden_layers"]
    assert counter.get_total_flops() == needs["prefill"].operations + masked


def test_bytes_are_every_weight_once(folder: Path) -> None:
    source = open_source(str(folder), folder=folder.parent)
    weights = count_weights(source.settings)
    stored = stored_bytes(source.settings, 2)
    assert stored.vision == 2 * (weights.patch + weights.merged)
    assert stored.decode == stored.prefill == 2 * (weights.token + weights.head)
    text = source.settings.text
    cache = 2 * 2 * text["num_key_value_heads"] * text["head_dim"] * text["num_hidden_layers"]
    assert stage_needs(source.settings, stored, patches=0, prompt_tokens=10)["decode"].bytes == stored.decode + 10 * cache


def test_without_a_picture_there_is_no_vision(folder: Path) -> None:
    settings = open_source(str(folder), folder=folder.parent).settings
    assert set(stage_needs(settings, stored_bytes(settings, 4), patches=0, prompt_tokens=5)) == {"prefill", "decode"}


def test_the_slower_of_the_two_limits_binds() -> None:
    limits = Limits({"float32": 100.0}, 10.0)
    assert attained(Need(200, 10), 4.0, limits, "float32") == (2.0, 0.5, "arithmetic")
    assert attained(Need(100, 100), 20.0, limits, "float32") == (10.0, 0.5, "memory")


@pytest.mark.parametrize(
    ("limits", "dtype"), [(Limits({}, 10.0), "float32"), (Limits({"float32": 1.0}, None), "float32"), (Limits({"float32": 1.0}, 1.0), "int8")]
)
def test_a_limit_that_was_not_measured_says_nothing(limits: Limits, dtype: str) -> None:
    assert attained(Need(1, 1), 1.0, limits, dtype) is None


def test_the_fastest_call_counts_and_the_first_does_not() -> None:
    clock = FakeClock()
    durations = iter([9.0, 0.5, 0.3, 0.4, 0.6])
    assert fastest(lambda: clock.pass_(next(durations)), clock, settle=lambda: None, budget=1.0) == pytest.approx(0.3)
    assert list(durations) == [0.6]


def test_slow_calls_are_made_at_least_three_times() -> None:
    clock = FakeClock()
    calls: list[int] = []

    def call() -> None:
        calls.append(1)
        clock.pass_(5.0)

    fastest(call, clock, settle=lambda: None, budget=1.0)
    assert len(calls) == 1 + 3


def test_a_probe_measures_what_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qvlopt.timing.probes.SIDE", {"cpu": 8})
    monkeypatch.setattr("qvlopt.timing.probes.READ_SIDE", 16)
    clock = FakeClock()

    def product(left: torch.Tensor, _weight: torch.Tensor) -> None:
        if left.dtype == torch.float16:
            raise RuntimeError("not implemented")
        clock.pass_(0.5)

    class Integers:
        def run(self, _outputs: None, feeds: Mapping[str, np.ndarray]) -> None:
            assert feeds["x"].shape == (8, 8)
            clock.pass_(0.125)

    monkeypatch.setattr(torch.nn.functional, "linear", product)
    monkeypatch.setattr(torch, "mv", lambda *_: clock.pass_(0.25))
    monkeypatch.setattr("qvlopt.timing.probes.product_session", lambda *_, **__: Integers())
    limits = measure_limits(["float32", "float16", "int8"], device="cpu", clock=clock)
    assert limits == Limits({"float32": 2 * 8**3 / 0.5, "int8": 2 * 8**3 / 0.125}, 16 * 16 * 4 / 0.25)


def test_a_pace_is_what_is_usual_not_what_is_best(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qvlopt.timing.probes.SIDE", {"cpu": 8})
    monkeypatch.setattr("qvlopt.timing.probes.PACE_READ_SIDE", 16)
    clock = FakeClock()
    products = cycle([9.0, 0.5, 0.125, 0.25])  # the first is not counted
    monkeypatch.setattr(torch.nn.functional, "linear", lambda *_: clock.pass_(next(products)))
    monkeypatch.setattr(torch, "mv", lambda *_: clock.pass_(0.0625))
    monkeypatch.setattr("qvlopt.timing.probes._loop", lambda: clock.pass_(0.5))
    assert measure_pace(clock=clock) == {"float32": 2 * 8**3 / 0.25, "bytes": 16**2 * 4 / 0.0625, "python": PACE_STEPS / 0.5}
