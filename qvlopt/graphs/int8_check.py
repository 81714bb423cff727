"""What quantised graphs do to a model, on prompts that nothing was decided on: cosines of the tower, KL and agreement of logits.

The graphs run as an engine runs them, the tower's own features into the decoder; torch in float32 stands on the other side.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from qvlopt.damage.logits import agreement, kl_divergence
from qvlopt.damage.tensors import cosine
from qvlopt.graphs import names
from qvlopt.graphs.check import run_decoder, vision_inputs
from qvlopt.graphs.measure import measure_vision, with_features
from qvlopt.graphs.session import open_session
from qvlopt.graphs.tables import EmbeddingRows, position_table
from qvlopt.graphs.torch_layers import Prompt, TextInputs, text_inputs, text_logits
from qvlopt.graphs.weights import Weights
from qvlopt.model.config import ModelConfig
from qvlopt.model.preprocess import Picture
from qvlopt.model.vision import VisionOutput

_STEPS = 12
"""Tokens at the end of a prompt, its answer among them, that a twin for single steps is looked at on."""
LEAST_COSINE, MOST_KL = 0.9, 1.0
"""Beyond these a graph is broken, not coarse: the tower carries little of the picture, or the words are others."""


class GraphDamage(NamedTuple):
    """`cosines` of the merged tokens and of every DeepStack tap, the lowest of any picture; for each decoder its mean KL in nats and
    the share of positions, of `positions`, at which it chooses torch's token."""

    cosines: dict[str, float]
    kl: dict[str, float]
    agreement: dict[str, float]
    positions: int


def measure_damage(folder: Path, settings: ModelConfig, weights: Weights, prompts: Sequence[Prompt], *, threads: int) -> GraphDamage:
    """Runs the graphs of the folder and torch over the prompts. Positions of pictures are left out: nothing is chosen there."""
    pictures = list(dict.fromkeys(picture for prompt in prompts for picture in prompt.pictures))
    exact = dict(zip(pictures, _exact_features(settings, weights, pictures), strict=True))
    got = dict(zip(pictures, _graph_features(folder, settings, pictures, threads), strict=True))
    text = [torch.tensor(prompt.ids) != settings.image_token_id for prompt in prompts]
    base = text_logits(settings.text, weights, list(with_features(prompts, exact, weights, settings.image_token_id)), text)
    rows = EmbeddingRows(folder)
    inputs = [
        text_inputs(prompt, [got[picture] for picture in prompt.pictures], torch.from_numpy(rows.rows(prompt.ids)), settings.image_token_id)
        for prompt in prompts
    ]
    inputs = [_with_taps(each, len(settings.vision.deepstack_visual_indexes)) for each in inputs]
    kl, same = {}, {}
    for graph in (names.DECODER_GRAPH, names.DECODE_GRAPH):
        if (folder / graph).exists():
            found = _graph_logits(folder, settings, inputs, text, graph, threads)
            pairs = [(x[-len(y) :], y) for x, y in zip(base, found, strict=True)]
            kl[graph] = float(torch.cat([kl_divergence(x, y) for x, y in pairs]).mean())
            same[graph] = float(torch.cat([agreement(x, y) for x, y in pairs]).double().mean())
    return GraphDamage(_cosines(exact, got), kl, same, sum(int(mask.sum()) for mask in text))


def _with_taps(prompt: TextInputs, taps: int) -> TextInputs:
    """A prompt without pictures has no features, and the graph asks for zeros."""
    return prompt if len(prompt.deepstack) == taps else prompt._replace(deepstack=torch.zeros(taps, *prompt.embeds.shape))


def _exact_features(settings: ModelConfig, weights: Weights, pictures: Sequence[Picture]) -> list[VisionOutput]:
    return measure_vision(settings.vision, weights, pictures, None, largest=lambda _: None, seen=lambda _: None)


def _graph_features(folder: Path, settings: ModelConfig, pictures: Sequence[Picture], threads: int) -> list[VisionOutput]:
    session, table = open_session(folder / names.VISION_GRAPH, threads=threads), position_table(folder)
    outputs = [names.IMAGE_EMBEDS, *([names.DEEPSTACK] if settings.vision.deepstack_visual_indexes else [])]
    features = []
    for picture in pictures:
        merged, *taps = session.run(outputs, vision_inputs(settings.vision, table, picture.pixel_values, picture.grid))
        deepstack = tuple(torch.from_numpy(tap)[None] for tap in taps[0]) if taps else ()
        features.append(VisionOutput(torch.from_numpy(merged)[None], deepstack))
    return features


def _graph_logits(
    folder: Path, settings: ModelConfig, prompts: Sequence[TextInputs], text: Sequence[torch.Tensor], graph: str, threads: int
) -> list[torch.Tensor]:
    """The graph's logits of the text positions.

    A twin goes on, token by token, over the buffers that the decoder has filled, as in an engine; only its own positions count.
    """
    sessions: list[Any] = [open_session(folder / name, threads=threads) for name in dict.fromkeys((names.DECODER_GRAPH, graph))]
    found = []
    for prompt, mask in zip(prompts, text, strict=True):
        length = len(prompt.embeds)
        start = length * 2 // 3 if len(sessions) == 1 else max(length - _STEPS, 1)
        cuts = [0, start, length] if len(sessions) == 1 else [0, *range(start, length + 1)]
        parts = list(run_decoder([sessions[0], *[sessions[-1]] * (len(cuts) - 2)], settings.text, prompt, cuts, mask))
        found.append(torch.from_numpy(np.concatenate(parts if len(sessions) == 1 else parts[1:])))
    return found


def _cosines(exact: dict[Picture, VisionOutput], got: dict[Picture, VisionOutput]) -> dict[str, float]:
    worst: dict[str, float] = {}
    for picture, base in exact.items():
        candidate = got[picture]
        pairs = {"merged": (base.merged, candidate.merged)}
        pairs |= {f"deepstack.{i}": pair for i, pair in enumerate(zip(base.deepstack, candidate.deepstack, strict=True))}
        for name, (x, y) in pairs.items():
            worst[name] = min(worst.get(name, 1.0), cosine(x, y))
    return worst
