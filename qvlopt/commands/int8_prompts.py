"""Prompts that quantize-int8 decides on, and others that its self-check looks at: pictures, question and the right answer."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from itertools import islice

from qvlopt.commands.calibration_data import Asked, in_seeded_order
from qvlopt.data.preflight import check_pictures
from qvlopt.data.samples import Sample, read_samples
from qvlopt.data.set_files import find_set
from qvlopt.errors import ItemError, RunError
from qvlopt.graphs.torch_layers import Prompt
from qvlopt.model.positions import rope_positions
from qvlopt.model.prompt import Prompter

log = logging.getLogger(__name__)

MEASURED = 8
"""Prompts that the layers' errors are measured on."""
CHECKED = 4
"""Held-out prompts of the self-check."""


def measured_prompts(asked: Asked, prompter: Prompter) -> list[Prompt]:
    """The first usable samples of the calibration order. Raises RunError when there is none with a picture."""
    prompts = list(islice(_prompts(asked, prompter, in_seeded_order(asked.flight.usable, asked.loaded.recipe.seed)), MEASURED))
    if not any(prompt.pictures for prompt in prompts):
        raise RunError(f"{asked.data.name}: no usable sample has a picture", "calibrate.data must hold pictures")
    return prompts


def held_out_prompts(asked: Asked, prompter: Prompter) -> list[Prompt]:
    """Samples of the calibration set that are not calibrated on: behind the first `calibrate.samples`, or of another split.

    Where the set has no others with a picture, those that were not measured; that is said.
    """
    taken = asked.loaded.recipe.calibrate.samples
    ordered = in_seeded_order(asked.flight.usable, asked.loaded.recipe.seed)
    used = {sample.id for sample in ordered[:taken]}
    prompts = list(islice(_prompts(asked, prompter, [*ordered[taken:], *_other_splits(asked, used)]), CHECKED))
    if any(prompt.pictures for prompt in prompts):
        return prompts
    log.warning("%s has no pictures besides those calibrated on: the self-check looks at some of these", asked.data.name)
    return list(islice(_prompts(asked, prompter, [*ordered[MEASURED:], *ordered]), CHECKED))


def _other_splits(asked: Asked, used: set[str]) -> list[Sample]:
    section = asked.loaded.recipe.calibrate
    place = find_set(section.data, asked.loaded.folder)
    if section.split is None or place is None:
        return []
    others = [sample for sample in read_samples(place, seed=asked.loaded.recipe.seed).samples if sample.id not in used]
    return in_seeded_order(check_pictures(others).usable, asked.loaded.recipe.seed)


def _prompts(asked: Asked, prompter: Prompter, samples: list[Sample]) -> Iterator[Prompt]:
    """Those that have a picture first; what cannot be used is left out and named."""
    for sample in sorted(samples, key=lambda sample: not sample.images):
        try:
            pictures = tuple(asked.processor.process(image.load()) for image in sample.images)
            grids = [picture.grid for picture in pictures]
            ids = prompter.encode(sample.question, grids)
        except ItemError as error:
            log.warning("skipped %s: %s", sample.id, error.reason)
            continue
        answer = prompter.tokenizer.encode(sample.answers[0] if sample.answers else "", add_special_tokens=False).ids
        ids = [*ids, *(token for token in answer if token != prompter.image_token_id), *prompter.eos_ids[:1]][: prompter.max_tokens]
        positions, _ = rope_positions(ids, grids, image_token_id=prompter.image_token_id, merge=prompter.merge)
        yield Prompt(tuple(ids), positions, pictures)
