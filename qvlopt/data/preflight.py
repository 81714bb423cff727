"""Looks at the header of every picture before the heavy part of a run: what cannot be used is known at the start."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from qvlopt.data.samples import Sample
from qvlopt.errors import ItemError

Size = tuple[int, int]


class Skipped(NamedTuple):
    """An item that cannot be used, and why."""

    id: str
    reason: str


@dataclass(frozen=True)
class Preflight:
    """`usable` items in their order, what was skipped, (width, height) of each usable item's pictures, and remarks."""

    usable: tuple[Sample, ...]
    skipped: tuple[Skipped, ...]
    sizes: Mapping[str, tuple[Size, ...]]
    remarks: tuple[str, ...]


def check_pictures(samples: Sequence[Sample]) -> Preflight:
    """Reads headers only, so a file that is cut in its pixels still passes and fails its item later."""
    usable: list[Sample] = []
    skipped: list[Skipped] = []
    sizes: dict[str, tuple[Size, ...]] = {}
    animated: dict[str, int] = {}
    for sample in samples:
        try:
            headers = [image.header() for image in sample.images]
        except ItemError as error:
            skipped.append(Skipped(sample.id, error.reason))
            continue
        usable.append(sample)
        sizes[sample.id] = tuple(header.size for header in headers)
        animated.update({image.name: header.frames for image, header in zip(sample.images, headers, strict=True) if header.frames > 1})
    return Preflight(tuple(usable), tuple(skipped), sizes, _remarks(animated))


def _remarks(animated: Mapping[str, int]) -> tuple[str, ...]:
    if not animated:
        return ()
    name, frames = next(iter(animated.items()))
    count = "1 picture has" if len(animated) == 1 else f"{len(animated)} pictures have"
    return (f"{count} more than one frame; the first frame is used (such as {name}: {frames} frames)",)
