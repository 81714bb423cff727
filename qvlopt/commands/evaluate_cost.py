"""What evaluating a recipe's sets will take, from the pictures' headers and the length of some of the texts."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

from qvlopt.commands.evaluate_inputs import read_sets
from qvlopt.errors import ItemError
from qvlopt.model.answer_cost import AnswerCost
from qvlopt.model.cost import FLOAT32, IMPORTED_BYTES, START_SECONDS, Cost, Rates, TowerCost
from qvlopt.model.preprocess import PictureProcessor
from qvlopt.model.prompt import Prompter
from qvlopt.model.shapes import parameter_shapes
from qvlopt.model.source import Source
from qvlopt.recipe.load import LoadedRecipe
from qvlopt.runtime.batch import MAX_TOWER_PATCHES
from qvlopt.scoring.evaluate import EvalSet

ENCODED_ITEMS = 200
"""Items of a set whose texts are encoded to see how long they are."""
FRAME_TOKENS = 2
"""Beside a picture's own in a prompt: before and after it."""
REPORTED_BYTES, REPORT_BYTES = 600, 100_000
"""What a report says of an item, in all its files, and what it says besides. Measured on nano-eval."""


class AskedItems(NamedTuple):
    """What a set asks: patches of every picture, tokens of every prompt, and the mean of an answer's."""

    patches: list[int]
    prompts: list[int]
    answer: float

    @classmethod
    def of(cls, each: EvalSet, processor: PictureProcessor, prompter: Prompter) -> AskedItems:
        """The sizes of all pictures are known; some items' texts are encoded."""
        patches = [[patches_of(processor, size) for size in each.sizes[sample.id]] for sample in each.samples]
        some = each.samples[:: max(1, len(each.samples) // ENCODED_ITEMS)]
        question = _mean([len(prompter.encode(sample.question)) for sample in some])
        answer = 1 + _mean([len(prompter.encode(sample.answers[0])) for sample in some]) - len(prompter.encode(""))
        prompts = [sum(counts) // processor.merge_size**2 + FRAME_TOKENS * len(counts) + round(question) for counts in patches]
        return cls([count for counts in patches for count in counts], prompts, min(answer, each.max_new_tokens))


def evaluate_cost(loaded: LoadedRecipe, source: Source, rates: Rates) -> Cost:
    """The source, then one candidate, over every set, in float32; then what is looked at for damage.

    Answers that are in the cache cost nothing. Raises UsageError or RunError for sets that are not there.
    """
    section, settings = loaded.recipe.evaluate, source.settings
    processor, prompter = PictureProcessor.for_tower(source.folder, settings.vision, loaded.recipe.pixels), Prompter.from_folder(source.folder)
    asked = [AskedItems.of(each, processor, prompter) for each in read_sets(loaded, download=False).sets]
    tower = TowerCost(settings.vision, (), 0, rates._replace(linear=rates.float32))
    items = sum(len(each.prompts) for each in asked)
    once, alone = (
        sum(AnswerCost(tower.over(each.patches), settings.text, each.prompts).seconds(answer=each.answer, batch=batch) for each in asked)
        for batch in (section.batch, 1)
    )
    followed = section.damage.stages * (settings.vision.depth + settings.text["num_hidden_layers"])
    looks = (2 * len(asked) * section.damage.items + followed) * once / max(1, items)
    most = section.batch * max((count for each in asked for count in each.patches), default=0)
    weights = FLOAT32 * sum(prod(shape) for shape in parameter_shapes(settings.vision, settings.text, tied=source.tied).values())
    seconds = START_SECONDS + 2 * once + section.gate.self_check * alone + looks
    memory = IMPORTED_BYTES + weights + tower.running_bytes(min(most, MAX_TOWER_PATCHES))
    return Cost(memory, REPORT_BYTES + REPORTED_BYTES * items, seconds)


def patches_of(processor: PictureProcessor, size: tuple[int, int]) -> int:
    """0 for a picture that the checkpoint's rule refuses."""
    try:
        return prod(processor.grid(*size))
    except ItemError:
        return 0


def _mean(values: Sequence[int]) -> float:
    return sum(values) / max(1, len(values))
