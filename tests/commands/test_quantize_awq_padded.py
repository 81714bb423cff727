"""quantize-awq on a tower whose inner width no group divides: padded, skipped or refused, and the compensated search end to end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from qvlopt.artifact.manifest import read_manifest
from qvlopt.commands.quantize_awq import QuantizeResult, quantize_awq
from qvlopt.damage.tensors import tower_errors
from qvlopt.errors import UsageError
from qvlopt.model.load_tower import load_vision
from qvlopt.model.source import open_source
from qvlopt.model.vision import VisionOutput
from tests.tiny import build_tiny
from tests.tiny_run import PLAIN, SMALL, build_set, stored, tiny_recipe

INNER = 72
VISION = {**SMALL["vision"], "intermediate_size": INNER}
FC1, FC2 = "model.visual.blocks.0.mlp.linear_fc1", "model.visual.blocks.0.mlp.linear_fc2"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("padded")
    build_tiny(folder / "odd", vision=VISION, text=SMALL["text"])
    build_set(folder / "set")
    return folder


def quantised(place: Path, name: str, **section: Any) -> QuantizeResult:
    result = quantize_awq(tiny_recipe(place / "odd", place / "set", place / name, quantize_awq={"on_indivisible": "pad", **section}))
    assert isinstance(result, QuantizeResult)
    return result


def tower(folder: Path) -> tuple[list[VisionOutput], int]:
    """Outputs for seeded pictures, and the inner width that the folder's config says."""
    source = open_source(str(folder), folder=folder.parent)
    pixels = torch.randn(3, 16, source.settings.vision.patch_dim, generator=torch.Generator().manual_seed(0))
    return [load_vision(source, dtype=torch.float32, device="cpu")(pixels, (4, 4))], source.settings.vision.intermediate_size


def test_a_padded_twin_answers_as_the_source(place: Path) -> None:
    result = quantised(place, "twin", format="bf16", bits=8, search=PLAIN)
    (before, inner), (after, wide) = tower(place / "odd"), tower(result.output)
    assert (inner, wide) == (INNER, 128)
    assert all(row.relative_error < 0.03 for row in tower_errors(before, after))
    tensors = stored(result.output)
    assert not tensors[f"{FC1}.weight"][INNER:].any()
    assert not tensors[f"{FC1}.bias"][INNER:].any()
    assert not tensors[f"{FC2}.weight"][:, INNER:].any()
    assert set(result.modules_quantized) >= {FC1, FC2}


@pytest.mark.parametrize("form", ["awq", "compressed-tensors"])
def test_every_format_is_the_padded_twin(place: Path, form: str) -> None:
    result, twin = quantised(place, form, format=form), quantised(place, f"{form}-twin", format="bf16")
    (packed, wide), (plain, _) = tower(result.output), tower(twin.output)
    assert wide == 128
    assert torch.equal(packed[0].merged, plain[0].merged)
    manifest = read_manifest(result.output)
    assert f"intermediate_size is 128: the MLPs are padded with zeros from {INNER}" in manifest.changes["config.json"]
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (place / "odd", result.output))
    assert after["vision_config"] == {**before["vision_config"], "intermediate_size": 128}
    assert after["text_config"] == before["text_config"]


def test_layers_that_are_kept_are_padded_all_the_same(place: Path) -> None:
    """The width is one number for all blocks, whatever becomes of them."""
    result = quantised(place, "kept", format="awq", search=PLAIN, keep=["lm_head", "blocks.0.mlp.*", "blocks.1.mlp.linear_fc1"])
    assert FC1 in result.modules_kept
    before, after = stored(place / "odd"), stored(result.output)
    for name, shape in ((f"{FC1}.weight", (128, 64)), (f"{FC1}.bias", (128,)), (f"{FC2}.weight", (64, 128))):
        assert tuple(after[name].shape) == shape
        assert torch.equal(after[name][tuple(slice(size) for size in before[name].shape)], before[name])
        assert after[name].dtype == before[name].dtype
    (source, _), (kept, _) = tower(place / "odd"), tower(result.output)
    assert all(row.relative_error < 0.5 for row in tower_errors(source, kept))


def test_compensation_and_padding_go_together(place: Path) -> None:
    result = quantised(place, "both", format="bf16", search={"grid": 2, "compensate": True})
    rows = {row.name: row for row in read_manifest(result.output).layers}
    assert all(row.held_out_loss is not None and row.held_out_uncompensated is not None for row in rows.values())
    assert "compensate" in rows[FC2].method
    assert not stored(result.output)[f"{FC2}.weight"][:, INNER:].any()


def test_the_default_refuses_with_every_layer(place: Path) -> None:
    with pytest.raises(UsageError, match=rf"{FC2}: input width {INNER}; model\.visual\.blocks\.1\.mlp\.linear_fc2: input width {INNER}"):
        quantised(place, "refused", on_indivisible="error")


def test_skipped_layers_keep_their_bytes(place: Path) -> None:
    result = quantised(place, "skipped", on_indivisible="skip", search=PLAIN)
    assert FC2 in result.modules_kept
    assert torch.equal(stored(result.output)[f"{FC2}.weight"], stored(place / "odd")[f"{FC2}.weight"])
    assert tower(result.output)[1] == INNER
