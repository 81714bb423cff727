"""Point-in-box accuracy of grounding and GUI tasks: does the point of an answer fall into the right box?

Cheng et al., "SeeClick" (2024, ScreenSpot). Boxes are written `[x1, y1, x2, y2]`, borders included, with their unit behind:
`px` of the picture as it is loaded, `/1000` of its sides, or `/1` (fractions); without one, values up to 1 are fractions and
others pixels. Qwen3-VL answers in thousandths of the picture's sides.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import NamedTuple

from qvlopt.scoring.text import normalised

THOUSANDTHS = 1000.0
NUMBER = r"-?\d+(?:\.\d+)?"
BOX = re.compile(rf"\s*[\[(]?\s*({NUMBER})[,\s]+({NUMBER})[,\s]+({NUMBER})[,\s]+({NUMBER})\s*[\])]?\s*(px|/1000|/1)?\s*")
KEYED = re.compile(r'"(?:point_2d|point|coordinate|bbox_2d|bbox|box_2d)"\s*:\s*(\[[^\[\]]*\])')
"""JSON that Qwen's models write when asked to ground or click."""

BRACKETED = re.compile(rf"[\[(]\s*({NUMBER})\s*,\s*({NUMBER})\s*(?:,\s*({NUMBER})\s*,\s*({NUMBER})\s*)?[\])]")
TAGGED = re.compile(rf'(?:x1?|"x")\s*[=:]\s*"?({NUMBER})"?\s*,?\s*(?:y1?|"y")\s*[=:]\s*"?({NUMBER})"?')
BARE = re.compile(rf"({NUMBER})\s*[,\s]\s*({NUMBER})")

Size = tuple[int, int]


class Point(NamedTuple):
    """A place in a picture, x to the right and y down, in the unit that the answer used."""

    x: float
    y: float


class Box(NamedTuple):
    """Corners as fractions of the picture's sides, borders included."""

    left: float
    top: float
    right: float
    bottom: float

    def holds(self, point: Point) -> bool:
        return self.left <= point.x <= self.right and self.top <= point.y <= self.bottom


def point_in_box(prediction: str, golds: Sequence[str], size: Size) -> float | None:
    """1.0 when the answer's point, in thousandths of the sides of a picture of `size`, is in one of the boxes, else 0.0.

    Fractions are taken where both coordinates have a decimal point and are at most 1. None when the answer has no point.
    Raises ValueError for a gold that is no box.
    """
    point = parse_point(prediction)
    if point is None:
        return None
    scale = 1.0 if _are_fractions(prediction, point) else THOUSANDTHS
    return _in_any(Point(point.x / scale, point.y / scale), golds, size)


def point_in_box_screenspot(prediction: str, golds: Sequence[str], size: Size) -> float | None:
    """The rule of VLMEvalKit's ScreenSpot: pixels of the picture when either coordinate is above 1, else fractions."""
    point = parse_point(prediction)
    if point is None:
        return None
    width, height = size if point.x > 1 or point.y > 1 else (1, 1)
    return _in_any(Point(point.x / width, point.y / height), golds, size)


def parse_point(text: str) -> Point | None:
    """The last point that the answer states, or the middle of its last box; None where there is none or the JSON is broken."""
    answer = normalised(text)
    keyed = KEYED.findall(answer)
    if keyed:
        return _middle(_numbers(keyed[-1]))
    if brackets := BRACKETED.findall(answer):
        return _middle([float(value) for value in brackets[-1] if value])
    if tagged := TAGGED.findall(answer):
        return _middle([float(value) for value in tagged[-1]])
    bare = BARE.fullmatch(answer)
    return _middle([float(value) for value in bare.groups()]) if bare else None


def parse_box(text: str, size: Size) -> Box:
    """A gold box. Raises ValueError when it is none, or its corners are the wrong way round."""
    match = BOX.fullmatch(text)
    if match is None:
        raise ValueError(f"{text[:60]!r} is no box, expected [x1, y1, x2, y2] with px, /1000 or /1 behind")
    x1, y1, x2, y2 = (float(value) for value in match.groups()[:4])
    if x2 < x1 or y2 < y1:
        raise ValueError(f"{text[:60]!r} ends before it begins, expected [x1, y1, x2, y2]")
    unit = match[5] or ("/1" if max(x1, y1, x2, y2) <= 1 else "px")
    width, height = {"px": (float(size[0]), float(size[1])), "/1000": (THOUSANDTHS, THOUSANDTHS), "/1": (1.0, 1.0)}[unit]
    return Box(x1 / width, y1 / height, x2 / width, y2 / height)


def _in_any(point: Point, golds: Sequence[str], size: Size) -> float:
    return float(any(parse_box(gold, size).holds(point) for gold in golds))


def _are_fractions(text: str, point: Point) -> bool:
    return 0 <= point.x <= 1 and 0 <= point.y <= 1 and re.search(r"\d\.\d", text) is not None


def _numbers(text: str) -> list[float]:
    try:
        return [float(value) for value in json.loads(text, parse_int=float)]  # a model may repeat a digit until no integer is a float any more
    except (ValueError, TypeError):
        return []


def _middle(values: Sequence[float]) -> Point | None:
    """Two numbers are a point, four a box, anything else nothing."""
    if len(values) == 2:
        return Point(values[0], values[1])
    return Point((values[0] + values[2]) / 2, (values[1] + values[3]) / 2) if len(values) == 4 else None
