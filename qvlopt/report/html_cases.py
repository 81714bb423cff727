"""Cards of an HTML page, one an item: its pictures beside question, expected answers and what both sides said."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from qvlopt.errors import ItemError
from qvlopt.report.cases import KINDS, Case
from qvlopt.report.figures import percent
from qvlopt.report.html_text import differing, said, shown
from qvlopt.report.picture import Embedded, embed

if TYPE_CHECKING:
    from PIL.Image import Image

MOST_PICTURES = 4
"""Of one item."""

PICTURE_BYTES = 16_000_000
"""Of all pictures of a page as text; a mail or a browser takes no page of any size."""

SMALL = 256
"""A picture narrower than this is enlarged with its pixels visible."""

MOST_EXPECTED = 10


class Gallery:
    """Makes cards; remembers the pictures that it has, and how much room is left for more: shown again, one takes room again."""

    def __init__(self, pictures: Callable[[str, str], Iterable[Image]]) -> None:
        self._pictures = pictures
        self._left = PICTURE_BYTES
        self._known: dict[tuple[str, str], str] = {}

    def card(self, case: Case) -> str:
        """The item as an `<article>` that the page's filters know by its data attributes."""
        head = f"{case.set} · {case.id} · {KINDS[case.kind]} · {case.metric} {_scores(case)} · {case.candidate}"
        data = {"candidate": case.candidate, "set": case.set, "kind": case.kind, "size": case.size}
        attributes = " ".join(f'data-{key}="{shown(value)}"' for key, value in data.items())
        return f"<article {attributes}>{self._figure(case)}<div><header>{shown(head)}</header><dl>{_texts(case)}</dl></div></article>"

    def _figure(self, case: Case) -> str:
        key = (case.set, case.id)
        known = self._known.get(key)
        if known is None:
            self._known[key] = known = self._embedded(case)
        elif len(known) > self._left:
            known = "<figcaption>left out, the page has no room for more pictures</figcaption>"
        else:
            self._left -= len(known)
        return f"<figure>{known}</figure>"

    def _embedded(self, case: Case) -> str:
        parts: list[str] = []
        try:
            for number, image in enumerate(self._pictures(case.set, case.id)):
                if number == MOST_PICTURES:
                    parts.append("<figcaption>more pictures are not shown</figcaption>")
                    break
                parts.append(self._picture(embed(image), image.size))
        except ItemError as error:
            parts.append(f"<figcaption>{shown(error.reason)}</figcaption>")
        return "".join(parts) or "<figcaption>no picture</figcaption>"

    def _picture(self, picture: Embedded, original: tuple[int, int]) -> str:
        caption = f"{original[0]}×{original[1]}" + (", shown smaller" if picture.is_reduced else "")
        if len(picture.url) > self._left:
            return f"<figcaption>{caption}: left out, the page has no room for more pictures</figcaption>"
        self._left -= len(picture.url)
        width, height = picture.size
        small = ' class="small"' if width < SMALL else ""
        tag = f'<img{small} src="{picture.url}" width="{width}" height="{height}" loading="lazy" alt="the picture that was asked about">'
        return f"{tag}<figcaption>{caption}</figcaption>"


def filters(cases: Sequence[Case]) -> str:
    """Selections by what the cards differ in. They appear with the script; without it every card is shown."""
    choices: dict[str, tuple[str, Mapping[str, str]]] = {
        "kind": ("change", {case.kind: KINDS[case.kind] for case in sorted(cases, key=lambda case: list(KINDS).index(case.kind))}),
        "set": ("task", {case.set: f"{case.set} ({case.task})" if case.task != case.set else case.set for case in cases}),
        "size": ("picture size", {case.size: case.size for case in sorted(cases, key=lambda case: case.area)}),
        "candidate": ("candidate", {case.candidate: case.candidate for case in cases}),
    }
    selects = [_select(name, *choice) for name, choice in choices.items() if len(choice[1]) > 1]
    return f'<div class="filters">{"".join(selects)}<output></output></div>'


def _select(name: str, label: str, options: Mapping[str, str]) -> str:
    first = next(iter(options))
    listed = "".join(
        f'<option value="{shown(value)}"{" selected" if name == "kind" and value == first else ""}>{shown(text)}</option>'
        for value, text in options.items()
    )
    return f'<label>{label}<select name="{name}"><option value="">all</option>{listed}</select></label>'


def _texts(case: Case) -> str:
    expected = "".join(said(text) for text in list(dict.fromkeys(case.expected))[:MOST_EXPECTED])
    parts = [("question", said(case.question, "question")), ("expected", expected)]
    base, answer = case.base, case.answer
    if base is None:
        parts.append(("answer", said(answer["text"]) + _note(answer)))
    else:
        before, after = differing(base["text"], answer["text"])
        parts += [("base", before + _note(base)), ("candidate", after + _note(answer))]
    return "".join(f"<dt>{name}</dt><dd>{text}</dd>" for name, text in parts)


def _note(answer: Mapping[str, Any]) -> str:
    """How an answer ended, where that is not the usual way."""
    if answer.get("error"):
        return f'<span class="note">failed: {shown(str(answer["error"])[:500])}</span>'
    return '<span class="note">stopped by the limit of new tokens</span>' if answer.get("stop") == "length" else ""


def _scores(case: Case) -> str:
    before, after = case.scores
    return f"{percent(after)} %" if case.base is None else f"{percent(before)} → {percent(after)} %"
