"""Source code and terminals of `calib/general`: an editor's window, light or dark."""

from __future__ import annotations

import random

from draw_general_facts import Facts, Scene, esc

DARK = {"bg": "#1e2127", "fg": "#d7dae0", "kw": "#c678dd", "st": "#98c379", "nu": "#d19a66", "co": "#7f848e", "fn": "#61afef", "li": "#5c6370"}

LIGHT = {"bg": "#ffffff", "fg": "#24292f", "kw": "#b3124b", "st": "#0a5c36", "nu": "#0550ae", "co": "#6e7781", "fn": "#6639ba", "li": "#aab1ba"}

SNIPPETS = [
    (
        "orchard.py",
        "python",
        "{kw}from{/} dataclasses {kw}import{/} dataclass\n\n\n@dataclass\n{kw}class{/} {fn}Tree{/}:\n    "
        "kind: str\n    height: float  {co}# metres{/}\n\n"
        "    {kw}def{/} {fn}shade{/}(self, sun: float) -> float:\n        {kw}if{/} sun <= {nu}0{/}:\n       "
        '     {kw}raise{/} ValueError({st}"the sun is down"{/})\n'
        '        {kw}return{/} self.height / sun\n\n\ntrees = [Tree({st}"pear"{/}, {nu}{a}{/}), Tree({st}'
        '"plum"{/}, {nu}{b}{/})]\n{kw}for{/} tree {kw}in{/} trees:\n'
        "    print(tree.kind, {fn}round{/}(tree.shade({nu}0.7{/}), {nu}2{/}))",
        "What string does the ValueError carry?",
        "the sun is down",
    ),
    (
        "queue.rs",
        "rust",
        "{kw}use{/} std::collections::VecDeque;\n\n{co}/// Hands out berths in the order in which ships "
        "arrive.{/}\n{kw}pub struct{/} {fn}Harbour{/} {\n    waiting: VecDeque<String>,\n"
        "    berths: usize,\n}\n\n{kw}impl{/} Harbour {\n    {kw}pub fn{/} {fn}new{/}() -> Self {\n        "
        "Self { waiting: VecDeque::new(), berths: {nu}{a}{/} }\n    }\n\n"
        "    {kw}pub fn{/} {fn}arrive{/}({kw}&mut{/} self, ship: &str) {\n        self.waiting.push_back(ship.to_owned());\n    }\n}",
        "How many berths does a new Harbour have?",
        "{a}",
    ),
    (
        "kettle.ts",
        "typescript",
        "{kw}interface{/} {fn}Kettle{/} {\n  litres: number;\n  on: boolean;\n}\n\n{kw}const{/} LIMIT = {nu}"
        "{a}{/};\n\n{kw}export async function{/} {fn}boil{/}(kettle: Kettle) {\n"
        "  {kw}if{/} (kettle.litres > LIMIT) {\n    {kw}throw new{/} Error({st}`too full: ${kettle.litres}"
        "`{/});\n  }\n  kettle.on = {nu}true{/};\n  {kw}await{/} wait({nu}{b}{/} * kettle.litres);\n"
        "  kettle.on = {nu}false{/};\n  {kw}return{/} kettle;\n}",
        "What is the value of LIMIT?",
        "{a}",
    ),
    (
        "stock.sql",
        "sql",
        "{co}-- what must be ordered before Monday{/}\n{kw}SELECT{/} item.name,\n       {fn}SUM{/}"
        "(sale.count) {kw}AS{/} sold,\n       item.in_store\n{kw}FROM{/} item\n{kw}JOIN{/} sale {kw}ON{/} "
        "sale.item_id = item.id\n"
        "{kw}WHERE{/} sale.day >= {st}'2027-03-01'{/}\n{kw}GROUP BY{/} item.name, item.in_store\n{kw}"
        "HAVING{/} {fn}SUM{/}(sale.count) > {nu}{a}{/}\n{kw}ORDER BY{/} sold {kw}DESC{/}\n{kw}LIMIT{/} {nu}"
        "{b}{/};",
        "What is the LIMIT of the query?",
        "{b}",
    ),
    (
        "terminal",
        "sh",
        "{fn}ada@mill{/}:{kw}~/bakery{/}$ ls -l recipes\ntotal {a}\n-rw-r--r-- 1 ada staff  {b} "
        "rye.txt\n-rw-r--r-- 1 ada staff 1042 plait.txt\n-rw-r--r-- 1 ada staff  877 spelt.txt\n"
        "{fn}ada@mill{/}:{kw}~/bakery{/}$ make loaves\n{st}ok{/}      mix      flour water salt\n{st}ok{/}   "
        "   rest     {nu}{a}{/} min\n{nu}error{/}   oven     sensor 3 does not answer\n"
        "make: *** [Makefile:{b}: loaves] Error 2\n{fn}ada@mill{/}:{kw}~/bakery{/}$ _",
        "Which line of the Makefile failed?",
        "{b}",
    ),
    (
        "deploy.yaml",
        "yaml",
        "{co}# one oven per village{/}\n{kw}service{/}: {st}bread{/}\n{kw}replicas{/}: {nu}{a}{/}\n{kw}"
        "port{/}: {nu}{b}{/}\n{kw}limits{/}:\n  {kw}memory{/}: {st}512Mi{/}\n  {kw}cpu{/}: {nu}0.5{/}\n"
        "{kw}health{/}:\n  {kw}path{/}: {st}/warm{/}\n  {kw}every{/}: {st}30s{/}\n{kw}volumes{/}:\n  - {kw}"
        "name{/}: {st}flour{/}\n    {kw}size{/}: {st}20Gi{/}\n  - {kw}name{/}: {st}logs{/}\n    {kw}size{/}: "
        "{st}2Gi{/}",
        "Which port does the service use?",
        "{b}",
    ),
]


def code(lang: str, rng: random.Random, index: int) -> Scene:
    """An editor or a terminal; comments may be in the language of the picture."""
    facts, size = Facts(lang, rng), [(960, 640), (1200, 800), (700, 560), (1280, 540), (900, 900), (640, 480)][(index + index // 6) % 6]
    name, _, text, question, answer = SNIPPETS[index % len(SNIPPETS)]
    a, b = str(rng.randint(12, 48)), str(rng.randint(105, 990))
    colours = DARK if index % 2 or name == "terminal" else LIGHT
    marked = esc(text).replace("{a}", a).replace("{b}", b).replace("{/}", "</b>")
    for mark in ("kw", "st", "nu", "co", "fn"):
        marked = marked.replace(f"{{{mark}}}", f"<b class={mark}>")
    if lang != "en" and name != "terminal":
        marked = (
            f"<b class=co>{'--' if name.endswith('sql') else '//' if name.endswith(('rs', 'ts')) else '#'} <bdi>"
            f"{esc(facts.sentences(1)[0])}</bdi></b>\n{marked}"
        )
    lines = marked.split("\n")
    px = min(size[1] / (len(lines) + 5) / 1.45, size[0] / 48, 22)
    rows = "".join(f"<div><s>{'' if name == 'terminal' else number}</s>{line or ' '}</div>" for number, line in enumerate(lines, 1))
    tree = (
        ""
        if name == "terminal" or size[0] < 900
        else "<nav>" + "".join(f"<p>{file}</p>" for file in ("src", "  " + name, "  tests", "README.md", "LICENSE")) + "</nav>"
    )
    style = (
        f"body{{background:{colours['bg']};color:{colours['fg']};font-size:{px}px}}header{{padding:.5em 1em;"
        f"background:{colours['li']}44;font-family:'Noto Sans'}}"
    )
    style += (
        "main{display:flex;height:100%}pre{margin:0;padding:1em .5em;line-height:1.45;white-space:pre-wrap;"
        "font-family:'Noto Sans Mono','Noto Sans Mono CJK SC','Noto Sans Arabic';flex:1}b{font-weight:normal}"
    )
    style += (
        f"s{{text-decoration:none;display:inline-block;width:3em;padding-inline-end:1em;text-align:end;color:{colours['li']}}}"
        f"nav{{width:11em;padding:1em;background:{colours['li']}22;white-space:pre}}nav p{{margin:.3em 0}}"
    )
    style += "".join(f".{key}{{color:{value}}}" for key, value in colours.items())
    dots = "<span style='color:#e5534b'>●</span> <span style='color:#daaa3f'>●</span> <span style='color:#57ab5a'>●</span>"
    html = facts.page(f"<header>{dots} &nbsp; {name}</header><main dir=ltr>{tree}<pre>{rows}</pre></main>", style)
    return Scene(
        "code",
        lang,
        "ocr" if name != "orchard.py" else "vqa",
        size,
        [html],
        [(question, [answer.replace("{a}", a).replace("{b}", b)])],
        extra={"grow": 1.5},
    )
