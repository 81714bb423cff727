"""Runs the model in float32 over a few prompts and decides, stage by stage, how every linear of the graphs is stored.

One stage's weights are in memory at a time; what goes from stage to stage is a few prompts' activations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F

from qvlopt.graphs.layer_errors import Chosen, Fixed, Inputs, Recorder, Wanted, choose
from qvlopt.graphs.quantised import Scheme
from qvlopt.graphs.smooth import FoldedWeights, Group, text_groups, vision_groups
from qvlopt.graphs.torch_layers import Prompt, TextInputs, TextLayers, TowerWeights, text_inputs
from qvlopt.graphs.weights import Weights
from qvlopt.model.config import ModelConfig
from qvlopt.model.names import LM_HEAD, VISION, Stage, vision_stages
from qvlopt.model.preprocess import Picture
from qvlopt.model.shapes import EMBEDDING
from qvlopt.model.vision import VisionConfig, VisionOutput, VisionTower, rotary

HEAD_ROWS = 64
"""Tokens that the head's error is measured on: it is as large as a dozen layers."""
Largest = Callable[[str], torch.Tensor | None]
"""The largest magnitude of every input [K] of a linear over the calibration set; None where it was not calibrated."""
Seen = Callable[[str], None]


class Variant:
    """One graph's layers as they are decided: `chosen` in order of computation, `weights` with the smoothing folded in."""

    def __init__(self, weights: Weights, wanted: Wanted) -> None:
        self.wanted = wanted
        self.weights = FoldedWeights(weights)
        self.chosen: list[Chosen] = []
        self.importance: dict[str, torch.Tensor] = {}
        self._exact = weights

    @property
    def schemes(self) -> dict[str, Scheme]:
        return {layer.name: layer.scheme for layer in self.chosen}

    def take(
        self,
        group: Group,
        inputs: Inputs,
        largest_seen: torch.Tensor | None = None,
        *,
        wanted: Wanted | None = None,
        fixed: Fixed | None = None,
    ) -> Fixed:
        """Decides the layers of a group from what they read; gives the smoothing."""
        choice = choose(group, inputs, self._exact, wanted or self.wanted, largest_seen=largest_seen, fixed=fixed)
        mean_square = inputs.mean_square
        if choice.scale is not None and group.channel is not None:
            self.weights.fold(group, choice.scale)
            mean_square = mean_square / choice.scale[group.channel] ** 2
        self.chosen += choice.layers
        self.importance |= {layer.name: mean_square for layer in choice.layers if layer.scheme == "blocks4"}
        return Fixed(choice.scale)


def measure_vision(
    config: VisionConfig, weights: Weights, pictures: Sequence[Picture], variant: Variant | None, *, largest: Largest, seen: Seen
) -> list[VisionOutput]:
    """Decides the tower's layers (none without a variant); returns the exact features of every picture."""
    held = TowerWeights(weights)
    tower = VisionTower(config, held)
    angles = {picture.grid: rotary(config, picture.grid) for picture in pictures}
    merged: list[list[torch.Tensor]] = [[] for _ in pictures]
    with torch.inference_mode():
        hidden = [tower.embed(picture.pixel_values[None], picture.grid) for picture in pictures]
        for stage in vision_stages(config):
            held.clear()
            recorder = Recorder(len(pictures))
            watched = VisionTower(config, held, _watching(held, recorder))
            if stage.name.startswith("blocks."):
                index = int(stage.name.removeprefix("blocks."))
                hidden = [watched.block(index, x, angles[picture.grid]) for x, picture in zip(hidden, pictures, strict=True)]
            else:
                for outputs, x in zip(merged, hidden, strict=True):
                    outputs.append(watched.merge(stage.name, x))
            if variant is not None:
                _take_stage(stage, config, recorder, variant, largest)
            seen(stage.name)
    return [VisionOutput(outputs[-1], tuple(outputs[:-1])) for outputs in merged]


def measure_text(
    settings: ModelConfig, weights: Weights, prompts: Sequence[TextInputs], variants: Sequence[Variant], *, largest: Largest, seen: Seen
) -> None:
    """Decides the language model's layers and head for each variant."""
    layers = TextLayers(settings.text, weights)
    with torch.inference_mode():
        started = [layers.start(prompt) for prompt in prompts]
        hidden = [x for x, _ in started]
        for index in range(layers.config.num_hidden_layers):
            recorder = Recorder(len(prompts))
            run = layers.layer(index, recorder)
            hidden = [run(x, angles, prompt) for x, (_, angles), prompt in zip(hidden, started, prompts, strict=True)]
            for group in text_groups(settings.text, index):
                inputs, fixed = recorder.inputs(group.consumers[0]), None
                for variant in variants:
                    decided = variant.take(group, inputs, largest(group.consumers[0]), fixed=fixed)
                    # a scale folded into the values stands in the buffers, which a decoder and its twin share
                    fixed = decided if group.is_kept else None
            seen(f"layers.{index}")
        recorder = Recorder(len(prompts), rows=HEAD_ROWS)
        for x in hidden:
            recorder(LM_HEAD, layers.normed(x))
        for variant in variants:
            variant.take(Group((LM_HEAD,)), recorder.inputs(LM_HEAD), wanted=variant.wanted._replace(scheme="blocks8"))


def with_features(prompts: Sequence[Prompt], features: dict[Picture, VisionOutput], weights: Weights, image_token_id: int) -> Iterator[TextInputs]:
    """Every prompt as the language model takes it. The embedding is read once."""
    table = weights(EMBEDDING)
    for prompt in prompts:
        rows = table[list(prompt.ids)].float()
        yield text_inputs(prompt, [features[picture] for picture in prompt.pictures], rows, image_token_id)


def _watching(held: TowerWeights, recorder: Recorder) -> Callable[[str, torch.Tensor], torch.Tensor]:
    def linear(name: str, x: torch.Tensor) -> torch.Tensor:
        recorder(f"{VISION}.{name}", x.flatten(0, -2))
        return F.linear(x, held[f"{name}.weight"], held[f"{name}.bias"])

    return linear


def _take_stage(stage: Stage, config: VisionConfig, recorder: Recorder, variant: Variant, largest: Largest) -> None:
    for group in vision_groups(stage, config):
        variant.take(group, recorder.inputs(group.consumers[0]), largest(group.consumers[0]))
