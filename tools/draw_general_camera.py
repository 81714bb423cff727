"""What scanners, cameras and pockets do to paper: slant, shadow, blur, noise, folds. Pillow and numpy, seeded."""

from __future__ import annotations

import random

import numpy as np
from PIL import Image, ImageFilter

Size = tuple[int, int]


def noise(picture: Image.Image, rng: random.Random, strength: float) -> Image.Image:
    """Gaussian noise of that standard deviation, in grey levels; coarse, so that JPEG keeps it small."""
    grain = np.random.default_rng(rng.randrange(2**32)).normal(0, strength, (picture.height // 2 + 1, picture.width // 2 + 1))
    grown = np.asarray(Image.fromarray(grain.astype(np.float32)).resize(picture.size, Image.Resampling.BILINEAR))
    return Image.fromarray((np.asarray(picture, np.float32) + grown[..., None]).clip(0, 255).astype(np.uint8))


def shaded(picture: Image.Image, rng: random.Random, depth: float) -> Image.Image:
    """Light falls from one side: a plane of brightness from 1 down to 1 - depth."""
    x, y = np.meshgrid(np.linspace(-1, 1, picture.width), np.linspace(-1, 1, picture.height))
    angle = rng.uniform(0, 6.283)
    plane = 1 - depth * (0.5 + 0.35 * (x * np.cos(angle) + y * np.sin(angle)))
    return Image.fromarray((np.asarray(picture, np.float32) * plane[..., None]).clip(0, 255).astype(np.uint8))


def scanned(picture: Image.Image, rng: random.Random) -> Image.Image:
    """A flatbed scanner: a little slant, yellowish paper, grain."""
    turned = picture.rotate(rng.uniform(-1.4, 1.4), Image.Resampling.BICUBIC, fillcolor=(246, 244, 238))
    paper = np.asarray(turned, np.float32) * np.array([0.985, 0.975, 0.945]) * 0.94 + 10
    soft = Image.fromarray(paper.clip(0, 255).astype(np.uint8)).filter(ImageFilter.GaussianBlur(0.45))
    return noise(soft, rng, 1.6)


def photocopied(picture: Image.Image, rng: random.Random) -> Image.Image:
    """A grey copy: slant, higher contrast, a dark edge where the lid was open, specks."""
    turned = picture.convert("L").rotate(rng.uniform(-1.0, 1.0), Image.Resampling.BICUBIC, fillcolor=245)
    values = ((np.asarray(turned, np.float32) - 128) * 1.15 + 132).clip(18, 247)
    edge = rng.randint(6, 16)
    values[:, :edge] *= np.linspace(0.35, 1, edge)
    seeds = np.random.default_rng(rng.randrange(2**32))
    for y, x in zip(seeds.integers(0, values.shape[0], 40), seeds.integers(0, values.shape[1], 40), strict=True):
        values[y : y + 2, x : x + 2] = 70
    return Image.fromarray(values.astype(np.uint8)).convert("RGB")


def photographed(picture: Image.Image, rng: random.Random) -> Image.Image:
    """Lies on a table, seen at an angle; all of the picture stays inside the frame."""
    width, height = picture.size
    table = _table(picture.size, rng)
    inset = [(rng.uniform(0.015, 0.07) * width, rng.uniform(0.015, 0.05) * height) for _ in range(4)]
    corners = [
        (inset[0][0], inset[0][1]),
        (width - inset[1][0], inset[1][1]),
        (width - inset[2][0], height - inset[2][1]),
        (inset[3][0], height - inset[3][1]),
    ]
    plane = _plane(corners, picture.size)
    seen = picture.transform(picture.size, Image.Transform.PERSPECTIVE, plane, Image.Resampling.BICUBIC)
    mask = Image.new("L", picture.size, 255).transform(picture.size, Image.Transform.PERSPECTIVE, plane, Image.Resampling.BICUBIC)
    shadow = mask.filter(ImageFilter.GaussianBlur(8)).point(lambda value: value * 2 // 5)
    table.paste((20, 16, 12), (5, 7), shadow)
    table.paste(seen, (0, 0), mask)
    return noise(shaded(table, rng, 0.32).filter(ImageFilter.GaussianBlur(0.5)), rng, 1.8)


def crumpled(picture: Image.Image, rng: random.Random) -> Image.Image:
    """Folded twice and opened again: each panel has its own brightness, folds are dark lines."""
    values = np.asarray(picture, np.float32).copy()
    height, width = values.shape[:2]
    for _ in range(3):
        slope, start = rng.uniform(-0.15, 0.15), rng.uniform(0.2, 0.8) * height
        x = np.arange(width)
        distance = np.arange(height)[:, None] - (start + slope * x)[None, :]
        values *= np.where(distance > 0, 1.0, rng.uniform(0.92, 0.98))[..., None]
        values *= (1 - 0.16 * np.exp(-np.abs(distance) / 2.5))[..., None]
    return photographed(Image.fromarray(values.clip(0, 255).astype(np.uint8)), rng)


def _table(size: Size, rng: random.Random) -> Image.Image:
    """Wood, cloth or stone: smooth noise stretched one way, in one colour."""
    seeds = np.random.default_rng(rng.randrange(2**32))
    across, along = rng.choice([(90, 5), (5, 70), (24, 24)])
    grain = Image.fromarray(seeds.normal(128, 45, (max(2, size[1] // along), max(2, size[0] // across))).clip(0, 255).astype(np.uint8))
    light = np.asarray(grain.resize(size, Image.Resampling.BICUBIC), np.float32)[..., None] / 255
    colour = np.array(rng.choice([(133, 94, 62), (92, 84, 78), (60, 78, 96), (164, 140, 108), (70, 60, 52)]), np.float32)
    return Image.fromarray((colour * (0.65 + 0.6 * light)).clip(0, 255).astype(np.uint8))


def _plane(corners: list[tuple[float, float]], size: Size) -> list[float]:
    """The eight numbers of Pillow's PERSPECTIVE that carry the picture's corners to `corners` (a linear system of eight equations)."""
    width, height = size
    rows, right = [], []
    for (x, y), (u, v) in zip(corners, [(0, 0), (width, 0), (width, height), (0, height)], strict=True):
        rows += [[x, y, 1, 0, 0, 0, -u * x, -u * y], [0, 0, 0, x, y, 1, -v * x, -v * y]]
        right += [u, v]
    return np.linalg.solve(np.array(rows, float), np.array(right, float)).tolist()


EFFECTS = {
    "none": lambda picture, _: picture,
    "scan": scanned,
    "gray": photocopied,
    "shot": photographed,
    "crumple": crumpled,
}
