"""What answering questions about pictures takes in torch, from config and sizes alone: operations, and calls where they are many.

A small model's time goes into calls, a large one's into products and into reading its weights for every token. Letters:
T tokens of a prompt, B questions asked at once, D hidden width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, prod
from typing import Any

from qvlopt.model.cost import TowerCost
from qvlopt.model.names import language_linears
from qvlopt.model.shapes import LANGUAGE, text_shapes

LAYER_SECONDS = 0.001
"""Processor time of a decoder layer's calls, whatever its size. Measured on nano with torch 2.13 and transformers 5.24."""
ITEM_SECONDS = 0.002
"""Processor time of an item beside the model: its header, pixels, prompt, digest and score. Measured on nano-eval."""


@dataclass(frozen=True)
class AnswerCost:
    """`tower` has the patches of every picture that is asked about; `text` is a ModelConfig's; `prompts` are tokens of every prompt."""

    tower: TowerCost
    text: Mapping[str, Any]
    prompts: Sequence[int]

    def seconds(self, *, answer: float, batch: int) -> float:
        """Of one engine that gives `answer` tokens to each of the prompts, `batch` prompts at once."""
        batches = ceil(len(self.prompts) / batch)
        steps = batches * answer
        calls = int(self.text["num_hidden_layers"]) * LAYER_SECONDS * (batches + steps)
        return self.tower.forward() + self._prefill() + self._decoding(steps, batch) + calls + ITEM_SECONDS * len(self.prompts)

    def _prefill(self) -> float:
        """Linears, attention, and the head for the last token of every prompt."""
        rates, text, tokens = self.tower.rates, self.text, sum(self.prompts)
        attended = int(text["num_attention_heads"] * text["head_dim"] * text["num_hidden_layers"])
        attention = sum(4 * count * count * attended for count in self.prompts)
        elements = tokens * int(text["num_hidden_layers"] * (20 * text["hidden_size"] + 14 * text["intermediate_size"]))
        flop = 2 * (self._linears * tokens + self._head * len(self.prompts)) + attention
        return flop / (1e9 * rates.float32) + elements / (1e9 * rates.passes)

    def _decoding(self, steps: float, batch: int) -> float:
        """Of every step the dearer: its products, or reading the weights that they need."""
        rates, weights = self.tower.rates, self._linears + self._head
        return steps * max(2 * weights * batch / (1e9 * rates.float32), weights / (1e9 * rates.passes))

    @property
    def _linears(self) -> int:
        """Weights of the decoder layers."""
        shapes = text_shapes(self.text)
        return sum(prod(shapes[f"{name.removeprefix(LANGUAGE)}.weight"]) for name in language_linears(self.text))

    @property
    def _head(self) -> int:
        return int(self.text["vocab_size"] * self.text["hidden_size"])
