"""The photographs of `calib/general`: those in the wheels of scikit-image 0.26.0 and scikit-learn 1.9.1 whose licence is stated there.

NOTICE names author and licence of each. A photograph belongs to one split only, also where it is shown on a drawn web page.
"""

from __future__ import annotations

import pathlib
import random
from typing import NamedTuple

from draw_general_facts import Scene
from PIL import Image


class Photo(NamedTuple):
    """`file` inside the unpacked wheels, the split that owns it, and questions with answers that anyone can see."""

    file: str
    split: str
    turns: list[tuple[str, list[str]]]


DESCRIBE = "Describe the picture in one sentence."
PHOTOS = {
    "astronaut": Photo("skimage/data/astronaut.png", "calibrate", [("What is the woman's job?", ["astronaut"])]),
    "camera": Photo("skimage/data/camera.png", "calibrate", [("What stands on the tripod?", ["a camera", "camera"])]),
    "chelsea": Photo("skimage/data/chelsea.png", "calibrate", [("Which animal is it?", ["a cat", "cat"])]),
    "hubble": Photo("skimage/data/hubble_deep_field.jpg", "calibrate", [(DESCRIBE, [])]),
    "rocket": Photo("skimage/data/rocket.jpg", "calibrate", [("What stands on the launch pad?", ["a rocket", "rocket"])]),
    "china": Photo("sklearn/datasets/images/china.jpg", "calibrate", [(DESCRIBE, [])]),
    "brick": Photo("skimage/data/brick.png", "calibrate", [("What is the wall made of?", ["bricks", "brick"])]),
    "grass": Photo("skimage/data/grass.png", "calibrate", [(DESCRIBE, [])]),
    "cell": Photo("skimage/data/cell.png", "calibrate", [(DESCRIBE, [])]),
    "horse": Photo("skimage/data/horse.png", "calibrate", [("Which animal is it?", ["a horse", "horse"])]),
    "coffee": Photo(
        "skimage/data/coffee.png",
        "eval",
        [("What drink is in the cup?", ["coffee", "espresso"]), ("What lies on the saucer?", ["a spoon", "spoon", "teaspoon"])],
    ),
    "flower": Photo("sklearn/datasets/images/flower.jpg", "eval", [("What colour is the flower?", ["orange"])]),
    "retina": Photo(
        "skimage/data/retina.jpg", "eval", [("Which part of the body does the picture show?", ["retina", "eye", "the retina", "the eye"])]
    ),
    "gravel": Photo("skimage/data/gravel.png", "eval", [("Is this grass or gravel?", ["gravel"])]),
    "clock": Photo("skimage/data/clock_motion.png", "eval", [("Is the picture sharp or blurred?", ["blurred"])]),
}


def load(folder: pathlib.Path, name: str) -> Image.Image:
    """The photograph on white, in RGB."""
    picture = Image.open(folder / PHOTOS[name].file).convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", picture.size, "white"), picture).convert("RGB")


def photograph(folder: pathlib.Path, name: str, rng: random.Random) -> Scene:
    """The photograph with its shorter side at 448 px or more and its longer side at 1280 px or less."""
    picture = load(folder, name)
    least = rng.choice((448, 512, 576, 640))
    scale = max(least / min(picture.size), 1.0) if min(picture.size) < 700 else 1280 / max(picture.size) if max(picture.size) > 1280 else 1.0
    size = (max(448, round(picture.width * scale)), max(448, round(picture.height * scale)))
    picture = picture.resize(size, Image.Resampling.LANCZOS) if size != picture.size else picture
    turns = PHOTOS[name].turns
    return Scene("photo", "en", "vqa" if turns[0][1] else "text", size, [], turns, suffix="jpg", extra={"picture": picture})


def of_split(split: str) -> list[str]:
    return [name for name, photo in PHOTOS.items() if photo.split == split]
