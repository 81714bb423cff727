"""What a candidate's picture features do by themselves: the base's language model reads them in place of the base's own.

For engines of which only outputs can be seen, such as ONNX graphs: that separates the vision graph from the decoder.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from qvlopt.damage.logits import kl_divergence
from qvlopt.damage.stages import add_at, visual_places
from qvlopt.damage.streams import Forced, in_parts
from qvlopt.damage.tally import StageDamage, Tally
from qvlopt.model.language_stages import LanguageStages
from qvlopt.model.source import Source

VISION_GRAPH = "vision graph"


class Featured(NamedTuple):
    """An item with both sides' features of its pictures: `image_embeds` [M, H] and `deepstack` [taps, M, H], all pictures joined."""

    item: Forced
    base: tuple[torch.Tensor, torch.Tensor]
    candidate: tuple[torch.Tensor, torch.Tensor]


def swap_features(
    base: Source, items: Sequence[Featured], *, dtype: torch.dtype, device: torch.device, vocabulary: int | None = None
) -> StageDamage | None:
    """The damage of the candidate's features, read by the base's language model; None where they are equal to the bit.

    Where a single output differs, the stage is named by it: `merger` or `deepstack tap N`.
    """
    differing = {name for item in items for name in _differing(item)}
    if not differing:
        return None
    stage = next(iter(differing)) if len(differing) == 1 else VISION_GRAPH
    tally = Tally()
    for item in items:
        for ours, theirs in zip(item.base, item.candidate, strict=True):
            tally.add(ours, theirs)
    with torch.inference_mode():
        model = LanguageStages(base, dtype=dtype, device=device)
        tally.kl.update(enumerate(_effects(model, base.settings.image_token_id, items, vocabulary)))
    return tally.result(stage)


def _differing(item: Featured) -> list[str]:
    names = ["merger"] if not torch.equal(item.base[0], item.candidate[0]) else []
    pairs = zip(item.base[1], item.candidate[1], strict=True)
    return names + [f"deepstack tap {tap}" for tap, (ours, theirs) in enumerate(pairs) if not torch.equal(ours, theirs)]


def _effects(model: LanguageStages, image_token_id: int, items: Sequence[Featured], vocabulary: int | None) -> list[float]:
    """Mean KL divergence of every item at its answer's tokens; both features of an item go through the model together."""
    places = [visual_places(each.item, image_token_id).to(model.device) for each in items]
    hidden = []
    for each, place, embeds in zip(items, places, model.embed([each.item.ids for each in items]), strict=True):
        both = embeds[None].repeat(2, 1, 1)
        both[:, place] = torch.stack((each.base[0], each.candidate[0])).to(both)
        hidden.append(both)
    angles = [model.angles(each.item.all_positions) for each in items]
    for index in range(model.layers):
        layer = model.layer(index)
        hidden = [layer(x, turn) for x, turn in zip(hidden, angles, strict=True)]
        for number, (_, ours, theirs) in enumerate(items):
            if index < len(ours[1]):
                tap = torch.stack((ours[1][index], theirs[1][index])).to(hidden[number])
                hidden[number] = add_at(hidden[number], places[number], tap)
    head = model.head(vocabulary)
    logits = [in_parts(head, x[:, len(each.item.prompt_ids) - 1 :]) for x, each in zip(hidden, items, strict=True)]
    return [float(kl_divergence(both[0], both[1]).mean()) for both in logits]
