"""Proves a written float32 graph: every stage against torch, on pictures and prompts that no part of the graph has seen.

Graphs are built, not traced, so no size is built in; the check takes an odd mixture: two unlike pictures in one prompt, which
goes through the buffers in two uneven chunks and single steps. What is compared are rows (a patch, a merged token, a
position), each by its own length: one bad row is not hidden by many good ones.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
import torch

from qvlopt.graphs import names
from qvlopt.graphs.segments import chunk_inputs, logits_by_segment
from qvlopt.graphs.session import open_session
from qvlopt.graphs.tables import EmbeddingRows, position_table
from qvlopt.graphs.torch_layers import TextInputs, TowerWeights, text_logits
from qvlopt.graphs.vision import EMBED_STAGE
from qvlopt.graphs.weights import Weights
from qvlopt.graphs.writer import FLOAT
from qvlopt.model.config import ModelConfig
from qvlopt.model.positions import Grid, rope_positions
from qvlopt.model.shapes import EMBEDDING
from qvlopt.model.vision import VisionConfig, VisionTower, position_embedding, rotary

TOLERANCE = 1e-4
"""Largest relative error of a row. float32 rounding over 28 layers gives about 1e-5."""
_GRIDS = ((2, 3), (13, 9))
"""Rows and columns of merged tokens of the pictures."""
_STEPS = 3
"""Tokens at the end of the prompt that go one by one."""


class StageError(NamedTuple):
    """Largest relative error of a row of one stage: `embed`, `deepstack.I`, `merger` or `logits`."""

    stage: str
    error: float


def row_errors(base: torch.Tensor, candidate: torch.Tensor) -> torch.Tensor:
    """||candidate - base|| / ||base|| of every row [..., D]: float64. Infinite where a value is not finite or the base is zero."""
    off = (candidate.double() - base.double()).norm(dim=-1)
    whole = base.double().norm(dim=-1)
    error = torch.where(off == 0, 0.0, off / whole)
    return torch.where(error.isfinite(), error, torch.inf)


def check_vision(folder: Path, config: VisionConfig, weights: Weights, *, threads: int) -> tuple[StageError, ...]:
    """Worst errors of the patch embedding, of every DeepStack tap and of the merger, over all pictures."""
    session = open_session(_with_stage(folder / names.VISION_GRAPH, EMBED_STAGE), threads=threads, prepack=False)
    (folder / _probe(names.VISION_GRAPH)).unlink()
    table, tower = position_table(folder), _Tower(config, weights)
    worst: dict[str, float] = {}
    for number, grid in enumerate(_grids(config)):
        pixels = _pixels(config, grid, seed=number)
        embed, merged, *taps = session.run([EMBED_STAGE, names.IMAGE_EMBEDS, *_taps(config)], vision_inputs(config, table, pixels, grid))
        got = {"embed": embed, "merger": merged} | {f"deepstack.{i}": tap for i, tap in enumerate(taps[0] if taps else ())}
        for stage, base in tower.outputs(pixels, grid).items():
            error = float(row_errors(base, torch.from_numpy(got[stage])).max())
            worst[stage] = max(worst.get(stage, 0.0), error)
    return tuple(StageError(stage, error) for stage, error in worst.items())


def check_decoder(folder: Path, settings: ModelConfig, weights: Weights, *, threads: int) -> tuple[StageError, ...]:
    """Worst error of the logits of a position, over a prompt with pictures from torch's tower."""
    prompt = _Prompt.of(settings, weights)
    base = text_logits(settings.text, weights, [prompt.inputs])[0]
    rows = EmbeddingRows(folder).rows(prompt.words)
    looked_up = row_errors(prompt.inputs.embeds[prompt.is_text], torch.from_numpy(rows)).max()
    length = len(prompt.inputs.embeds)
    cuts = [0, (length - _STEPS) * 5 // 8, *range(length - _STEPS, length + 1)]
    logits = torch.from_numpy(logits_by_segment(folder / names.DECODER_GRAPH, settings.text, prompt.inputs, cuts, threads=threads))
    return StageError("embed_tokens", float(looked_up)), StageError("logits", float(row_errors(base, logits).max()))


def vision_inputs(config: VisionConfig, table: torch.Tensor, pixels: torch.Tensor, grid: Grid) -> dict[str, np.ndarray]:
    """What the vision graph takes for one picture: `pixels` [N, patch_dim] and its grid of patches."""
    cos, sin = (part[:, : config.head_dim // 2].contiguous().numpy() for part in rotary(config, grid))
    positions = position_embedding(table, grid, config.spatial_merge_size)
    return {names.PIXEL_VALUES: pixels.numpy(), names.POS_EMBEDS: positions.numpy(), names.ROPE_COS: cos, names.ROPE_SIN: sin}


class _Prompt(NamedTuple):
    """A prompt with random words around the pictures of `_GRIDS`. `is_text` bool [S] marks the words."""

    inputs: TextInputs
    is_text: torch.Tensor
    words: list[int]

    @classmethod
    def of(cls, settings: ModelConfig, weights: Weights) -> _Prompt:
        vision, image = settings.vision, settings.image_token_id
        grids = list(_grids(vision))
        generator = torch.Generator().manual_seed(len(_GRIDS))
        drawn = torch.randint(0, settings.text["vocab_size"], (23,), generator=generator)
        words: list[int] = torch.where(drawn == image, 0 if image else 1, drawn).tolist()
        ids = words[:5]
        for number, (rows, columns) in enumerate(_GRIDS):
            ids += [image] * (rows * columns) + words[5 + 9 * number : 14 + 9 * number]
        positions, _ = rope_positions(ids, grids, image_token_id=image, merge=vision.spatial_merge_size)
        is_text = torch.tensor(ids) != image
        embeds = torch.zeros(len(ids), settings.text["hidden_size"])
        deepstack = torch.zeros(len(vision.deepstack_visual_indexes), len(ids), settings.text["hidden_size"])
        embeds[is_text] = weights(EMBEDDING)[words].float()
        tower = _Tower(vision, weights)
        outputs = [tower.outputs(_pixels(vision, grid, seed=number), grid) for number, grid in enumerate(grids)]
        embeds[~is_text] = torch.cat([output["merger"] for output in outputs])
        for tap in range(len(deepstack)):
            deepstack[tap, ~is_text] = torch.cat([output[f"deepstack.{tap}"] for output in outputs])
        return cls(TextInputs(embeds, positions, deepstack), is_text, words)


class _Tower:
    """torch's tower, whose weights are read and dropped one by one."""

    def __init__(self, config: VisionConfig, weights: Weights) -> None:
        self._weights = TowerWeights(weights)
        self._tower = VisionTower(config, self._weights)

    def outputs(self, pixels: torch.Tensor, grid: Grid) -> dict[str, torch.Tensor]:
        """`embed` [N, D], `merger` and every `deepstack.I` [M, hidden]; taps count from the first tapped block."""
        found: dict[str, torch.Tensor] = {}
        with torch.inference_mode():
            for stage, value in self._tower.stages(pixels[None], grid):
                self._weights.clear()
                if stage.startswith("deepstack"):
                    found[f"deepstack.{sum(name.startswith('deepstack') for name in found)}"] = value[0]
                elif stage in ("embed", "merger"):
                    found[stage] = value[0]
        return found


def run_decoder(
    sessions: Sequence[Any], settings: Mapping[str, Any], prompt: TextInputs, cuts: Sequence[int], asked: torch.Tensor | None = None
) -> Iterator[np.ndarray]:
    """Logits [.., vocab] of the positions `asked` for (bool [S], None: all), chunk by chunk between the `cuts`.

    Each chunk has its own session; the buffers are handed on.
    """
    layers = range(settings["num_hidden_layers"])
    empty = np.zeros((1, settings["num_key_value_heads"], cuts[-1] + 5, settings["head_dim"]), dtype=np.float32)
    buffers = {name: empty for layer in layers for name in (names.past_key(layer), names.past_value(layer))}
    presents = [name for layer in layers for name in (names.present_key(layer), names.present_value(layer))]
    for session, (start, stop) in zip(sessions, itertools.pairwise(cuts), strict=False):
        inputs = chunk_inputs(prompt, start, stop)
        if asked is not None:
            inputs[names.LOGIT_INDICES] = asked[start:stop].nonzero()[:, 0].numpy()
        logits, *after = session.run([names.LOGITS, *presents], inputs | buffers)
        buffers = dict(zip(buffers, after, strict=True))
        yield logits[0]


def _grids(config: VisionConfig) -> Iterator[Grid]:
    merge = config.spatial_merge_size
    return ((rows * merge, columns * merge) for rows, columns in _GRIDS)


def _pixels(config: VisionConfig, grid: Grid, *, seed: int) -> torch.Tensor:
    """Patches [N, patch_dim] of noise in the range of normalised pixels."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand((grid[0] * grid[1], config.patch_dim), generator=generator) * 2 - 1


def _taps(config: VisionConfig) -> list[str]:
    return [names.DEEPSTACK] if config.deepstack_visual_indexes else []


def _probe(graph: str) -> str:
    return f"check.{graph}"


def _with_stage(path: Path, stage: str) -> Path:
    """A copy of the graph, beside it and over the same weights, that gives the tensor `stage` out too."""
    model = onnx.load(str(path), load_external_data=False)
    model.graph.output.append(onnx.helper.make_tensor_value_info(stage, FLOAT, None))
    copy = path.with_name(_probe(path.name))
    copy.write_bytes(model.SerializeToString())
    return copy
