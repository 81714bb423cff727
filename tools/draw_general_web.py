"""Web pages of `calib/general`: a shop, an article with its photograph, a timetable."""

from __future__ import annotations

import random

from draw_general_facts import ACCENTS, Facts, Scene, Turn, esc
from draw_general_texts import CITIES, titles
from draw_general_texts import goods as goods_of

ICONS = "🍞🥛🍎🍵📓🔋🫒🧻🍅🖋💡🍯"
"""One for each of GOODS, in their order."""


def shop(facts: Facts, size: tuple[int, int]) -> tuple[str, list[Turn]]:
    columns = 4 if size[0] > 1200 else 3 if size[0] > 700 else 2
    goods = facts.goods(columns * 2)
    prices = [facts.rng.randint(99, 8999) for _ in goods]
    tiles = "".join(
        f"<div class=p><div class=i style='background:linear-gradient({facts.rng.randint(0, 180)}deg,"
        f"{facts.rng.choice(ACCENTS)}55,#eee)'><span>{ICONS[goods_of(facts.lang).index(good)]}</span></div><b>"
        f"{esc(good)}</b>"
        f"<p>{'★' * facts.rng.randint(2, 5)}</p><span class=m>{facts.money(price)}</span></div>"
        for good, price in zip(goods, prices, strict=True)
    )
    style = (
        f".g{{display:grid;grid-template-columns:repeat({columns},1fr);gap:1.2em;padding:1.2em}}"
        f".p{{border:1px solid #ddd;border-radius:.5em;padding:.7em}}.p p{{margin:.2em 0;color:#d08a00}}"
    )
    style += (
        ".i{height:7em;border-radius:.3em;text-align:center;line-height:7em}.i span{font-size:3.6em}"
        ".m{font-size:1.25em;color:var(--a);font-weight:bold}"
    )
    pick = facts.rng.randrange(len(goods))
    return _site(facts, size, f"<div class=g>{tiles}</div>", style), [(facts.ask("price", goods[pick]), facts.golds(prices[pick]))]


def news(facts: Facts, size: tuple[int, int]) -> tuple[str, list[Turn]]:
    rest = [title for title in titles(facts.lang) if title != facts.title][:4]
    side = "".join(f"<h3>{esc(title)}</h3><p>{esc(facts.sentences(1)[0])}</p>" for title in rest[: 4 if size[1] > 700 else 2])
    photo = "<img src='PHOTO'>"
    main = (
        f"<article>{photo}<h1>{esc(facts.title)}</h1><p class=b>{esc(facts.name)} · {esc(facts.date())}</p><p>"
        f"{esc(facts.paragraph(3, events=False))}</p></article><aside>{side}</aside>"
    )
    style = (
        "main{display:grid;grid-template-columns:2fr 1fr;gap:2em;padding:1.5em}img{width:100%;height:16em;"
        "object-fit:cover}h1{font-size:1.8em;margin:.4em 0;line-height:1.2}.b{color:#777}"
        "aside{border-inline-start:1px solid #ddd;padding-inline-start:1.2em;font-size:.85em}h3{margin:.3em "
        "0;color:var(--a)}"
    )
    return _site(facts, size, f"<main>{main}</main>", style), [(facts.ask("title"), [facts.title]), (facts.ask("name"), [facts.name])]


def timetable(facts: Facts, size: tuple[int, int]) -> tuple[str, list[Turn]]:
    cities = facts.rng.sample(CITIES[facts.lang], 6)
    times = sorted(facts.rng.sample(range(5 * 60, 23 * 60), 6))
    shown = [facts.digits(f"{minute // 60:02d}:{minute % 60:02d}") for minute in times]
    rows = "".join(
        (
            f"<tr><td>{time}</td><td>{esc(city)}</td><td>{facts.digits(str(facts.rng.randint(1, 14)))}</td><td "
            f"class=s>{facts.rng.choice(('●', '●', '▲'))}</td></tr>"
        )
        for time, city in zip(shown, cities, strict=True)
    )
    style = (
        "table{margin:1.2em;width:calc(100% - 2.4em);font-size:1.15em}td{padding:.6em .8em;border-bottom:1px "
        "solid #ccc}.s{color:#2a8a4a}h1{margin:.8em .8em 0;font-size:1.5em}"
    )
    pick = facts.rng.randrange(6)
    return _site(facts, size, f"<h1>{esc(facts.title)}</h1><table>{rows}</table>", style), [
        (facts.ask("time", cities[pick]), facts.written(shown[pick]))
    ]


def _site(facts: Facts, size: tuple[int, int], body: str, style: str) -> str:
    px = min(size[0] / 62, 19) if size[0] > 700 else size[0] / 30
    links = " ".join(f"<a>{esc(facts.label(key))}</a>" for key in ("item", "customer", "notes", "phone")[: 4 if size[0] > 700 else 2])
    bar = f"<div class=url>◀ ▶ ⟳ <span>www.{facts.code().lower()}.example</span></div><header><b>{esc(facts.firm)}</b><nav>{links}</nav></header>"
    style += (
        f"body{{font-size:{px}px;line-height:1.45}}header{{display:flex;justify-content:space-between;"
        f"padding:.9em 1.4em;background:var(--a);color:#fff}}a{{margin-inline-start:1.4em}}"
    )
    style += (
        ".url{background:#dee1e6;padding:.5em 1em;color:#444;direction:ltr}.url span{background:#fff;"
        "border-radius:1em;padding:.15em 1.2em;margin-inline-start:1em}"
    )
    return facts.page(bar + body, style)


def web(lang: str, rng: random.Random, index: int) -> Scene:
    facts = Facts(lang, rng)
    size = [(1280, 800), (1024, 768), (520, 1000), (1440, 900), (1366, 768), (800, 700)][index % 6]
    html, turns = (shop, news, timetable)[(index + index // 3) % 3](facts, size)
    return Scene("web", lang, "vqa", size, [html], turns, suffix="jpg" if "PHOTO" in html else "png", extra={"cut": True, "grow": 1.3})
