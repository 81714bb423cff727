"""Pictures and prompts that no engine has seen: drawn from a seed, another one for every iteration.

What is on a picture changes neither the number of its tokens nor the work on them, so drawn ones stand for all; they are
JPEG files, because decoding is part of what people wait for.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

QUALITY = 90
SHAPES = 24
"""Rectangles, ellipses and lines a picture, so that it compresses about as a drawing or a page does."""
WORDS = (
    "name", "the", "colour", "of", "every", "sign", "and", "read", "what", "it", "says", "then", "count", "shapes", "left", "right", "above", "below",
    "under", "near", "which", "number", "is", "largest", "in", "this", "table", "row", "column", "list", "all", "words", "you", "see", "from", "top",
    "to", "bottom", "describe", "page", "line", "by", "with", "total", "date", "title", "how", "many", "are", "there", "please", "answer", "short",
)  # fmt: skip
FILLERS = (" a", " I", ".", " 1", "1", "?", "!")
"""Tried one by one at the end of a text that is a token or two short."""


def draw_picture(width: int, height: int, seed: tuple[int, ...]) -> Image.Image:
    """An RGB picture of shapes and writing over a gradient with grain; the same seed gives the same pixels."""
    generator = np.random.default_rng(seed)
    low, high = generator.integers(0, 256, (2, 3))
    slope = np.linspace(0, 1, width)[None, :, None] * generator.uniform(0.2, 1) + np.linspace(0, 1, height)[:, None, None] * generator.uniform(0, 0.8)
    grain = generator.integers(-6, 7, (height, width, 1))
    pixels = np.clip(low + (high.astype(float) - low) * slope / 2 + grain, 0, 255).astype(np.uint8)
    image = Image.fromarray(pixels)
    draw = ImageDraw.Draw(image)
    for number in range(SHAPES):
        left, top = int(generator.integers(0, width)), int(generator.integers(0, height))
        size = int(generator.integers(4, max(5, min(width, height) // 3)))
        colour = tuple(map(int, generator.integers(0, 256, 3)))
        if number % 3 == 2:
            draw.text((left, top), " ".join(generator.choice(WORDS, 3)), fill=colour)
        elif number % 3:
            draw.ellipse((left, top, left + size, top + size), outline=colour, width=2)
        else:
            draw.rectangle((left, top, left + size, top + size // 2), fill=colour)
    return image


def write_picture(folder: Path, width: int, height: int, seed: tuple[int, ...]) -> Path:
    """Draws a picture, writes it as JPEG and returns its path; one that is there already is kept."""
    path = folder / f"{width}x{height}-{'-'.join(map(str, seed))}.jpg"
    if not path.exists():
        draw_picture(width, height, seed).save(path, quality=QUALITY)
    return path


def prompt_of(target: int, count: Callable[[str], int], seed: tuple[int, ...]) -> str:
    """A text of `target` tokens as `count` counts them, the template's own included.

    One word where even that is too long, and the longest that is not too long where none fits exactly: what a request really
    had is counted from its ids.
    """
    words = list(np.random.default_rng(seed).choice(WORDS, max(1, target)))
    low, high = 1, len(words)
    while low < high:  # the most words that still fit
        middle = (low + high + 1) // 2
        low, high = (middle, high) if count(" ".join(words[:middle])) <= target else (low, middle - 1)
    text = " ".join(words[:low])
    for _ in range(target - count(text)):
        longer = next((text + filler for filler in FILLERS if count(text) < count(text + filler) <= target), None)
        if longer is None:
            break
        text = longer
    return text
