"""Draws the pictures that `builtin:nano` is trained on and that `calib/nano*` hold: texts, shapes, small documents.

Everything is drawn by Pillow with the scalable font that Pillow itself carries (Aileron, CC0), so no font file is needed.
A scene is a pure function of its random generator; training uses seeds below 2**40, the shipped sets seeds above it.
"""

from __future__ import annotations

import functools
import math
import random
from dataclasses import dataclass, field

from PIL import Image, ImageDraw, ImageFont

UPPER = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
DIGITS = "0123456789"
LOWER = "abcdefghijklmnopqrstuvwxyz"
SHAPES = ("circle", "square", "triangle", "star", "cross")
COLOURS = {
    "red": (214, 32, 36),
    "green": (30, 150, 50),
    "blue": (36, 80, 214),
    "yellow": (232, 196, 20),
    "purple": (140, 50, 170),
    "black": (20, 20, 20),
}
KEYS = (
    "Total", "Tax", "Table", "Order", "Room", "Code", "Price", "Seat", "Gate", "Flight", "Size", "Weight",
    "Unit", "Count", "Zone", "Phone", "Model", "Batch", "Lot", "Page", "Score", "Rate", "Net", "Item", "Paid", "Due",
    "Fee", "Shelf",
)  # fmt: skip
CLASSES = {name: i + 1 for i, name in enumerate([*UPPER, *DIGITS, *LOWER, ".", "-", *SHAPES])}
"""Dense target of the tower's first training stage: class of what is centred in a slot; 0 is background."""
TRAINING_SEED_LIMIT = 2**40
TAGS = {name: i + 1 for i, name in enumerate([*KEYS, *(f"{colour} {shape}" for colour in COLOURS for shape in SHAPES)])}
"""Dense target of the second stage, so that a value knows its key and a shape its colour; 0 is background."""
SIZES = ((96, 64), (128, 64), (96, 96), (128, 96), (160, 96), (96, 160), (192, 96), (160, 128), (192, 128), (224, 128), (160, 192), (256, 160))
"""Width x height of the pictures, all multiples of 32, so that preprocessing does not resize them."""
TASKS = ("ocr", "vqa", "doc")

LIST_ROWS, LIST_SHAPES = "Read all rows.", "List the shapes."
OCR_QUESTIONS = ("Read the text.", "What is written here?", "What does the picture say?")


@dataclass
class Scene:
    """One picture, what may be asked about it, and where its glyphs and shapes are."""

    image: Image.Image
    turns: list[tuple[str, str]] = field(default_factory=list)
    listing: tuple[str, str] | None = None
    """All that is there, in reading order: asked for in training only, where it teaches far more than one answer does."""
    marks: list[tuple[int, float, float]] = field(default_factory=list)
    """(class, x, y) of each glyph's or shape's centre in pixels."""
    tags: list[tuple[int, float, float]] = field(default_factory=list)
    """(tag, x, y): what a place is about, the key of a document's row or a shape with its colour."""


@functools.cache
def font(size: int) -> ImageFont.FreeTypeFont:
    loaded = ImageFont.load_default(size)
    assert isinstance(loaded, ImageFont.FreeTypeFont), "Pillow was built without FreeType"
    return loaded


@functools.cache
def advance(size: int, text: str) -> float:
    return font(size).getlength(text)


def _paper(rng: random.Random, size: tuple[int, int]) -> Image.Image:
    """A light background: plain, or a soft vertical gradient."""
    top = tuple(rng.randint(205, 255) for _ in range(3))
    if rng.random() < 0.6:
        return Image.new("RGB", size, top)
    ramp = Image.new("RGB", (1, 2))
    ramp.putpixel((0, 0), top)
    ramp.putpixel((0, 1), tuple(rng.randint(205, 255) for _ in range(3)))
    return ramp.resize(size, Image.Resampling.BILINEAR)


def _ink(rng: random.Random) -> tuple[int, int, int]:
    """A dark colour: at most two channels up to 150, so that any light paper contrasts with it."""
    ink = [rng.randint(0, 90) for _ in range(3)]
    ink[rng.randrange(3)] = rng.randint(0, 170)
    return (ink[0], ink[1], ink[2])


def _write(draw: ImageDraw.ImageDraw, scene: Scene, x: float, y: float, text: str, size: int, ink: tuple[int, int, int], tag: int = 0) -> None:
    """Writes `text` with its left end at x and its middle line at y, and marks (and tags) every glyph's centre."""
    draw.text((x, y), text, font=font(size), fill=ink, anchor="lm")
    for i, glyph in enumerate(text):
        if glyph in CLASSES:
            centre = x + advance(size, text[:i]) + advance(size, glyph) / 2
            scene.marks.append((CLASSES[glyph], centre, y))
            scene.tags.append((tag, centre, y))


def draw_ocr(rng: random.Random, size: tuple[int, int], longest: int = 8) -> Scene:
    """One word of 1 to `longest` capital letters and digits, anywhere, in any size that fits."""
    width, height = size
    scene = Scene(_paper(rng, size))
    draw = ImageDraw.Draw(scene.image)
    text = "".join(rng.choice(UPPER + DIGITS) for _ in range(rng.randint(1, longest)))
    ink = _ink(rng)
    smallest = 21
    largest = smallest
    while largest < min(48, height * 0.7) and advance(largest + 1, text) < width - 8:
        largest += 1
    while advance(smallest, text) > width - 6:
        text = text[:-1]
    chosen = rng.randint(smallest, max(smallest, largest))
    x = rng.uniform(3, max(3.0, width - advance(chosen, text) - 3))
    y = rng.uniform(chosen * 0.55, height - chosen * 0.55)
    if rng.random() < 0.3:  # a rule or a frame, as labels have
        gap = chosen * 0.62
        edge = _ink(rng)
        if rng.random() < 0.5:
            draw.line((x - 2, min(y + gap, height - 1), x + advance(chosen, text), min(y + gap, height - 1)), fill=edge, width=1)
        else:
            draw.rectangle(
                (max(0.0, x - 3), max(0.0, y - gap), min(width - 1.0, x + advance(chosen, text) + 2), min(height - 1.0, y + gap)), outline=edge
            )
    _write(draw, scene, x, y, text, chosen, ink)
    scene.turns = [(rng.choice(OCR_QUESTIONS), text)]
    return scene


def _shape(draw: ImageDraw.ImageDraw, kind: str, x: float, y: float, r: float, fill: tuple[int, int, int]) -> None:
    if kind == "circle":
        draw.ellipse((x - r, y - r, x + r, y + r), fill=fill)
    elif kind == "square":
        draw.rectangle((x - r * 0.88, y - r * 0.88, x + r * 0.88, y + r * 0.88), fill=fill)
    elif kind == "triangle":
        draw.polygon([(x, y - r), (x + r, y + r * 0.8), (x - r, y + r * 0.8)], fill=fill)
    elif kind == "star":
        points = []
        for i in range(10):
            radius = r * (1.1 if i % 2 == 0 else 0.46)
            angle = math.pi * i / 5 - math.pi / 2
            points.append((x + radius * math.cos(angle), y + radius * math.sin(angle)))
        draw.polygon(points, fill=fill)
    else:
        t = r * 0.36
        draw.rectangle((x - r, y - t, x + r, y + t), fill=fill)
        draw.rectangle((x - t, y - r, x + t, y + r), fill=fill)


def _shape_turns(rng: random.Random, placed: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Questions about (shape, colour) pairs whose answers the picture fixes."""
    kinds = [kind for kind, _ in placed]
    colours = [colour for _, colour in placed]
    turns: list[tuple[str, str]] = []
    single_kind = [(k, c) for k, c in placed if kinds.count(k) == 1]
    single_colour = [(k, c) for k, c in placed if colours.count(c) == 1]
    if single_kind:
        kind, colour = rng.choice(single_kind)
        turns.append((f"What colour is the {kind}?", colour))
    if single_colour:
        kind, colour = rng.choice(single_colour)
        turns.append((f"Which shape is {colour}?", kind))
    if rng.random() < 0.5:
        kind = rng.choice(kinds) if rng.random() < 0.8 else rng.choice(SHAPES)
        turns.append((f"How many {kind}s are there?" if kind != "cross" else "How many crosses are there?", str(kinds.count(kind))))
    else:
        turns.append(("How many shapes are there?", str(len(placed))))
    if rng.random() < 0.5:
        kind = rng.choice(kinds) if rng.random() < 0.5 else rng.choice(SHAPES)
        turns.append((f"Is there a {kind}?", "yes" if kind in kinds else "no"))
    else:
        kind, colour = rng.choice(placed) if rng.random() < 0.5 else (rng.choice(SHAPES), rng.choice(list(COLOURS)))
        turns.append((f"Is there a {colour} {kind}?", "yes" if (kind, colour) in placed else "no"))
    rng.shuffle(turns)
    return turns


def draw_vqa(rng: random.Random, size: tuple[int, int]) -> Scene:
    """1 to 6 shapes that do not touch, and four questions: colour, which, count, presence."""
    width, height = size
    scene = Scene(_paper(rng, size))
    draw = ImageDraw.Draw(scene.image)
    wanted = rng.randint(1, 6)
    circles: list[tuple[float, float, float]] = []
    placed: list[tuple[str, str]] = []
    for _ in range(60):
        if len(placed) == wanted:
            break
        r = rng.uniform(10, min(19, height / 4))
        x, y = rng.uniform(r + 2, width - r - 2), rng.uniform(r + 2, height - r - 2)
        if any(math.hypot(x - a, y - b) < (r + c) * 1.2 + 3 for a, b, c in circles):
            continue
        kind, colour = rng.choice(SHAPES), rng.choice(list(COLOURS))
        _shape(draw, kind, x, y, r, COLOURS[colour])
        circles.append((x, y, r))
        placed.append((kind, colour))
        scene.marks.append((CLASSES[kind], x, y))
        scene.tags.append((TAGS[f"{colour} {kind}"], x, y))
    scene.turns = _shape_turns(rng, placed)
    order = sorted(range(len(placed)), key=lambda i: (circles[i][1] // 32, circles[i][0]))
    scene.listing = (LIST_SHAPES, ",".join(f" {placed[i][1]} {placed[i][0]}" for i in order))
    return scene


def _value(rng: random.Random) -> str:
    form = rng.randrange(4)
    if form == 0:
        return "".join(rng.choice(DIGITS) for _ in range(rng.randint(1, 5)))
    if form == 1:
        return f"{rng.randint(0, 999)}.{rng.randint(0, 99):02d}"
    if form == 2:
        return rng.choice(UPPER) + "".join(rng.choice(DIGITS) for _ in range(rng.randint(1, 3)))
    return "".join(rng.choice(UPPER + DIGITS) for _ in range(2)) + "-" + "".join(rng.choice(DIGITS) for _ in range(2))


def draw_doc(rng: random.Random, size: tuple[int, int]) -> Scene:
    """A receipt or table: rows of key and value, values to the right or in a second column; asked for by key."""
    width, height = size
    scene = Scene(_paper(rng, size))
    draw = ImageDraw.Draw(scene.image)
    chosen = rng.randint(16, 17 if width < 128 else 19 if width < 200 else 22)
    pitch = max(26.0, chosen * rng.uniform(1.4, 1.8))
    rows = min(int((height - 6) / pitch), rng.randint(2, 6))
    top = rng.uniform(pitch / 2 + 1, height - pitch * (rows - 0.5) - 1)
    ink, value_ink = _ink(rng), _ink(rng)
    if rng.random() < 0.5:
        value_ink = ink
    right = rng.random() < 0.6
    column = rng.uniform(0.46, 0.56) * width
    ruled = rng.random() < 0.4
    entries = []
    for row, key in enumerate(rng.sample(KEYS, rows)):
        y = top + row * pitch
        value = _value(rng)
        room = width - 8 - advance(chosen, key) - 6
        while advance(chosen, value) > (room if right else min(room, width - column - 3)):
            value = "".join(rng.choice(DIGITS) for _ in range(max(1, len(value) - 2)))
        _write(draw, scene, 4, y, key, chosen, ink, TAGS[key])
        x = width - 4 - advance(chosen, value) if right else max(column, 4 + advance(chosen, key) + 5)
        _write(draw, scene, x, y, value, chosen, value_ink, TAGS[key])
        if ruled:
            draw.line((3, y + pitch / 2, width - 4, y + pitch / 2), fill=(170, 170, 170))
        entries.append((key, value))
    scene.listing = (LIST_ROWS, ",".join(f" {key} {value}" for key, value in entries))
    rng.shuffle(entries)
    scene.turns = [(f"What is the value of {key}?", value) for key, value in entries]
    return scene


def draw(task: str, rng: random.Random, size: tuple[int, int], longest: int = 8) -> Scene:
    """A scene of `task`: `ocr`, `vqa` or `doc`, `size` = (width, height) in pixels."""
    if task == "ocr":
        return draw_ocr(rng, size, longest)
    return draw_vqa(rng, size) if task == "vqa" else draw_doc(rng, size)
