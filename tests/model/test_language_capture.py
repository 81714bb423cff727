"""Statistics of the decoder layers against hooks on transformers' own model, run prompt by prompt."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from qvlopt.artifact.unfinished import Parts
from qvlopt.errors import RunError
from qvlopt.model.language_capture import LanguageCapture, Prompt, last_hidden
from qvlopt.model.load import LoadedModel, load_model
from qvlopt.model.names import LANGUAGE, language_linears
from qvlopt.model.positions import rope_positions
from qvlopt.model.preprocess import Picture
from qvlopt.model.source import Source, open_source
from qvlopt.model.token_draw import HELD_OUT
from qvlopt.quant.objective import Gram
from tests.tiny import build_tiny
from tests.tiny_run import SMALL, with_first_value

CPU = torch.device("cpu")
TEXT = {**SMALL["text"], "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Source:
    folder = build_tiny(tmp_path_factory.mktemp("language") / "tiny", vision={**SMALL["vision"], "deepstack_visual_indexes": [0, 1]}, text=TEXT)
    return open_source(str(folder), folder=folder.parent)


def prompt(source: Source, grids: list[tuple[int, int]], *, text: int, seed: int) -> Prompt:
    """Some pictures, each after a few words, and a question."""
    generator = torch.Generator().manual_seed(seed)
    ids: list[int] = []
    for grid in grids:
        ids += torch.randint(10, 200, (3,), generator=generator).tolist() + [source.settings.image_token_id] * (grid[0] * grid[1] // 4)
    ids += torch.randint(10, 200, (text,), generator=generator).tolist()
    width = source.settings.vision.patch_dim
    pictures = tuple(
        Picture(torch.randn(rows * columns, width, generator=generator), (rows, columns), (16 * columns, 16 * rows)) for rows, columns in grids
    )
    positions, _ = rope_positions(ids, grids, image_token_id=source.settings.image_token_id, merge=2)
    return Prompt(torch.tensor(ids), positions, pictures)


def prompts(source: Source) -> list[Prompt]:
    shapes: list[tuple[list[tuple[int, int]], int]] = [([(4, 4)], 7), ([(2, 6), (4, 2)], 3), ([], 9), ([(6, 4)], 4), ([(4, 4)], 5)]
    return [prompt(source, grids, text=text, seed=seed) for seed, (grids, text) in enumerate(shapes)]


def answer(model: LoadedModel, item: Prompt) -> torch.Tensor:
    """transformers' language model on one prompt, DeepStack by its own code: the last layer's hidden states, before the norm."""
    outputs = [model.vision(picture.pixel_values[None], picture.grid) for picture in item.pictures]
    visual = item.ids == model.image_token_id
    embeds = model.text.embed_tokens(item.ids)
    taps = None
    if outputs:
        embeds[visual] = torch.cat([output.merged[0] for output in outputs])
        taps = [torch.cat([output.deepstack[tap][0] for output in outputs]) for tap in range(2)]
    kept: list[torch.Tensor] = []
    hook = model.text.norm.register_forward_pre_hook(lambda _module, inputs: kept.append(inputs[0]))
    model.text(
        inputs_embeds=embeds[None],
        position_ids=item.positions[:, None],
        visual_pos_masks=visual[None] if outputs else None,
        deepstack_visual_embeds=taps,
        use_cache=False,
    )
    hook.remove()
    return kept[0]


@torch.no_grad()
def oracle(source: Source, items: list[Prompt]) -> dict[str, list[torch.Tensor]]:
    """What every linear reads of every prompt, [T, K] by canonical name."""
    model = load_model(source, dtype=torch.float32, device="cpu")
    read: dict[str, list[torch.Tensor]] = {}
    for name, module in model.text.named_modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(lambda _m, inputs, name=name: read.setdefault(f"{LANGUAGE}.{name}", []).append(inputs[0][0]))
    for item in items:
        answer(model, item)
    return read


def captured(source: Source, folder: Path, items: list[Prompt], **how: object) -> dict[str, Gram]:
    capture = LanguageCapture(source, Parts(folder), CPU, **how)  # type: ignore[arg-type]
    return {name: gram for _, grams in capture.stages(items) for name, gram in grams.items()}


def same(found: Gram, expected: Gram) -> None:
    assert found.count == expected.count
    for part in ("sum", "centred", "abs_sum", "abs_max"):
        torch.testing.assert_close(getattr(found, part), getattr(expected, part), rtol=1e-4, atol=1e-3)


def test_statistics_are_those_of_transformers_inputs_of_every_token(source: Source, tmp_path: Path) -> None:
    items = prompts(source)
    found, expected = captured(source, tmp_path / "parts", items), oracle(source, items)
    assert set(found) == set(language_linears(source.settings.text)) == set(expected)
    for name, parts in expected.items():
        same(found[name], Gram.of(torch.cat(parts)))
    assert {gram.count for gram in found.values()} == {sum(len(item.ids) for item in items)}


def test_held_out_prompts_are_kept_apart(source: Source, tmp_path: Path) -> None:
    items = prompts(source)
    found, expected = captured(source, tmp_path / "parts", items, held_out=True), oracle(source, items)
    assert set(found) == {name + kind for name in language_linears(source.settings.text) for kind in ("", HELD_OUT)}
    for name, parts in expected.items():
        same(found[name + HELD_OUT], Gram.of(parts[3]))
        same(found[name], Gram.of(torch.cat([*parts[:3], *parts[4:]])))


def test_tokens_are_drawn_evenly_from_prompts_of_any_length(source: Source, tmp_path: Path) -> None:
    items = prompts(source)
    found = captured(source, tmp_path / "parts", items, most_tokens=20)
    assert {gram.count for gram in found.values()} == {20}


def test_layers_that_are_done_are_run_and_not_told(source: Source, tmp_path: Path) -> None:
    items = prompts(source)
    capture = LanguageCapture(source, Parts(tmp_path / "parts"), CPU)
    found = dict(capture.stages(items, done={"layers.0", "layers.2"}))
    assert [stage.name for stage in found] == ["layers.1"]
    expected = oracle(source, items)
    same(next(iter(found.values()))[f"{LANGUAGE}.layers.1.mlp.down_proj"], Gram.of(torch.cat(expected[f"{LANGUAGE}.layers.1.mlp.down_proj"])))
    assert list(capture.stages(items, done={"layers.0", "layers.1", "layers.2"})) == []


@pytest.mark.parametrize("last", [0, 1, 2])
def test_a_run_that_broke_off_goes_on_without_reading_a_prompt_and_gives_the_same_bits(source: Source, tmp_path: Path, last: int) -> None:
    items = prompts(source)
    expected = captured(source, tmp_path / "whole", items)
    capture, done = LanguageCapture(source, Parts(tmp_path / "parts"), CPU), list[str]()
    for stage, _ in capture.stages(items):
        if stage.name == f"layers.{last}":
            break  # it was given, and nobody kept what became of it
        done.append(stage.name)

    def unread() -> Iterator[Prompt]:
        raise AssertionError("the prompts were read again")
        yield

    found = {name: gram for _, grams in capture.stages(unread(), done=done) for name, gram in grams.items()}
    assert set(found) == {name for name in expected if int(name.split("layers.")[1][0]) >= last}
    for name, gram in found.items():
        assert gram.count == expected[name].count
        assert torch.equal(gram.centred, expected[name].centred)
    left = sorted(path.name for path in (tmp_path / "parts").glob("language-*.f32"))
    assert left == ["language-3.f32", "language-places.f32"]


@torch.no_grad()
def test_the_last_hidden_states_are_transformers(source: Source) -> None:
    items, model = prompts(source), load_model(source, dtype=torch.float32, device="cpu")
    for found, item in zip(last_hidden(source, items, CPU), items, strict=True):
        torch.testing.assert_close(found, answer(model, item), rtol=1e-4, atol=1e-4)


def test_inputs_that_are_not_finite_and_a_set_without_prompts_are_named(source: Source, tmp_path: Path) -> None:
    with pytest.raises(RunError, match="no prompt to calibrate with"):
        captured(source, tmp_path / "none", [])
    folder = build_tiny(tmp_path / "tiny", vision={**SMALL["vision"], "deepstack_visual_indexes": [0, 1]}, text=TEXT)
    name = "model.language_model.layers.1.post_attention_layernorm.weight"
    broken = open_source(str(with_first_value(folder, {name: 3e38})), folder=folder.parent)
    with pytest.raises(RunError, match=r"layers\.1\.mlp\.\w+: layer inputs: hold NaN or infinity"):
        captured(broken, tmp_path / "parts", prompts(broken))
