"""Charts of `calib/general` by matplotlib: bars, lines, pies, scatter, stacked, boxes, heat maps, with labels in four scripts."""

from __future__ import annotations

import io
import random
import subprocess
from collections.abc import Callable
from typing import Any

import matplotlib

matplotlib.use("Agg")
from draw_general_facts import ACCENTS, Facts, Scene, Turn
from draw_general_texts import CITIES
from matplotlib import font_manager
from matplotlib import pyplot as plt
from PIL import Image

SIZES = [(800, 560), (640, 480), (1200, 675), (900, 900), (560, 760), (1400, 560), (1000, 640)]
CJK = subprocess.run(["fc-match", "-f", "%{file}", "Noto Sans CJK JP"], capture_output=True, text=True, check=True).stdout
font_manager.fontManager.addfont(CJK)
FONTS = {"latin": "Noto Sans", "cyrillic": "DejaVu Sans", "chinese": font_manager.FontProperties(fname=CJK).get_name(), "arabic": "Noto Sans Arabic"}
STYLES = ["default", "ggplot", "bmh", "seaborn-v0_8-whitegrid", "dark_background", "fast"]


def bars(axes: Any, facts: Facts, across: bool) -> list[Turn]:
    names = facts.rng.sample(CITIES[facts.lang], 5)
    values = facts.rng.sample(range(12, 98), 5)
    colour = facts.rng.choice(ACCENTS)
    drawn = axes.barh(names, values, color=colour) if across else axes.bar(names, values, color=colour)
    if facts.rng.random() < 0.6:
        axes.bar_label(drawn, padding=2)
    axes.margins(**{"x" if across else "y": 0.14})
    (axes.set_xlabel if across else axes.set_ylabel)(facts.label("sales"))
    place = facts.rng.randrange(5)
    best = names[values.index(max(values))]
    return [(facts.ask("value", facts.label("sales"), names[place]), [str(values[place])]), (facts.ask("highest", facts.label("city")), [best])]


def lines(axes: Any, facts: Facts) -> list[Turn]:
    from draw_general_texts import months

    names = months(facts.lang)[: facts.rng.choice((6, 8, 12))]
    peaks = []
    for key, mark in (("sales", "o-"), ("costs", "s--")):
        values = facts.rng.sample(range(15, 95), len(names))
        axes.plot(range(len(names)), values, mark, label=facts.label(key))
        peaks.append(names[values.index(max(values))])
    axes.set_xticks(range(len(names)), names, rotation=35)
    axes.legend()
    return [(f"{facts.ask('highest', facts.label('month'))} ({facts.label('sales')})", [peaks[0]])]


def pie(axes: Any, facts: Facts) -> list[Turn]:
    names = facts.rng.sample(CITIES[facts.lang], 4)
    cuts = sorted(facts.rng.sample(range(9, 92, 7), 3))
    values = [b - a for a, b in zip([0, *cuts], [*cuts, 100], strict=True)]
    _, _, shares = axes.pie(
        values,
        labels=names,
        autopct="%.0f%%",
        startangle=facts.rng.randint(0, 180),
        wedgeprops={"width": facts.rng.choice((0.45, 1.0)), "edgecolor": "white"},
        pctdistance=0.77,
    )
    for text in shares:
        text.set_bbox({"facecolor": "white", "alpha": 0.7, "lw": 0})
        text.set_color("black")
    place = values.index(max(values))
    return [(facts.ask("value", facts.label("share"), names[place]), [f"{values[place]}%", str(values[place])])]


def scatter(axes: Any, facts: Facts) -> list[Turn]:
    groups = facts.rng.sample(CITIES[facts.lang], facts.rng.randint(2, 4))
    for place, (name, mark) in enumerate(zip(groups, "o^sD", strict=False)):
        x, y = 20 + 28 * place + facts.rng.randint(-4, 4), facts.rng.randint(20, 80)
        points = [(facts.rng.gauss(x, 7), facts.rng.gauss(y, 7)) for _ in range(24)]
        axes.scatter(*zip(*points, strict=True), marker=mark, alpha=0.75, label=name)
    axes.set_xlabel(facts.label("costs"))
    axes.set_ylabel(facts.label("profit"))
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1))
    return [("How many groups of points are there?", [str(len(groups))])]


def stacked(axes: Any, facts: Facts) -> list[Turn]:
    years = [str(facts.day[0] + i) for i in range(-3, 2)]
    bottom = [0] * 5
    for key in ("sales", "costs", "profit"):
        values = [facts.rng.randint(8, 40) for _ in years]
        axes.bar(years, values, bottom=bottom, label=facts.label(key))
        bottom = [a + b for a, b in zip(bottom, values, strict=True)]
    axes.legend(loc="upper left", ncols=3)
    axes.set_ylim(0, max(bottom) * 1.25)
    for year, top in zip(years, bottom, strict=True):
        axes.text(year, top + 1, str(top), ha="center")
    axes.set_xlabel(facts.label("year"))
    place = facts.rng.randrange(5)
    return [(facts.ask("value", facts.label("total"), years[place]), [str(bottom[place])])]


def heat(axes: Any, facts: Facts) -> list[Turn]:
    names = facts.rng.sample(CITIES[facts.lang], 4)
    years = [str(facts.day[0] - i) for i in (3, 2, 1, 0)]
    values = [[facts.rng.randint(1, 99) for _ in years] for _ in names]
    axes.imshow(values, cmap=facts.rng.choice(["YlGnBu", "OrRd", "viridis"]), aspect="auto", vmin=-30, vmax=130)
    axes.set_xticks(range(4), years)
    axes.set_yticks(range(4), names)
    axes.grid(False)
    for row in range(4):
        for column in range(4):
            axes.text(
                column, row, str(values[row][column]), ha="center", va="center", color="black", bbox={"facecolor": "white", "alpha": 0.6, "lw": 0}
            )
    row, column = facts.rng.randrange(4), facts.rng.randrange(4)
    return [(facts.ask("value", names[row], years[column]), [str(values[row][column])])]


def chart(lang: str, rng: random.Random, index: int) -> Scene:
    facts, size = Facts(lang, rng), SIZES[index % len(SIZES)]
    drawers: tuple[Callable[[Any], list[Turn]], ...] = (
        lambda axes: bars(axes, facts, False),
        lambda axes: lines(axes, facts),
        lambda axes: pie(axes, facts),
        lambda axes: bars(axes, facts, True),
        lambda axes: stacked(axes, facts),
        lambda axes: scatter(axes, facts),
        lambda axes: heat(axes, facts),
    )
    with plt.style.context(
        [STYLES[index // 2 % len(STYLES)], {"font.family": [FONTS[facts.script], "DejaVu Sans"], "font.size": min(size) / 46 + 2}]
    ):
        figure, axes = plt.subplots(figsize=(size[0] / 100, size[1] / 100), dpi=100, layout="constrained")
        turns = drawers[(index + index // 7) % len(drawers)](axes)
        axes.set_title(f"{facts.title} ({facts.day[0]})", wrap=True)
        stored = io.BytesIO()
        figure.savefig(stored, format="png")
        plt.close(figure)
    picture = Image.open(stored).convert("RGB")
    return Scene("chart", lang, "chart", size, [], turns, extra={"picture": picture})
