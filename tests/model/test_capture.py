"""Statistics of a tower's inputs, against inputs that a reference forward kept whole."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from qvlopt.artifact.unfinished import Parts
from qvlopt.errors import RunError
from qvlopt.model.capture import Capture
from qvlopt.model.input_sums import MagnitudeSum
from qvlopt.model.load_tower import load_vision
from qvlopt.model.names import VISION, vision_linears, vision_stages
from qvlopt.model.source import Source, open_source
from qvlopt.model.stage_forward import Batch
from qvlopt.model.token_draw import HELD_OUT, drawn_tokens, even_shares
from qvlopt.model.vision import VisionTower
from qvlopt.quant.objective import Gram
from tests.captured import capture_vision
from tests.tiny import build_tiny
from tests.tiny_run import SMALL, with_first_value

CPU = torch.device("cpu")
VISION_SETTINGS = {"depth": 3, "hidden_size": 64, "num_heads": 2, "intermediate_size": 96, "deepstack_visual_indexes": [0, 1]}
GRIDS = ((4, 4), (2, 6), (4, 4), (4, 4), (2, 6))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Source:
    return opened(build_tiny(tmp_path_factory.mktemp("source") / "tiny", vision=VISION_SETTINGS, text=SMALL["text"]))


def opened(folder: Path) -> Source:
    return open_source(str(folder), folder=folder)


def pictures() -> list[Batch]:
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(1, rows * cols, 1536, generator=generator), (rows, cols)) for rows, cols in GRIDS]


def inputs_of(source: Source, batches: list[Batch]) -> dict[str, list[torch.Tensor]]:
    """What every linear read of every picture, by the whole tower's forward: [T, K] each."""
    seen: dict[str, list[torch.Tensor]] = defaultdict(list)
    tower = load_vision(source, dtype=torch.float32, device="cpu")

    def keep(name: str, x: torch.Tensor) -> torch.Tensor:
        seen[f"{VISION}.{name}"].extend(x)
        return F.linear(x, tower.weights[f"{name}.weight"], tower.weights[f"{name}.bias"])

    for pixel_values, grid in batches:
        VisionTower(tower.config, tower.weights, linear=keep)(pixel_values, grid)
    return seen


def exact(x: torch.Tensor) -> Gram:
    wide = x.double()
    centred = wide - wide.mean(0)
    return Gram(len(x), wide.sum(0), (centred.T @ centred).float(), wide.abs().sum(0), x.abs().amax(0))


def close(got: Gram, expected: Gram, tolerance: float) -> bool:
    pairs = [(getattr(got, part), getattr(expected, part)) for part in ("sum", "centred", "abs_sum", "abs_max")]
    return got.count == expected.count and all(float((a - b).norm()) <= tolerance * float(b.norm()) for a, b in pairs)


def same(got: dict[str, Gram], expected: dict[str, Gram]) -> bool:
    """Equal to the last bit."""
    parts = ("sum", "centred", "abs_sum", "abs_max")
    return set(got) == set(expected) and all(torch.equal(getattr(got[n], p), getattr(expected[n], p)) for n in expected for p in parts)


def test_every_linears_statistics_are_those_of_its_inputs(source: Source, tmp_path: Path) -> None:
    got, inputs = capture_vision(source, pictures(), tmp_path / "w"), inputs_of(source, pictures())
    assert tuple(got) == tuple(inputs)
    assert set(got) == set(vision_linears(source.settings.vision))
    for name, parts in inputs.items():
        assert close(got[name], exact(torch.cat(parts)), 1e-5), name
    assert list(tmp_path.iterdir()) == []


def test_many_small_products_give_what_one_large_gives(source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = capture_vision(source, pictures(), tmp_path / "a")
    monkeypatch.setattr("qvlopt.model.input_sums._BUFFER", 1)
    got = capture_vision(source, pictures(), tmp_path / "b")
    assert all(close(got[name], expected[name], 1e-5) for name in expected)


def test_magnitudes_alone_are_those_of_the_whole_statistics_to_the_bit(source: Source, tmp_path: Path) -> None:
    whole = capture_vision(source, pictures(), tmp_path / "a")
    alone = capture_vision(source, pictures(), tmp_path / "b", sums=MagnitudeSum)
    assert alone.keys() == whole.keys()
    for name, gram in whole.items():
        assert alone[name].count == gram.count
        assert torch.equal(alone[name].abs_max, gram.abs_max)
        assert float(gram.abs_max.min()) > 0


@pytest.mark.parametrize("most", [7, 24, 50])
def test_a_cap_takes_the_drawn_tokens_of_every_picture_and_no_others(source: Source, tmp_path: Path, most: int) -> None:
    got = capture_vision(source, pictures(), tmp_path / "w", seed=3, most_tokens=most)
    for name, parts in inputs_of(source, pictures()).items():
        chosen = []
        shares = even_shares([len(x) for x in parts], most)
        for picture, (x, share) in enumerate(zip(parts, shares, strict=True)):
            places = drawn_tokens(len(x), share, seed=3, picture=picture)
            chosen.append(x if places is None else x[places])
        assert got[name].count == min(most, sum(len(x) for x in parts))
        assert close(got[name], exact(torch.cat(chosen)), 1e-5), name


def test_pictures_of_one_size_together_give_the_same_statistics(source: Source, tmp_path: Path) -> None:
    singles = pictures()
    together: list[Batch] = [
        (torch.cat([pixels for pixels, grid in singles if grid == wanted]), wanted) for wanted in dict.fromkeys(grid for _, grid in singles)
    ]
    one_by_one, batched = (capture_vision(source, batches, tmp_path / "w") for batches in (singles, together))
    assert all(close(batched[name], one_by_one[name], 1e-5) for name in one_by_one)


def test_the_same_pictures_in_the_same_order_give_the_same_bits(source: Source, tmp_path: Path) -> None:
    assert same(*(capture_vision(source, pictures(), tmp_path / "w", most_tokens=20) for _ in range(2)))


STAGES = ("blocks.0", "deepstack_merger_list.0", "blocks.1", "deepstack_merger_list.1", "blocks.2", "merger")


@pytest.mark.parametrize("killed_in", STAGES)
def test_what_was_killed_in_any_stage_goes_on_with_the_same_bits_and_without_the_pictures(source: Source, tmp_path: Path, killed_in: str) -> None:
    assert tuple(stage.name for stage in vision_stages(source.settings.vision)) == STAGES
    expected = capture_vision(source, pictures(), tmp_path / "whole")
    got: dict[str, Gram] = {}
    done: list[str] = []
    for stage, grams in Capture(source, Parts(tmp_path / "parts"), CPU).stages(pictures):
        if stage.name == killed_in:
            break  # its statistics are lost with the process
        done.append(stage.name)
        got |= grams
    for stage, grams in Capture(source, Parts(tmp_path / "parts"), CPU).stages(lambda: pytest.fail("read the pictures again"), done=done):
        assert stage.name not in done
        got |= grams
    assert same(got, expected)


@pytest.mark.parametrize("damage", ["cut", "changed", "gone"])
def test_hidden_states_that_were_damaged_are_computed_again(source: Source, tmp_path: Path, damage: str) -> None:
    expected = capture_vision(source, pictures(), tmp_path / "whole")
    run = Capture(source, Parts(tmp_path / "parts"), CPU).stages(pictures)
    done = [next(run)[0].name for _ in range(3)]
    run.close()
    for file in (tmp_path / "parts").glob("hidden-*.f32"):
        values = bytearray(file.read_bytes())
        values[-1] ^= 1
        file.unlink() if damage == "gone" else file.write_bytes(values if damage == "changed" else values[:-4])
    got = {name: gram for _, grams in Capture(source, Parts(tmp_path / "parts"), CPU).stages(pictures, done=done) for name, gram in grams.items()}
    assert same(got, {name: gram for name, gram in expected.items() if name in got})
    assert {name.split(".", 2)[2].rsplit(".", 1)[0].removesuffix(".attn").removesuffix(".mlp") for name in got} == set(STAGES) - set(done)


def test_files_do_not_pile_up(source: Source, tmp_path: Path) -> None:
    most = 0
    for _ in Capture(source, Parts(tmp_path), CPU).stages(pictures):
        most = max(most, len(list(tmp_path.glob("hidden-*.f32"))))
    assert most == 2


def test_stages_that_nobody_asks_for_are_run_through_and_those_after_the_last_are_not(source: Source, tmp_path: Path) -> None:
    done = set(STAGES) - {"blocks.1"}
    told: list[str] = []
    (got,) = Capture(source, Parts(tmp_path), CPU).stages(pictures, done=done, seen=lambda _count, text: told.append(text.split(":")[0]))
    assert got[0].name == "blocks.1"
    assert [text for text in dict.fromkeys(told) if "read" not in text] == ["blocks.0", "blocks.1"]


def test_no_picture_gives_no_statistics(source: Source, tmp_path: Path) -> None:
    assert capture_vision(source, [], tmp_path / "w") == {}


def test_inputs_that_overflow_are_refused_with_the_layers_name(tmp_path: Path) -> None:
    folder = build_tiny(tmp_path / "loud", dtype="float32", **SMALL)
    loud = opened(with_first_value(folder, {"model.visual.blocks.1.attn.qkv.bias": 3e38, "model.visual.blocks.1.norm1.bias": 3e38}))
    with pytest.raises(RunError, match=r"^model\.visual\.blocks\.1\.attn\.proj: layer inputs: hold NaN or infinity"):
        capture_vision(loud, pictures(), tmp_path / "w")


def test_every_fourth_picture_is_held_out_and_both_parts_are_all_of_it(source: Source, tmp_path: Path) -> None:
    capture = Capture(source, Parts(tmp_path / "parts"), CPU, held_out=True)
    found = {name: gram for _, grams in capture.stages(pictures) for name, gram in grams.items()}
    for name, parts in inputs_of(source, pictures()).items():
        assert close(found[name + HELD_OUT], exact(parts[3]), 1e-4)
        assert close(found[name], exact(torch.cat([*parts[:3], *parts[4:]])), 1e-4)
