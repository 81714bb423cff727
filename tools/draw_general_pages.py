"""Paper of `calib/general`: letters and articles, forms, invoices and receipts, tables, scans of several pages."""

from __future__ import annotations

import random
from collections.abc import Callable

from draw_general_facts import Facts, Scene, Turn, esc
from draw_general_texts import CITIES

PAPER = [(816, 1056), (720, 1018), (1024, 1448), (1448, 1024), (905, 1280), (640, 905), (1131, 1600), (768, 768)]

RECEIPTS = [(448, 1180), (480, 1360), (512, 1024), (448, 900), (560, 1480)]

TABLES = [(1024, 640), (1280, 720), (900, 900), (1440, 560), (760, 1040), (640, 480)]


def _fit(size: tuple[int, int]) -> float:
    """Font size in pixels that reads like paper of this width."""
    return max(12.0, min(22.0, (size[0] * size[1]) ** 0.5 / 55))


def _fill(facts: Facts, size: tuple[int, int], share: float) -> int:
    """How many sentences fill that share of a page."""
    glyphs = size[0] * size[1] * share / (_fit(size) ** 2 * (1.75 if facts.lang == "zh" else 0.86))
    longest = {"zh": 26, "ar": 62}.get(facts.lang, 88)
    return max(2, int(glyphs / longest * 0.8))


def letter(facts: Facts, size: tuple[int, int]) -> tuple[str, list[Turn]]:
    number, px = facts.code(), _fit(size)
    count = _fill(facts, size, 0.5)
    body = "".join(f"<p>{esc(facts.paragraph(part))}</p>" for part in (count - count // 2, count // 2) if part)
    head = f"<div class=f>{esc(facts.firm)}</div><div class=r>{esc(facts.city)}, {esc(facts.date())}<br>{facts.label('number')}: {number}</div>"
    sign = f"<p class=s style=\"font-family:'{facts.hand}'\">{esc(facts.name)}</p><p>{esc(facts.name)}<br>{esc(facts.label('department'))} 4</p>"
    sign += f"<div class=t>{esc(facts.firm)}</div>" if facts.rng.random() < 0.5 else ""
    style = f"body{{padding:7% 9%;font-size:{px}px;line-height:1.55}}.f{{font-size:1.6em;color:var(--a);border-bottom:3px solid var(--a)}}"
    style += (
        ".r{text-align:end;margin:1em 0 2em}h1{font-size:1.25em}.s{font-size:1.7em;margin:.6em 0 0}"
        ".t{position:absolute;bottom:8%;inset-inline-end:12%;width:9em;height:9em;border:3px solid #a33;"
        "border-radius:50%;color:#a33;transform:rotate(-14deg);opacity:.6;display:flex;align-items:center;"
        "text-align:center;padding:.6em}"
    )
    html = facts.page(f"{head}<h1>{esc(facts.title)}</h1>{body}{sign}", style, facts.serif)
    return html, [(facts.ask("number"), [number]), (facts.ask("date"), facts.written(facts.date())), (facts.ask("firm"), [facts.firm])]


def article(facts: Facts, size: tuple[int, int]) -> tuple[str, list[Turn]]:
    columns = 3 if size[0] > 1300 else 2 if size[0] > 700 else 1
    parts = [_fill(facts, size, 0.9) // 4 + 1] * 4
    body = "".join(f"<p>{esc(facts.paragraph(part))}</p>" for part in parts)
    quote = f"<blockquote>{esc(facts.sentences(1)[0])}</blockquote>"
    style = f"body{{padding:5% 6%;font-size:{_fit(size) * 0.92}px;line-height:1.5}}h1{{font-size:2em;line-height:1.15;margin:.1em 0}}"
    style += f".c{{column-count:{columns};column-gap:2em;text-align:justify}}.b{{color:#666;border-bottom:1px solid #999;margin-bottom:1em}}"
    style += "blockquote{margin:.5em 0;padding:.4em 1em;border-inline-start:4px solid var(--a);color:var(--a);font-size:1.2em}p{margin:0 0 .7em}"
    top = f"<h1>{esc(facts.title)}</h1><div class=b>{esc(facts.name)} · {esc(facts.date())}</div>"
    return facts.page(f"{top}<div class=c>{body}{quote}</div>", style, facts.serif), [
        (facts.ask("title"), [facts.title]),
        (facts.ask("date"), facts.written(facts.date())),
    ]


def report(facts: Facts, size: tuple[int, int]) -> tuple[str, list[Turn]]:
    """Numbered sections, a list and a small table: what offices write."""
    px, number = _fit(size), facts.code()
    count = _fill(facts, size, 0.62)
    parts = "".join(f"<h2>{i}. {esc(t)}</h2><p>{esc(facts.paragraph(max(1, count // 3)))}</p>" for i, t in enumerate(_headings(facts), 1))
    points = "".join(f"<li>{esc(line)}</li>" for line in facts.sentences(3 if size[1] > 800 else 2))
    style = f"body{{padding:6% 8%;font-size:{px * 0.95}px;line-height:1.45}}h1{{background:var(--a);color:#fff;padding:.5em .7em;font-size:1.5em}}"
    style += "h2{font-size:1.1em;color:var(--a);margin:.8em 0 .2em}p{margin:.2em 0}.m{color:#555}"
    top = f"<h1>{esc(facts.title)}</h1><div class=m>{facts.label('number')} {number} · {esc(facts.date())} · {esc(facts.name)}</div>"
    return facts.page(f"{top}{parts}<ul>{points}</ul>", style), [
        (facts.ask("number"), [number]),
        (facts.ask("date"), facts.written(facts.date())),
        (facts.ask("title"), [facts.title]),
    ]


def invoice(facts: Facts, size: tuple[int, int]) -> tuple[str, list[Turn]]:
    px, number, wide = _fit(size), facts.code(), size[0] > size[1]
    items = [(good, facts.rng.randint(1, 30), facts.rng.randint(150, 30000)) for good in facts.goods(5 if wide else 8)]
    total = sum(count * cents for _, count, cents in items)
    head = "".join(f"<th>{esc(facts.label(key))}</th>" for key in ("item", "quantity", "price", "sum"))
    rows = "".join(
        f"<tr><td>{esc(good)}<td class=e>{facts.digits(str(count))}<td class=e>{facts.amount(cents)}<td class=e>{facts.amount(count * cents)}"
        for good, count, cents in items
    )
    sums = (
        f"<tr><td><td><td>{facts.label('tax')}<td class=e>{facts.amount(total * 19 // 119)}<tr class=z><td>"
        f"<td><td>{facts.label('total')}<td class=e>{facts.money(total)}"
    )
    style = (
        f"body{{padding:6% 8%;font-size:{px}px;line-height:1.5}}header{{display:flex;"
        f"justify-content:space-between;align-items:end}}h1{{color:var(--a);font-size:2.2em;margin:0}}"
    )
    style += (
        "th{background:var(--a);color:#fff;text-align:start;padding:.4em .6em}td{padding:.4em .6em;"
        "border-bottom:1px solid #ddd}.e{text-align:end;white-space:nowrap}.z td{font-weight:bold;"
        "font-size:1.15em}.m{margin:1.5em 0}"
    )
    meta = (
        f"<div class=m>{facts.label('customer')}: {esc(facts.name)}<br>{esc(facts.city)}<br>"
        f"{facts.label('number')}: {number}<br>{facts.label('date')}: {esc(facts.date())}</div>"
    )
    note = f"<p>{esc(facts.paragraph(3, events=False))}</p><p>{esc(facts.firm)} · <bdi dir=ltr>{facts.digits(facts.phone())}</bdi></p>"
    html = facts.page(
        f"<header><h1>{esc(facts.label('invoice'))}</h1><b>{esc(facts.firm)}</b></header>{meta}<table><tr>{head}</tr>{rows}{sums}</table>{note}",
        style,
    )
    turns = [(facts.ask("total"), facts.golds(total)), (facts.ask("number"), [number]), (facts.ask("date"), facts.written(facts.date()))]
    return html, turns


def _ltr(value: str) -> str:
    """Numbers with gaps keep their order in a text that runs from right to left."""
    return f"<bdi dir=ltr>{esc(value)}</bdi>" if not any(letter.isalpha() for letter in value) else esc(value)


def _headings(facts: Facts) -> list[str]:
    return [facts.label(key) for key in facts.rng.sample(["costs", "sales", "notes", "customer", "department", "region"], 3)]


def document(lang: str, rng: random.Random, index: int) -> Scene:
    facts, size = Facts(lang, rng), PAPER[index % len(PAPER)]
    html, turns = (letter, article, report, invoice)[(index + index // 4) % 4](facts, size)
    effect = "scan" if index % 4 == 3 else "none"
    return Scene("document", lang, "doc", size, [html], turns, effect, "jpg" if effect == "scan" else "png")


def form(lang: str, rng: random.Random, index: int) -> Scene:
    """Boxes and lines with labels, filled in by hand or by machine."""
    facts, size = Facts(lang, rng), [(816, 1056), (1024, 1320), (700, 900), (1200, 900), (640, 640), (960, 1280)][index % 6]
    by_hand, number, phone = index % 2 == 0, facts.code(), facts.digits(facts.phone())
    born = facts.digits(f"{rng.randint(1, 28):02d}.{rng.randint(1, 12):02d}.{rng.randint(1950, 2004)}")
    values = [("name", facts.name), ("born", born), ("address", f"{facts.city} {facts.digits(str(rng.randint(10000, 99999)))}"), ("phone", phone)]
    values += [("department", facts.firm), ("city", facts.city), ("number", number), ("customer", rng.choice(CITIES[lang]))]
    rng.shuffle(values)
    shown = values[: 6 if size[1] < 700 else 8]
    px = _fit(size)
    ink = (
        f"font-family:'{facts.hand}';color:#1a2b8c;font-size:1.45em;line-height:1.2"
        if by_hand
        else "font-family:'Noto Sans Mono','Noto Sans CJK SC','Noto Naskh Arabic'"
    )
    rows = "".join(
        f"<div class=q><label>{i}. {esc(facts.label(k))}</label><div class=v><bdi>{_ltr(v)}</bdi></div></div>" for i, (k, v) in enumerate(shown, 1)
    )
    yes = rng.random() < 0.5
    boxes = "".join(f"<span class=b>{'☒' if on else '☐'} {esc(facts.label(k))}</span>" for k, on in (("yes", yes), ("no", not yes)))
    notes = "" if size[1] < 700 else f"<div class=n><b>{facts.label('notes')}</b><p>{esc(facts.paragraph(2, events=False))}</p></div>"
    last = f"<div class=n>{facts.label('signature')}: <span style=\"font-family:'{facts.hand}';font-size:1.6em\">{esc(facts.name)}</span></div>"
    style = (
        f"body{{padding:5% 7%;font-size:{px}px}}h1{{font-size:1.6em;border:2px solid #222;padding:.4em;text-align:center}}"
        f"label{{font-size:.8em;color:#444}}"
    )
    style += (
        f".g{{display:grid;grid-template-columns:1fr 1fr;gap:.7em}}.v{{{ink};border:1px solid #555;"
        f"padding:.15em .5em;min-height:2em;overflow:hidden;white-space:nowrap}}"
    )
    style += (
        ".b{margin-inline-end:2em;font-size:1.2em}.n{margin-top:1em;border-top:1px solid #999;"
        "padding-top:.5em}.x{margin:1em 0;background:#eef2f6;padding:.6em}"
    )
    html = facts.page(
        f"<h1>{esc(facts.label('form'))} · {esc(facts.firm)}</h1><div class=g>{rows}</div><div class=x>{boxes}</div>{notes}{last}", style
    )
    asked = [(key, value) for key, value in shown if key in ("name", "number")]
    turns = [(facts.ask(key), [value]) for key, value in asked] or [(facts.ask("firm"), [facts.firm])]
    effect = ("none", "scan", "shot")[index % 3]
    return Scene("form", lang, "doc", size, [html], turns, effect, "png" if effect == "none" else "jpg")


def receipt(lang: str, rng: random.Random, index: int) -> Scene:
    facts, size = Facts(lang, rng), RECEIPTS[index % len(RECEIPTS)]
    items = [(name, rng.randint(1, 4), rng.randint(89, 1999)) for name in facts.goods(min(9, size[1] // 130))]
    total = sum(count * cents for _, count, cents in items)
    paid = (total // 1000 + 1) * 1000
    rows = "".join(
        f"<tr><td>{esc(name)}</td><td>{facts.digits(str(count))}×{facts.amount(cents)}</td><td class=e>{facts.amount(count * cents)}</td></tr>"
        for name, count, cents in items
    )
    lines = [("tax", facts.amount(total * 7 // 107)), ("total", facts.money(total)), ("cash", facts.money(paid))]
    sums = "".join(f"<tr class={key}><td>{esc(facts.label(key))}</td><td></td><td class=e>{value}</td></tr>" for key, value in lines)
    number = facts.code()
    bars = "".join(f"<i style='width:{rng.choice((2, 2, 3, 5))}px;margin-inline-end:{rng.choice((2, 3, 4))}px'></i>" for _ in range(48))
    body = (
        f"<h1>{esc(facts.firm)}</h1><p>{esc(facts.city)} · <bdi dir=ltr>{facts.digits(facts.phone())}</bdi>"
        f"</p><p>{esc(facts.date())} {facts.digits(f'{rng.randint(8, 20):02d}:{rng.randint(0, 59):02d}')}"
    )
    body += (
        f"<br>{facts.label('number')} {number}</p><table>{rows}<tr class=k><td colspan=3></td></tr>"
        f"{sums}</table><div class=c>{bars}</div><p>* {number} *</p>"
    )
    mono = "Noto Sans Mono" if index % 2 and facts.script in ("latin", "cyrillic") else facts.sans
    style = (
        f"body{{padding:{size[0] // 12}px;font-size:{size[0] / 27}px;text-align:center;line-height:1.5;background:#fdfdfb}}"
        f"h1{{font-size:1.5em;margin:.2em 0}}"
    )
    style += (
        "td{text-align:start;padding:.12em 0;vertical-align:top}.e{text-align:end;white-space:nowrap}.k td{border-bottom:2px dashed #555;height:.6em}"
    )
    style += (
        ".total td{font-size:1.35em;font-weight:bold}.c{display:flex;height:60px;justify-content:center;"
        "margin-top:2em}.c i{background:#111;display:block}"
    )
    name, _, cents = rng.choice([item for item in items if item[1]])
    turns = [
        (facts.ask("total"), facts.golds(total)),
        (facts.ask("date"), facts.written(facts.date())),
        (facts.ask("price", name), facts.golds(cents)),
    ]
    effect = ("shot", "none", "crumple")[index % 3]
    return Scene(
        "receipt",
        lang,
        "doc",
        size,
        [facts.page(body, style, mono)],
        turns,
        effect,
        "png" if effect == "none" else "jpg",
        {"cut": True, "grow": 1.15},
    )


def table(lang: str, rng: random.Random, index: int) -> Scene:
    """Cities by months or by figures: ruled, striped or bare."""
    facts, size = Facts(lang, rng), TABLES[index % len(TABLES)]
    tall = size[1] > 800
    first = facts.goods(10) if tall else rng.sample(CITIES[lang], 6)
    subject = facts.label("item" if tall else "region")
    keys = ["sales", "costs", "profit", "share"] if size[0] > 700 else ["sales", "costs"]
    cells = {(row, key): rng.randint(12, 99) if key == "share" else rng.randint(110, 9900) for row in first for key in keys}
    head = "".join(f"<th>{esc(facts.label(key))}</th>" for key in keys)
    head = f"<th>{esc(subject)}</th>{head}"
    rows = "".join(
        f"<tr><td>{esc(row)}</td>"
        + "".join(f"<td class=e>{facts.digits(str(cells[row, key]))}{'%' if key == 'share' else ''}</td>" for key in keys)
        + "</tr>"
        for row in first
    )
    look = (
        "td,th{border:1px solid #444}",
        "tr:nth-child(even){background:#e9eff6}th{background:var(--a);color:#fff}",
        "th{border-bottom:3px solid var(--a)}td{border-bottom:1px solid #ddd}",
    )
    px = min(size[1] / (len(first) + 5) / 2.1, size[0] / 30)
    style = (
        f"body{{padding:3% 4%;font-size:{px}px}}td,th{{padding:.38em .7em;text-align:start}}.e{{text-align:end}}"
        f"h1{{font-size:1.25em;margin:.2em 0 .6em}}p{{color:#666;font-size:.75em}}{look[index % 3]}"
    )
    caption = f"<h1>{esc(facts.title)} ({facts.digits(str(facts.day[0]))})</h1>"
    html = facts.page(f"{caption}<table><tr>{head}</tr>{rows}</table><p>{esc(facts.sentences(1)[0])}</p>", style, facts.serif if index % 2 else None)
    row, key = rng.choice(first), rng.choice(keys[:3])
    best = max(first, key=lambda name: cells[name, "sales"])
    unique = [value for (_, other), value in cells.items() if other == "sales"].count(cells[best, "sales"]) == 1
    turns = [(facts.ask("value", facts.label(key), row), facts.written(facts.digits(str(cells[row, key]))))]
    turns += [(f"{facts.ask('highest', subject)} ({facts.label('sales')})", [best])] if unique else []
    effect = "scan" if index % 5 == 2 else "none"
    return Scene("table", lang, "doc", size, [html], turns, effect, "jpg" if effect == "scan" else "png")


def scan(lang: str, rng: random.Random, index: int) -> Scene:
    """Two or three pages of one file, as a flatbed gives them; the answer is on one of them."""
    size = [(720, 1018), (640, 905), (816, 1056)][index % 3]
    first = Facts(lang, rng)
    pages, turns = [], []
    for page in range(2 + index % 2):
        facts = Facts(lang, rng)
        facts.accent, facts.serif, facts.sans, facts.eastern = "#222", first.serif, first.sans, first.eastern
        html, asked = (letter, report, article)[page % 3](facts, size)
        pages.append(html)
        if page == 0:
            turns.append(asked[2])  # the firm, which no other page names
    rng.shuffle(pages)
    return Scene("scan", lang, "doc", size, pages, turns, "gray", "jpg")


BUILDERS: dict[str, Callable[[str, random.Random, int], Scene]] = {
    "document": document,
    "form": form,
    "receipt": receipt,
    "table": table,
    "scan": scan,
}
