"""Handwriting-like notes of `calib/general`."""

from __future__ import annotations

import random

from draw_general_facts import Facts, Scene, esc
from draw_general_texts import SCRIPTS


def _plain(line: str) -> str:
    """Without quotation marks, which some of the handwriting fonts draw as ornaments."""
    return line.translate({ord(mark): None for mark in "“”„«»"}).replace("  ", " ")


def handwriting(lang: str, rng: random.Random, index: int) -> Scene:
    """Notes in fonts that were drawn from somebody's hand, on lined or squared paper, each line at its own slope."""
    facts, size = Facts(lang, rng), [(800, 560), (640, 900), (1024, 768), (900, 448), (700, 700)][index % 5]
    hands = {"latin": ["Breip", "DkgHandwriting", "Rufscript", "Delphine", "Steve", "Kristi"], "arabic": ["Noto Nastaliq Urdu"]}
    font = hands.get(SCRIPTS[lang], [facts.hand])[index // 2 % len(hands.get(SCRIPTS[lang], [1]))]
    px = size[0] / {"Kristi": 17, "Noto Nastaliq Urdu": 34, "AR PL UKai CN": 26}.get(font, 25)
    ink = rng.choice(["#1b2a7a", "#222", "#14466e", "#3b2b20"])
    lines = facts.sentences(2 if size[1] < 500 else 4 if size[1] < 800 else 5)
    rows = "".join(
        f"<p style='transform:rotate({rng.uniform(-0.9, 0.9):.2f}deg);margin-inline-start:{rng.randint(0, 18)}px'>{esc(_plain(line))}</p>"
        for line in lines
    )
    paper = (
        "background-image:linear-gradient(#b9cde6 1px,transparent 1px);background-size:100% 1.9em",
        "background-image:linear-gradient(#cfe0d8 1px,transparent 1px),linear-gradient(90deg,#cfe0d8 1px,transparent 1px);background-size:1em 1em",
        "background-color:#f7f0dc",
    )[index % 3]
    tall = 2.3 if font == "Noto Nastaliq Urdu" else 1.5
    style = (
        f"body{{padding:5% 8%;font-size:{px}px;line-height:{tall};color:{ink};{paper}}}p{{margin:.15em 0}}"
        f"h1{{font-size:1.3em;font-weight:normal;margin:0 0 .4em;text-decoration:underline}}"
    )
    html = facts.page(f"<h1>{esc(facts.title)}</h1>{rows}", style, font)
    return Scene(
        "handwriting",
        lang,
        "ocr",
        size,
        [html],
        [(facts.ask("title"), [facts.title])],
        ("shot", "scan", "none")[index % 3],
        "jpg",
        {"grow": 1.6, "limit": 0.93},
    )
