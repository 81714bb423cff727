"""The coverage table and the contact sheet of `calib/general`."""

from __future__ import annotations

import pathlib
from collections import Counter
from typing import Any

from PIL import Image

CLASSES = (("under 0.5 Mpx", 500_000), ("0.5 to 1 Mpx", 1_000_000), ("over 1 Mpx", 10**9))
SCRIPTS = ("latin", "chinese", "arabic", "cyrillic")
CELL, COLUMNS = 120, 14


def _pictures(rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {image: row for row in rows for image in row["images"]}


def coverage(folder: pathlib.Path, rows: list[dict[str, Any]]) -> str:
    """Markdown: pictures by kind, script and size. Photographs have no script."""
    counts: Counter[tuple[str, str]] = Counter()
    for image, row in _pictures(rows).items():
        with Image.open(folder / image) as picture:
            area = picture.width * picture.height
        size = next(name for name, limit in CLASSES if area < limit)
        script = "none" if row["stratum"] == "photo" else row["dataset"]
        counts.update([(row["stratum"], column) for column in (script, size, row["split"], "all")])
        counts.update([("all", column) for column in (script, size, row["split"], "all")])
    columns = [*SCRIPTS, "none", *(name for name, _ in CLASSES), "calibrate", "eval", "all"]
    kinds = [*sorted({kind for kind, _ in counts} - {"all"}), "all"]
    lines = [f"| {' | '.join(['kind', *columns])} |", "|---" * (len(columns) + 1) + "|"]
    return "\n".join(lines + [f"| {' | '.join([kind, *(str(counts[kind, column]) for column in columns)])} |" for kind in kinds])


def contact_sheet(folder: pathlib.Path, rows: list[dict[str, Any]]) -> Image.Image:
    """Every picture, small, in the order of the manifest."""
    names = list(_pictures(rows))
    sheet = Image.new("RGB", (CELL * COLUMNS, CELL * -(-len(names) // COLUMNS)), "#888")
    for place, name in enumerate(names):
        with Image.open(folder / name) as picture:
            small = picture.convert("RGB")
        small.thumbnail((CELL - 6, CELL - 6), Image.Resampling.LANCZOS)
        sheet.paste(small, (place % COLUMNS * CELL + (CELL - small.width) // 2, place // COLUMNS * CELL + (CELL - small.height) // 2))
    return sheet
