"""What a picture of `calib/general` is made of: facts in one language, written as people there write them, and the scene."""

from __future__ import annotations

import html
import random
from dataclasses import dataclass, field

from draw_general_labels import ASK, label
from draw_general_texts import CITIES, EVENTS, FIRMS, PEOPLE, SCRIPTS, SENTENCES, goods, titles

Turn = tuple[str, list[str]]
EASTERN = str.maketrans("0123456789", "٠١٢٣٤٥٦٧٨٩")

SANS = {
    "latin": ["Noto Sans", "Liberation Sans", "DejaVu Sans", "Noto Sans Display", "Liberation Sans Narrow"],
    "cyrillic": ["Noto Sans", "Liberation Sans", "DejaVu Sans"],
    "chinese": ["Noto Sans CJK SC"],
    "arabic": ["Noto Sans Arabic", "Noto Kufi Arabic"],
}
SERIF = {
    "latin": ["Noto Serif", "Liberation Serif", "DejaVu Serif"],
    "cyrillic": ["Noto Serif", "Liberation Serif"],
    "chinese": ["Noto Serif CJK SC", "AR PL UKai CN"],
    "arabic": ["Noto Naskh Arabic", "Amiri"],
}
HAND = {
    "latin": ["Breip", "DkgHandwriting", "Rufscript", "Delphine", "Steve", "Kristi"],
    "cyrillic": ["Steve"],
    "chinese": ["AR PL UKai CN"],
    "arabic": ["Noto Nastaliq Urdu"],
}
ACCENTS = ["#0b5394", "#8a1c1c", "#1e6b45", "#5b2a86", "#b35900", "#0f6674", "#37474f", "#a3195b", "#2f3e9e", "#6b5b1e"]


@dataclass
class Scene:
    """One item: its pages as HTML (or the name of a drawer), (width, height) in pixels, questions with answers, and how it is to look."""

    kind: str
    lang: str
    task: str
    size: tuple[int, int]
    pages: list[str]
    turns: list[Turn]
    effect: str = "none"
    suffix: str = "png"
    extra: dict[str, object] = field(default_factory=dict)

    @property
    def script(self) -> str:
        return SCRIPTS[self.lang]


class Facts:
    """Draws names, dates, numbers and prices of one language, written as people there write them."""

    def __init__(self, lang: str, rng: random.Random) -> None:
        self.lang, self.rng, self.script = lang, rng, SCRIPTS[lang]
        self.rtl = lang == "ar"
        self.accent = rng.choice(ACCENTS)
        self.sans, self.serif, self.hand = (rng.choice(fonts[self.script]) for fonts in (SANS, SERIF, HAND))
        self.eastern = self.rtl and rng.random() < 0.5
        self.name, self.firm, self.city = rng.choice(PEOPLE[lang]), rng.choice(FIRMS[lang]), rng.choice(CITIES[lang])
        self.title = rng.choice(titles(lang))
        self.day = (2021 + rng.randrange(7), rng.randint(1, 12), rng.randint(1, 28))

    def label(self, key: str) -> str:
        return label(self.lang, key)

    def digits(self, text: str) -> str:
        """Arabic-Indic digits where this picture uses them."""
        return text.translate(EASTERN) if self.eastern else text

    def date(self) -> str:
        year, month, day = self.day
        forms = {"en": f"{year}-{month:02d}-{day:02d}", "zh": f"{year}年{month}月{day}日", "ar": f"{year}/{month:02d}/{day:02d}"}
        return self.digits(forms.get(self.lang, f"{day:02d}.{month:02d}.{year}" if self.lang != "fr" else f"{day:02d}/{month:02d}/{year}"))

    def code(self) -> str:
        return f"{self.rng.choice('ABCDEFHKMNPRTVXZ')}{self.rng.choice('ABCDEFHKMNPRTVXZ')}-{self.rng.randint(10000, 99999)}"

    def phone(self) -> str:
        return f"0{self.rng.randint(20, 89)} {self.rng.randint(100, 999)} {self.rng.randint(1000, 9999)}"

    def amount(self, cents: int) -> str:
        """A number with two decimals, without its currency."""
        text = f"{cents / 100:,.2f}"
        if self.lang in ("de", "fr", "ru"):
            text = text.replace(",", " ").replace(".", ",") if self.lang != "de" else text.translate(str.maketrans(",.", ".,"))
        return self.digits(text)

    def money(self, cents: int) -> str:
        text = self.amount(cents)
        return {"en": f"${text}", "zh": f"¥{text}", "ar": f"{text} درهم", "ru": f"{text} ₽"}.get(self.lang, f"{text} €")

    def golds(self, cents: int) -> list[str]:
        """A price as it is written, without its currency, and in plain digits."""
        return list(dict.fromkeys([self.money(cents), self.amount(cents), f"{cents / 100:.2f}"]))

    def written(self, text: str) -> list[str]:
        """A text as it is written, and with Western digits."""
        western = text.translate({ord(eastern): plain for plain, eastern in zip("0123456789", "٠١٢٣٤٥٦٧٨٩", strict=True)})
        return list(dict.fromkeys([text, western]))

    def ask(self, key: str, *words: str) -> str:
        return ASK[key][self.lang].format(*words)

    def sentences(self, count: int, events: bool = True) -> list[str]:
        """Sentences in an order of this picture. Without `events` none of them names a person or a place, so that a question has one answer."""
        pool = list(SENTENCES[self.lang])
        if events:
            pool += [self._event(pattern) for pattern in EVENTS[self.lang] for _ in range(5)]
        self.rng.shuffle(pool)
        return (pool * (1 + count // len(pool)))[:count]

    def _event(self, pattern: str) -> str:
        """A sentence that nobody else's picture has: people, places, goods and prices drawn anew."""
        day = f"{self.rng.randint(1, 28)}.{self.rng.randint(1, 12)}."
        words = {"who": self.rng.choice(PEOPLE[self.lang]), "where": self.rng.choice(CITIES[self.lang]), "what": self.rng.choice(goods(self.lang))}
        day = {"zh": "{1}月{0}日", "ar": "{0}/{1}", "en": "{0}/{1}", "fr": "{0}/{1}"}.get(self.lang, "{0}.{1}.").format(*day.split("."))
        return pattern.format(
            **words, price=self.money(self.rng.randint(150, 90000)), n=self.digits(str(self.rng.randint(3, 480))), day=self.digits(day)
        )

    def paragraph(self, count: int, events: bool = True) -> str:
        glue = "" if self.lang == "zh" else " "
        return glue.join(self.sentences(count, events))

    def people(self, count: int) -> list[str]:
        return self.rng.sample(PEOPLE[self.lang], count)

    def goods(self, count: int) -> list[str]:
        return self.rng.sample(goods(self.lang), count)

    def page(self, body: str, style: str = "", font: str | None = None) -> str:
        """A whole HTML document. `dir` is the language's; what overflows is found when it is drawn."""
        direction = "rtl" if self.rtl else "ltr"
        base = "*{box-sizing:border-box}html,body{margin:0;height:100%;overflow:hidden}table{border-collapse:collapse;width:100%}"
        face = f"font-family:'{font or self.sans}','Noto Sans','Noto Sans CJK SC','Noto Sans Arabic';"
        head = f"<meta charset=utf-8><style>{base}body{{{face}--a:{self.accent};color:#1b1b1b;background:#fff}}{style}</style>"
        return f"<!doctype html><html lang={self.lang} dir={direction}>{head}<body>{body}</body></html>"


def esc(text: object) -> str:
    return html.escape(str(text))
