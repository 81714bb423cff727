"""The prompts that a recipe calibrates the language model on, and the decoder layers' statistics over them, layer by layer."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import torch

from qvlopt.artifact.unfinished import Parts
from qvlopt.commands.calibration_data import Asked, Coverage, in_seeded_order
from qvlopt.errors import ItemError, RunError
from qvlopt.model.input_sums import GramSum
from qvlopt.model.language_capture import LanguageCapture, Prompt
from qvlopt.model.names import Stage
from qvlopt.model.positions import rope_positions
from qvlopt.model.prompt import Prompter
from qvlopt.model.token_draw import HELD_OUT_EVERY
from qvlopt.quant.objective import Gram
from qvlopt.report.progress import Progress

COVERAGE = "coverage"
"""Name of the part that keeps which samples were used, as for the tower."""


def captured_language(
    asked: Asked, parts: Parts, device: torch.device, progress: Progress, *, done: Collection[str] = (), sums: type[GramSum] = GramSum
) -> Iterator[tuple[Stage, dict[str, Gram]]]:
    """Every decoder layer that is not `done` with its linears' statistics. Raises RunError when too few samples are usable."""
    capture = LanguageCapture(asked.source, parts, device, seed=asked.loaded.recipe.seed, held_out=asked.held_out, sums=sums)
    yield from capture.stages(_checked_prompts(asked, parts), done=done, seen=progress.advance)


def _checked_prompts(asked: Asked, parts: Parts) -> Iterator[Prompt]:
    """The prompts, and what they cover where the tower's statistics have not told already."""
    coverage = Coverage(skipped=list(asked.flight.skipped))
    yield from prompts(asked, coverage)
    wanted = asked.loaded.recipe.calibrate.samples
    if coverage.samples < wanted:
        raise RunError(
            f"{asked.data.name}: {coverage.samples} samples make a prompt, {len(coverage.skipped)} skipped; calibrate.samples asks for {wanted}",
            "lower calibrate.samples or give more samples",
        )
    if asked.held_out and coverage.samples < HELD_OUT_EVERY:
        raise RunError(
            f"{asked.data.name}: {coverage.samples} prompts; one in {HELD_OUT_EVERY} is held out to judge by", "calibrate with more samples"
        )
    if parts.record(COVERAGE) is None:
        parts.keep(COVERAGE, coverage.to_json())


def prompts(asked: Asked, coverage: Coverage) -> Iterator[Prompt]:
    """The prompts of the samples that the tower is calibrated on, in that order, encoded as for an answer."""
    prompter = Prompter.from_folder(asked.source.folder)
    for sample in in_seeded_order(asked.flight.usable, asked.loaded.recipe.seed):
        if coverage.samples == asked.loaded.recipe.calibrate.samples:
            return
        try:
            pictures = tuple(asked.processor.process(image.load()) for image in sample.images)
            grids = [picture.grid for picture in pictures]
            ids = prompter.encode(sample.question, grids)
        except ItemError:
            continue
        positions, _ = rope_positions(ids, grids, image_token_id=prompter.image_token_id, merge=prompter.merge)
        coverage.samples += 1
        coverage.images += len(pictures)
        coverage.tokens += sum(picture.pixel_values.shape[0] for picture in pictures)
        yield Prompt(torch.tensor(ids), positions, pictures)
