"""Draws the shipped sets `calib/nano` (to calibrate with) and `calib/nano-eval` (to score with), and locks them.

    python tools/draw_calib.py calib

Seeds lie above every seed that training draws from (`nano_scenes.TRAINING_SEED_LIMIT`), so no picture was trained on.
The same Pillow draws the same bytes; the sets in the repository are what counts, and their locks say so.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import random

from nano_scenes import SIZES, TASKS, TRAINING_SEED_LIMIT, draw

from qvlopt.data.sets import write_lock

LICENCE = "Apache-2.0 (drawn by tools/draw_calib.py; glyphs: Aileron, CC0, as embedded in Pillow)"


def draw_set(folder: pathlib.Path, first_seed: int, wanted: dict[str, int], one_question: bool) -> None:
    """Writes pictures and manifest.jsonl until every task has at least `wanted` items."""
    (folder / "pictures").mkdir(parents=True)
    rows = []
    for position, task in enumerate(TASKS):
        items, index = 0, 0
        while items < wanted[task]:
            rng = random.Random(first_seed + position * 1_000_000 + index)
            scene = draw(task, rng, SIZES[index % len(SIZES)])
            name = f"{task}-{index:04d}"
            scene.image.save(folder / "pictures" / f"{name}.png", optimize=True)
            turns = scene.turns[:1] if one_question else scene.turns
            for turn, (question, answer) in enumerate(turns):
                identity = name if len(turns) == 1 else f"{name}-{turn}"
                rows.append(
                    {"id": identity, "images": [f"pictures/{name}.png"], "question": question, "answers": [answer], "task": task, "cluster": name}
                )
            items += len(turns)
            index += 1
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    (folder / "manifest.jsonl").write_text(text, encoding="utf-8", newline="\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path, help="where `nano` and `nano-eval` are made; they must not exist")
    folder = parser.parse_args().folder
    draw_set(folder / "nano", TRAINING_SEED_LIMIT + 1, dict.fromkeys(TASKS, 96), one_question=True)
    draw_set(folder / "nano-eval", TRAINING_SEED_LIMIT + 100_000_001, dict.fromkeys(TASKS, 1000), one_question=False)
    for name in ("nano", "nano-eval"):
        write_lock(folder / name, name=name, licence=LICENCE)


if __name__ == "__main__":
    main()
