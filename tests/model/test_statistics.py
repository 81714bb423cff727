"""Statistics survive their file bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from qvlopt.errors import RunError
from qvlopt.model.statistics import FILE, StatisticsFiles, gather_statistics, save_statistics
from qvlopt.model.token_draw import HELD_OUT
from qvlopt.quant.objective import Gram

GRAMS = {
    "model.visual.blocks.0.attn.qkv": Gram.of(torch.randn(50, 24, generator=torch.Generator().manual_seed(0)) * 1e3),
    "model.visual.blocks.10.attn.qkv": Gram.of(torch.randn(3, 16, generator=torch.Generator().manual_seed(1))),
    "model.visual.merger.linear_fc1": Gram.empty(8),
}


def test_what_is_saved_is_read_bit_for_bit(tmp_path: Path) -> None:
    save_statistics(tmp_path / FILE, GRAMS)
    files = StatisticsFiles(tmp_path)
    assert files.layers == set(GRAMS)
    for name, expected in GRAMS.items():
        got = files.read(name)
        assert got.count == expected.count
        for part in ("sum", "centred", "abs_sum", "abs_max"):
            assert torch.equal(getattr(got, part), getattr(expected, part))
            assert getattr(got, part).dtype == getattr(expected, part).dtype


def test_the_file_is_ordinary_safetensors_of_wide_types(tmp_path: Path) -> None:
    save_statistics(tmp_path / FILE, GRAMS)
    with safe_open(tmp_path / FILE, "pt") as file:
        dtypes = {name: file.get_tensor(name).dtype for name in file.keys()}  # noqa: SIM118
    assert len(dtypes) == 5 * len(GRAMS)
    assert set(dtypes.values()) == {torch.float32, torch.float64, torch.int64}


def test_the_same_statistics_are_the_same_bytes(tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
        save_statistics(folder / FILE, GRAMS)
    assert (folders[0] / FILE).read_bytes() == (folders[1] / FILE).read_bytes()


def test_statistics_of_held_out_pictures_stay_apart_and_count_where_all_are_asked_for(tmp_path: Path) -> None:
    name = "model.visual.blocks.0.attn.qkv"
    held_out = Gram.of(torch.randn(20, 24, generator=torch.Generator().manual_seed(2)))
    save_statistics(tmp_path / FILE, GRAMS | {name + HELD_OUT: held_out})
    files = StatisticsFiles(tmp_path)
    apart = files.read_held_out(name)
    assert apart is not None
    assert torch.equal(apart.centred, held_out.centred)
    assert torch.equal(files.read_fitted(name).centred, GRAMS[name].centred)
    assert files.read(name).count == 70
    assert torch.equal(files.read(name).centred, GRAMS[name].merge(held_out).centred)
    assert files.read_held_out("model.visual.blocks.10.attn.qkv") is None


@pytest.mark.parametrize("links", [True, False])
def test_shards_are_read_like_one_file_and_keep_their_own_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, links: bool) -> None:
    def refuse(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    if not links:
        monkeypatch.setattr("os.link", refuse)
    parts, folder = [tmp_path / f"{place}.safetensors" for place in range(len(GRAMS))], tmp_path / "gathered"
    folder.mkdir()
    for path, (name, gram) in zip(parts, GRAMS.items(), strict=True):
        save_statistics(path, {name: gram})
    gather_statistics(folder, parts)
    files = StatisticsFiles(folder)
    assert files.layers == set(GRAMS)
    assert all(torch.equal(files.read(name).centred, gram.centred) for name, gram in GRAMS.items())
    assert {path.stat().st_nlink for path in parts} == {2 if links else 1}


def test_a_layer_that_was_not_calibrated_is_named(tmp_path: Path) -> None:
    save_statistics(tmp_path / FILE, GRAMS)
    with pytest.raises(RunError, match=r"has no statistics of model\.visual\.blocks\.1\.attn\.qkv"):
        StatisticsFiles(tmp_path).read("model.visual.blocks.1.attn.qkv")


def test_a_folder_without_statistics_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=FILE):
        StatisticsFiles(tmp_path)
