"""Screens of `calib/general`: slides, windows and phones, posters and signs."""

from __future__ import annotations

import random
from collections.abc import Callable

from draw_general_facts import ACCENTS, Facts, Scene, Turn, esc

SLIDES = [(1280, 720), (960, 720), (1600, 900), (1024, 576), (800, 600)]


def slide(lang: str, rng: random.Random, index: int) -> Scene:
    facts, size = Facts(lang, rng), SLIDES[index % len(SLIDES)]
    px = size[1] / 26
    share = rng.randint(21, 88)
    points = facts.sentences(3, events=False)
    items = "".join(f"<li>{esc(point)}</li>" for point in points)
    big = f"<div class=big>{facts.digits(str(share))}%<small>{esc(facts.label('share'))} · {esc(facts.city)}</small></div>"
    bars = "".join(f"<i style='height:{rng.randint(15, 100)}%'></i>" for _ in range(7))
    body = (
        f"<ul>{items}</ul>",
        f"<div class=two><ul>{items}</ul>{big}</div>",
        f"<div class=two><div class=bars>{bars}</div><div>{big}<p>{esc(points[0])}</p></div></div>",
    )[index % 3]
    dark = index % 4 == 1
    ground = f"background:linear-gradient(135deg,{facts.accent},#10131a);color:#fff" if dark else "background:#fff"
    style = (
        f"body{{{ground};padding:6% 7%;font-size:{px}px;line-height:1.4}}h1{{font-size:1.9em;line-height:1.15;"
        f"margin:0 0 .6em;color:{'#fff' if dark else 'var(--a)'}}}"
    )
    style += (
        "li{margin:.5em 0}.two{display:grid;grid-template-columns:1.3fr 1fr;gap:2em;align-items:center}"
        ".big{font-size:3.6em;font-weight:bold;text-align:center}"
    )
    style += (
        ".big small{display:block;font-size:.25em;font-weight:normal}.bars{display:flex;gap:4%;height:10em;"
        "align-items:end}.bars i{flex:1;background:var(--a);opacity:.85}"
    )
    style += (
        f".f{{position:absolute;bottom:3%;inset-inline:7%;font-size:.65em;color:{'#ddd' if dark else '#777'};"
        f"display:flex;justify-content:space-between}}"
    )
    page = rng.randint(2, 40)
    foot = f"<div class=f><span>{esc(facts.firm)} · {esc(facts.date())}</span><span>{facts.digits(str(page))}</span></div>"
    turns: list[Turn] = [(facts.ask("title"), [facts.title])]
    if index % 3:
        turns.insert(
            0, (facts.ask("value", facts.label("share"), facts.city), list(dict.fromkeys([f"{facts.digits(str(share))}%", f"{share}%", str(share)])))
        )
    return Scene(
        "slide",
        lang,
        "doc",
        size,
        [facts.page(f"<h1>{esc(facts.title)}</h1>{body}{foot}", style)],
        turns,
        suffix="webp" if dark else "png",
        extra={"limit": 0.9, "grow": 1.5},
    )


def settings(facts: Facts, size: tuple[int, int], dark: bool) -> tuple[str, list[Turn]]:
    keys = facts.rng.sample(["notes", "email", "phone", "address", "signature", "customer", "tax", "month", "city"], 9)
    states = [facts.rng.random() < 0.5 for _ in keys]
    rows = "".join(
        (
            f"<div class=o><span>{esc(facts.label(key))}<small>"
            f"{esc(facts.sentences(1)[0][:34].rsplit(' ', 1)[0])}</small></span><i class={'on' if on else 'off'}>"
            "</i></div>"
        )
        for key, on in zip(keys, states, strict=True)
    )
    style = (
        ".o{display:flex;justify-content:space-between;align-items:center;padding:.7em 1em;border-bottom:1px "
        "solid #8883}small{display:block;color:#888;font-size:.75em}"
    )
    style += (
        "i{width:3em;height:1.6em;border-radius:1em;background:#999;position:relative;flex:none}"
        "i:after{content:'';position:absolute;top:.15em;inset-inline-start:.2em;width:1.3em;height:1.3em;"
        "border-radius:50%;background:#fff}"
    )
    style += (
        f".on{{background:var(--a)}}.on:after{{inset-inline-start:1.5em}}h1{{font-size:1.3em;margin:.6em .8em}}"
        f"body{{font-size:{min(size[0] / 30, size[1] / 27, 20)}px;{_ground(dark)}}}"
    )
    count = sum(states)
    return facts.page(f"<h1>{esc(facts.firm)}</h1>{rows}", style), [("How many switches are on?", [str(count)])]


def mail(facts: Facts, size: tuple[int, int], dark: bool) -> tuple[str, list[Turn]]:
    people = facts.people(5)
    lines = facts.sentences(5)
    rows = "".join(
        (
            f"<div class='m {'u' if i == 0 else ''}'><b style='background:{ACCENTS[i]}'>{esc(who[0])}</b><div>"
            f"<strong>{esc(who)}</strong><br>{esc(line[:30])}…</div></div>"
        )
        for i, (who, line) in enumerate(zip(people, lines, strict=True))
    )
    wide = size[0] > 800
    reading = (
        (
            f"<section><h2>{esc(facts.title)}</h2><p><strong>{esc(people[0])}</strong> · {esc(facts.date())}</p>"
            f"<p>{esc(facts.paragraph(3))}</p><button>↩ {esc(facts.label('email'))}</button></section>"
        )
        if wide
        else ""
    )
    style = (
        f"body{{font-size:{min(size[0] / 55 if wide else size[0] / 28, size[1] / 26, 20)}px;{_ground(dark)}}}"
        f"header{{background:var(--a);color:#fff;padding:.8em 1em}}main{{display:flex;height:100%}}"
    )
    style += (
        ".m{display:flex;gap:.8em;padding:.8em;border-bottom:1px solid #8883}.m b{width:2.4em;height:2.4em;"
        "border-radius:50%;color:#fff;text-align:center;line-height:2.4em;flex:none}"
    )
    style += (
        f".u{{background:#8882}}nav{{width:{'38%' if wide else '100%'};border-inline-end:1px solid #8884}}"
        f"section{{padding:1em 1.5em;flex:1;line-height:1.6}}button{{font:inherit;padding:.5em 1em;border:1px "
        f"solid var(--a);border-radius:.4em;background:none;color:inherit}}"
    )
    html = facts.page(f"<header>✉ {esc(facts.label('email'))} — {esc(facts.firm)}</header><main><nav>{rows}</nav>{reading}</main>", style)
    return html, [("Who sent the first message in the list?", [people[0]]), ("How many messages are listed?", ["5"])]


def dialog(facts: Facts, size: tuple[int, int], dark: bool) -> tuple[str, list[Turn]]:
    percent = facts.rng.randint(11, 94)
    style = (
        f"body{{font-size:{min(size[0] / 42, size[1] / 24)}px;background:linear-gradient(160deg,"
        f"{facts.accent},#203040 70%);display:flex;align-items:center;justify-content:center}}"
    )
    style += (
        f".w{{width:72%;border-radius:.5em;box-shadow:0 .5em 2em #0009;overflow:hidden;{_ground(dark)}}}"
        f".t{{background:#8883;padding:.6em 1em;display:flex;justify-content:space-between}}"
    )
    style += (
        ".c{padding:1.2em 1.6em;line-height:1.5}.bar{margin-top:.8em;height:1em;background:#8884;"
        "border-radius:.5em}.bar i{display:block;height:100%;border-radius:.5em;background:var(--a)}"
    )
    style += (
        ".k{display:flex;gap:1em;justify-content:end;margin-top:1.2em}.k span{padding:.4em 1.6em;border:1px "
        "solid #8888;border-radius:.3em}.k span:first-child{background:var(--a);color:#fff}"
    )
    keys = f"<div class=k><span>{esc(facts.label('yes'))}</span><span>{esc(facts.label('no'))}</span></div>"
    bar = f"<div class=bar><i style='width:{percent}%'></i></div><p>{facts.digits(str(percent))}%</p>"
    html = facts.page(
        f"<div class=w><div class=t><b>{esc(facts.title)}</b><span>— ▢ ✕</span></div><div class=c>{esc(facts.paragraph(2))}{bar}{keys}</div></div>",
        style,
    )
    return html, [("What percentage does the progress bar show?", list(dict.fromkeys([f"{percent}%", facts.digits(f"{percent}%"), str(percent)])))]


def _ground(dark: bool) -> str:
    return "background:#20242b;color:#e6e6e6" if dark else "background:#fbfbfc;color:#1d1d1f"


def gui(lang: str, rng: random.Random, index: int) -> Scene:
    facts = Facts(lang, rng)
    size = [(448, 960), (1280, 800), (1024, 640), (480, 1040), (1440, 900), (800, 600)][index % 6]
    html, turns = (settings, mail, dialog)[index % 3](facts, size, index % 4 == 1)
    return Scene("gui", lang, "vqa", size, [html], turns, suffix="webp" if index % 3 == 2 else "png", extra={"cut": index % 3 != 2, "grow": 1.3})


def sign(lang: str, rng: random.Random, index: int) -> Scene:
    """Posters and signs, taken with a camera: big letters at an angle."""
    facts, size = Facts(lang, rng), [(900, 600), (600, 900), (1000, 448), (720, 720)][index % 4]
    words = facts.rng.choice([facts.firm, facts.city, facts.title])
    px = min(size[0] / (len(words) * (1.05 if lang == "zh" else 0.62) / (1 if len(words) < 14 else 2) + 2), size[1] / 4)
    style = (
        f"body{{background:{facts.accent};color:#fff;display:flex;flex-direction:column;align-items:center;"
        f"justify-content:center;text-align:center;padding:6%;border:{px / 6}px solid #fff8;font-size:{px}px}}"
    )
    style += "h1{font-size:1em;margin:0;line-height:1.25}p{font-size:.42em;margin:.6em 0 0}"
    html = facts.page(f"<h1>{esc(words)}</h1><p>➜ {esc(facts.date())}</p>", style, facts.serif if index % 2 else None)
    return Scene("sign", lang, "ocr", size, [html], [(facts.ask("read"), [f"{words} {facts.date()}", words])], "shot", "jpg", {"grow": 1.1})


BUILDERS: dict[str, Callable[[str, random.Random, int], Scene]] = {"slide": slide, "gui": gui, "sign": sign}
