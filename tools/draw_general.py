"""Draws the shipped set `calib/general` and locks it; with it the coverage table and the contact sheet of docs/general.md.

    pip install playwright scikit-image==0.26.0 scikit-learn==1.9.1
    apt-get install chromium fonts-noto-core fonts-noto-cjk fonts-liberation fonts-dejavu-extra fonts-breip fonts-dkg-handwriting \\
        fonts-rufscript fonts-sjfonts fonts-kristi fonts-arphic-ukai fonts-hosny-amiri fonts-noto-color-emoji
    python tools/draw_general.py calib/general --photos SITE_PACKAGES --sheet docs/general.png

A headless browser and fonts are needed here only: the set in the repository is what counts, and its lock says so.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import pathlib
import random
from collections.abc import Iterator

import draw_general_pages
import draw_general_photos
import draw_general_screens
from draw_general_camera import EFFECTS
from draw_general_charts import chart
from draw_general_code import code
from draw_general_facts import Scene
from draw_general_notes import handwriting
from draw_general_sheet import contact_sheet, coverage
from draw_general_web import web
from PIL import Image

from qvlopt.data.sets import write_lock

SEED = 20261130
LICENCE = "Apache-2.0 (drawn by tools/draw_general.py); photographs: CC0-1.0, public domain and CC-BY-2.0, each named in NOTICE"
BUILDERS = draw_general_pages.BUILDERS | draw_general_screens.BUILDERS | {"code": code, "chart": chart, "handwriting": handwriting, "web": web}
EVAL = {
    "document": 8,
    "form": 6,
    "receipt": 6,
    "table": 5,
    "chart": 8,
    "slide": 4,
    "code": 4,
    "gui": 4,
    "web": 4,
    "sign": 3,
    "scan": 3,
    "handwriting": 4,
}
"""Items of the split `eval`, with five photographs: 64. `calibrate` has twice as many of each and ten photographs: 128."""
LANGUAGES = ["en", "zh", "ar", "ru", "de", "zh", "fr", "ar", "ru"]
EVENLY = ["en", "zh", "ar", "ru", "fr", "zh", "ar", "ru"]
"""For kinds of few pictures."""


def scenes(split: str, photos: pathlib.Path) -> Iterator[tuple[str, Scene, random.Random]]:
    """Every scene of one split under its name, always the same ones."""
    for kind, count in EVAL.items():
        for index in range(count * (2 if split == "calibrate" else 1)):
            rng = random.Random(f"{SEED} {split} {kind} {index}")
            turn = index + len(kind) + (4 if split == "eval" else 0)
            cycle = EVENLY if count <= 4 else LANGUAGES
            scene = BUILDERS[kind](cycle[turn % len(cycle)], rng, index + (3 if split == "eval" else 0))
            yield f"{kind}-{scene.lang}-{split[0]}{index:02d}", scene, rng
    for name in draw_general_photos.of_split(split):
        rng = random.Random(f"{SEED} {name}")
        yield f"photo-{name}", draw_general_photos.photograph(photos, name, rng), rng


class Browser:
    """Takes pictures of pages, and stops at a text that runs out of its page."""

    def __init__(self, chromium: str) -> None:
        from playwright.sync_api import sync_playwright

        self.driver = sync_playwright().start()
        self.window = self.driver.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--font-render-hinting=none", "--disable-lcd-text"])
        self.page = self.window.new_page()
        self.overflows: list[str] = []

    def draw(self, name: str, html: str, scene: Scene) -> Image.Image:
        """Grows or shrinks the letters until the page is filled and nothing runs out; cuts what stays empty below where the scene allows."""
        width, height = scene.size
        self.page.set_viewport_size({"width": width, "height": height})
        self.page.set_content(html)
        self.page.evaluate("document.fonts.ready")
        cut = bool(scene.extra.get("cut"))
        bottom, fault = self.page.evaluate(FIT, [scene.extra.get("grow", 1.25), scene.extra.get("limit", 0.955)])
        if fault:
            self.overflows.append(f"{name}: {fault}")
        shown = min(height, max(448, int(bottom) + width // 16)) if cut else height
        return Image.open(io.BytesIO(self.page.screenshot(clip={"x": 0, "y": 0, "width": width, "height": shown}))).convert("RGB")

    def close(self) -> None:
        self.window.close()
        self.driver.stop()


FIT = """([grow, limit]) => {
  const range = document.createRange(), base = parseFloat(getComputedStyle(document.body).fontSize);
  const look = () => {
    const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    let bottom = 0, fault = '';
    while (walk.nextNode()) {
      const node = walk.currentNode;
      if (node.parentElement.closest('.f,.t')) continue;
      range.selectNodeContents(node);
      for (const box of range.getClientRects()) {
        if (!box.width) continue;
        bottom = Math.max(bottom, box.bottom);
        if (box.right > innerWidth - 4 || box.left < 4 || box.bottom > innerHeight * limit) fault = node.data.slice(0, 30);
      }
    }
    for (const cell of document.querySelectorAll('.v,td,h1,.p'))
      if (cell.scrollWidth > cell.clientWidth + 1) fault = 'cell ' + cell.textContent.slice(0, 30);
    return [bottom, fault];
  };
  const at = factor => { document.body.style.fontSize = base * factor + 'px'; return look(); };
  let low = 0.5, high = grow, found = at(high);
  for (let step = 0; found[1] && step < 6; step++) {
    const middle = (low + high) / 2;
    if (at(middle)[1]) high = middle; else low = middle;
    if (step == 5) found = at(low);
  }
  return found;
}"""


def store(picture: Image.Image, path: pathlib.Path) -> str:
    """Its name: PNG with a palette where that loses nothing, lossless WebP where PNG is large, or JPEG as cameras write it."""
    if path.suffix == ".jpg":
        picture.save(path, quality=80 if path.name.startswith("photo") else 66, optimize=True)
        return path.name
    if path.suffix == ".png":
        colours = picture.getcolors(256)
        small = picture.quantize(len(colours), dither=Image.Dither.NONE) if colours and _exact(picture, len(colours)) else picture
        small.save(path, optimize=True)
        if path.stat().st_size < 50_000:
            return path.name
        path.unlink()
    picture.save(path.with_suffix(".webp"), lossless=True, quality=80, method=4)
    return path.with_suffix(".webp").name


def _exact(picture: Image.Image, colours: int) -> bool:
    return picture.quantize(colours, dither=Image.Dither.NONE).convert("RGB").tobytes() == picture.tobytes()


def with_photo(html: str, folder: pathlib.Path, split: str, rng: random.Random) -> str:
    """Puts a photograph of the split where the page wants one."""
    if "PHOTO" not in html:
        return html
    stored = io.BytesIO()
    pool = [name for name in draw_general_photos.of_split(split) if name not in ("horse", "cell", "clock", "grass")]
    draw_general_photos.load(folder, rng.choice(pool)).save(stored, format="PNG")
    return html.replace("PHOTO", f"data:image/png;base64,{base64.b64encode(stored.getvalue()).decode()}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path, help="where the set is made; it must not exist")
    parser.add_argument("--photos", type=pathlib.Path, required=True, help="the folder with scikit-image's `skimage` and scikit-learn's `sklearn`")
    parser.add_argument("--sheet", type=pathlib.Path, help="where the contact sheet goes")
    parser.add_argument("--chromium", default="/usr/bin/chromium")
    parser.add_argument("--only", default="", help="draw only scenes whose name holds this, without a lock")
    options = parser.parse_args()
    pictures = options.folder / "pictures"
    pictures.mkdir(parents=True)
    browser, rows = Browser(options.chromium), []
    for split in ("calibrate", "eval"):
        for name, scene, rng in scenes(split, options.photos):
            if options.only not in name:
                continue
            scene.pages = [with_photo(page, options.photos, split, rng) for page in scene.pages]
            rows += draw(name, scene, rng, split, pictures, browser)
    browser.close()
    (options.folder / "manifest.jsonl").write_text(
        "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8", newline="\n"
    )
    print("\n".join(browser.overflows), coverage(options.folder, rows), sep="\n")
    if options.sheet:
        contact_sheet(options.folder, rows).save(options.sheet, quality=72, optimize=True)
    if not options.only:
        write_lock(options.folder, name="general", licence=LICENCE)


def draw(name: str, scene: Scene, rng: random.Random, split: str, folder: pathlib.Path, browser: Browser) -> list[dict[str, object]]:
    """Stores the pages of a scene and returns its rows: all questions in `eval`, one of them in `calibrate`, where answers do not count."""
    pages = [scene.extra["picture"]] if "picture" in scene.extra else [browser.draw(name, page, scene) for page in scene.pages]
    names = []
    for number, page in enumerate(pages, 1):
        names.append(store(EFFECTS[scene.effect](page, rng), folder / f"{name}{f'-p{number}' if len(pages) > 1 else ''}.{scene.suffix}"))
    turns = scene.turns if split == "eval" else [scene.turns[rng.randrange(len(scene.turns))]]
    shared = {
        "images": [f"pictures/{page}" for page in names],
        "task": scene.task,
        "cluster": name,
        "split": split,
        "stratum": scene.kind,
        "dataset": scene.script,
    }
    return [{"id": name if len(turns) == 1 else f"{name}-{place}", "question": q, "answers": a, **shared} for place, (q, a) in enumerate(turns)]


if __name__ == "__main__":
    main()
