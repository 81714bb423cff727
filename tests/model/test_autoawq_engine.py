"""The adapter of AutoAWQ's searches: against a stand-in of its class always, against the package itself where it is installed."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from qvlopt.commands.quantize_awq import QuantizeResult, quantize_awq
from qvlopt.errors import RunError, UsageError
from qvlopt.model.autoawq import AutoAwq
from qvlopt.quant.rounding import QuantSpec, qparams
from tests.tiny import build_tiny
from tests.tiny_run import SMALL, build_set, stored, tiny_recipe

SPEC = QuantSpec(4, 32)


def installed() -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            import awq.quantize.quantizer  # noqa: F401
        except ImportError:
            return False
    return True


needs_autoawq = pytest.mark.skipif(not installed(), reason="autoawq is not installed")


def weight(rows: int = 64) -> torch.Tensor:
    return torch.randn(rows, 96, generator=torch.Generator().manual_seed(1)) * 0.1


def inputs() -> torch.Tensor:
    x = torch.randn(600, 96, generator=torch.Generator().manual_seed(2))
    x[:, 5] *= 40
    return x


class StandIn:
    """What the adapter uses of an AwqQuantizer, with answers that a test can know."""

    group_size: int

    def _search_best_scale(self, module: Any, prev_op: Any, layers: list[Any], inp: torch.Tensor) -> tuple[str, tuple[str, ...], torch.Tensor]:
        assert isinstance(prev_op, torch.nn.Module)
        assert [layers[0]] == [module.linear]
        return "before", ("linear",), inp.abs().mean(0).half()

    def _compute_best_clip(self, w: torch.Tensor, input_feat: torch.Tensor) -> torch.Tensor:
        assert len(w) % 64 == 0
        assert input_feat.shape[1] == w.shape[1]
        return 0.75 * w.reshape(len(w), -1, self.group_size).abs().amax(-1, keepdim=True)


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("awq", "awq.quantize", "awq.quantize.quantizer"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setattr(sys.modules["awq.quantize.quantizer"], "AwqQuantizer", StandIn, raising=False)


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("rows", [64, 100])
def test_a_largest_magnitude_becomes_a_share_of_each_end(rows: int) -> None:
    w = weight(rows)
    w[3, :32] = w[3, :32].abs()  # a group without negative weights: its low end is 0 and stays
    clip = AutoAwq(group_size=32, zero_point=True).clip(w, inputs())
    assert clip.shape == (rows, 3, 2)
    assert 0 < float(clip.min()) <= float(clip.max()) == 1
    groups = w.view(rows, 3, 32)
    limit = 0.75 * groups.abs().amax(-1)
    torch.testing.assert_close(groups.amax(-1).clamp(min=0) * clip[..., 1], torch.minimum(groups.amax(-1).clamp(min=0), limit))
    torch.testing.assert_close(-groups.amin(-1).clamp(max=0) * clip[..., 0], torch.minimum(-groups.amin(-1).clamp(max=0), limit))
    assert float(clip[3, 0, 0]) == 1
    qparams(w, SPEC, clip)  # takes it


@pytest.mark.usefixtures("stand_in")
def test_a_scale_is_float32_and_the_weights_are_not_touched() -> None:
    w = weight()
    before = w.clone()
    found = AutoAwq(group_size=32, zero_point=True).scale(w, torch.zeros(64), inputs())
    assert found.dtype == torch.float32
    assert found.shape == (96,)
    assert torch.equal(w, before)


def test_a_missing_package_is_said_before_any_work_with_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("awq", "awq.quantize", "awq.quantize.quantizer"):
        monkeypatch.setitem(sys.modules, name, None)
    model, data = build_tiny(tmp_path / "tiny", **SMALL), build_set(tmp_path / "set")
    monkeypatch.setattr("qvlopt.commands.awq_stages.captured", None)
    with pytest.raises(RunError, match=r"autoawq is not installed") as failed:
        quantize_awq(tiny_recipe(model, data, tmp_path / "out", quantize_awq={"engine": "autoawq"}))
    assert failed.value.exit_code == 5
    assert "qvlopt[autoawq]" in (failed.value.hint or "")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("section", [{"scope": "vision+language"}, {"search": {"compensate": True}}, {"on_indivisible": "pad"}], ids=str)
def test_what_autoawq_has_no_notion_of_is_refused(tmp_path: Path, section: dict[str, Any]) -> None:
    model, data = build_tiny(tmp_path / "tiny", **SMALL), build_set(tmp_path / "set")
    with pytest.raises(UsageError, match="does not fit engine: autoawq"):
        quantize_awq(tiny_recipe(model, data, tmp_path / "out", quantize_awq={"engine": "autoawq", **section}))


def artifact(tmp_path: Path, name: str, **section: Any) -> QuantizeResult:
    model, data = tmp_path / "tiny", tmp_path / "set"
    if not model.exists():
        build_tiny(model, **SMALL)
        build_set(data)
    result = quantize_awq(tiny_recipe(model, data, tmp_path / name, quantize_awq=section))
    assert isinstance(result, QuantizeResult)
    return result


@pytest.mark.usefixtures("stand_in")
def test_the_artifact_is_as_any_other_and_says_who_searched(tmp_path: Path) -> None:
    result = artifact(tmp_path, "auto", engine="autoawq")
    native = artifact(tmp_path, "native")
    assert set(stored(result.output)) == set(stored(native.output))
    assert {layer.method for layer in result.layers} == {"autoawq", "autoawq+scale"}
    assert [layer.rounding_loss for layer in result.layers] == pytest.approx([layer.rounding_loss for layer in native.layers], rel=1e-5)
    assert result.check.passed


@needs_autoawq
@pytest.mark.filterwarnings("ignore")
def test_the_packages_own_searches_answer() -> None:
    search = AutoAwq(group_size=32, zero_point=True)
    scale = search.scale(weight(), torch.zeros(64), inputs())
    assert scale.shape == (96,)
    assert float(scale.max() * scale.min()) == pytest.approx(1, rel=1e-5)  # as it normalises
    clip = search.clip(weight(), inputs())
    assert 0.5 <= float(clip.min()) < 1


@needs_autoawq
@pytest.mark.filterwarnings("ignore")
def test_its_artifact_is_better_than_plain_rounding_and_ours_is_better_still(tmp_path: Path) -> None:
    auto, ours = artifact(tmp_path, "auto", engine="autoawq"), artifact(tmp_path, "ours", search={"grid": 20})
    losses = [sum(layer.loss for layer in result.layers) for result in (ours, auto)]
    assert losses[0] < losses[1] < sum(layer.rounding_loss for layer in auto.layers)
