"""Questions on pictures of noise, as engines get them in tests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from qvlopt.artifact.digest import sha256_file
from qvlopt.data.samples import ImageRef, Sample
from qvlopt.runtime.engine import Answer, Engine, Prepared

NEW = 16
ASKED = (("What is it?", [(64, 64)]), ("Read.", [(33, 200)]), ("How many shapes are there in this picture, and which? " * 3, [(160, 96)]),
         ("Hi", []), ("Same or not: <image> and <image>?", [(64, 64), (26, 28)]), ("What is it?", [(64, 64)]))  # fmt: skip
"""Questions and sizes of pictures: short and long, no picture to two, one grid several times, one picture enlarged."""


def samples_in(folder: Path, asked: Sequence[tuple[str, Sequence[tuple[int, int]]]] = ASKED) -> list[Sample]:
    samples = []
    for number, (question, sizes) in enumerate(asked):
        images = []
        for index, (width, height) in enumerate(sizes):
            name = f"{number}-{index}.png"
            pixels = np.random.default_rng([number, index]).integers(0, 256, (height, width, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / name)
            images.append(ImageRef(name, folder, sha256_file(folder / name)))
        samples.append(Sample(f"item {number}", tuple(images), question, ("x",), "vqa", str(number), f"manifest.jsonl:{number + 1}"))
    return samples


def prepared_in(engine: Engine, folder: Path, asked: Sequence[tuple[str, Sequence[tuple[int, int]]]] = ASKED) -> list[Prepared]:
    return [engine.prepare(sample) for sample in samples_in(folder, asked)]


def one_by_one(engine: Engine, prepared: Sequence[Prepared], new: int = NEW) -> list[Answer]:
    return [answer for item in prepared for answer in engine.generate([item], max_new_tokens=new)]
