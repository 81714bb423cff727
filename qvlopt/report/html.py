"""One self-contained page for people: the verdict first, the figures, then the pictures that got worse, side by side.

It needs no network and may have none: the content policy allows this page's own style and script, by their hashes, and
pictures that are inside it. Everything that a model, a file or a recipe said is escaped.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qvlopt.report.cases import KINDS, Case, find_cases, most_telling
from qvlopt.report.figures import VERDICTS, interval, percent, points, reading
from qvlopt.report.html_cases import Gallery, filters
from qvlopt.report.html_text import plain_tables, shown, table
from qvlopt.report.plain import finite
from qvlopt.report.plot import axis, interval_plot, plot_reach

if TYPE_CHECKING:
    from PIL.Image import Image

Pictures = Callable[[str, str], Iterable["Image"]]
"""The pictures of a set's item, by the names of both, in mode RGB. May raise ItemError."""

MOST_CASES = 200
MOST_FAILURES = 100


def html_page(document: Mapping[str, Any], rows: Iterable[Mapping[str, Any]], pictures: Pictures) -> str:
    """The page of evaluate's JSON `document` and the rows of items.jsonl."""
    cases = find_cases(document, rows)
    verdict = document["verdict"]
    body = [
        f"<h1>qvlopt {shown(document['version'])} · evaluation</h1>",
        _banner(verdict, document),
        *(_result(result, len(document["results"]) > 1) for result in document["results"]),
        _gallery(cases, pictures, is_compared=any(result.get("baseline") is not None for result in document["results"])),
        *(_failures(result) for result in document["results"]),
        _conditions(document),
        f"<footer>Every answer is in items.jsonl, every figure in report.json. {shown(str(document.get('started') or ''))}</footer>",
    ]
    style, script = _part("page.css"), _part("page.js")
    policy = f"default-src 'none'; img-src data:; style-src '{_hash(style)}'; script-src '{_hash(script)}'; base-uri 'none'; form-action 'none'"
    head = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<meta name="referrer" content="no-referrer">',
        f"<title>{VERDICTS[verdict][0]}: qvlopt evaluation</title>",
        f"<style>{style}</style></head><body>",
    ]
    return "\n".join([*head, *(part for part in body if part), f"<script>{script}</script></body></html>", ""])


def _banner(verdict: str, document: Mapping[str, Any]) -> str:
    word, meaning = VERDICTS[verdict]
    names = ", ".join(f"{result['candidate']} against {result.get('baseline') or 'nothing'}" for result in document["results"])
    if all(result.get("baseline") is None for result in document["results"]):
        meaning = "Scored only: there was no base to compare with." if verdict == "pass" else meaning
    policy = document["exit_code"] == 0 and verdict == "inconclusive"
    allowed = " The recipe lets an inconclusive result pass." if policy else ""
    return (
        f'<section class="verdict {verdict}"><strong>{word}</strong><p>{shown(meaning)}{allowed}</p>'
        f'<p class="quiet">{shown(names)} · exit status {document["exit_code"]}</p></section>'
    )


def _result(result: Mapping[str, Any], is_one_of_many: bool) -> str:
    title = f"Scores of {result['candidate']}" if is_one_of_many else "Scores"
    reasons = "".join(f"<li>{shown(reason)}</li>" for reason in result.get("reasons", ()))
    parts = [
        f"<h2>{shown(title)}</h2>",
        f"<p>Verdict: {_word(result['verdict'])}</p>" if is_one_of_many else "",
        f"<ul>{reasons}</ul>" if reasons else "",
        _findings(result),
        _scores(result["metrics"]),
        _groups("picture size", "size", result.get("by_size", ()), "By picture size as the model saw it"),
        _groups("kind", "kind", result.get("by_stratum", ()), "By kind of item"),
        _counts(result.get("sets", ())),
        _damage(result),
    ]
    return "\n".join(part for part in parts if part)


def _findings(result: Mapping[str, Any]) -> str:
    """A sentence for every metric that has a verdict."""
    judged = [metric for metric in result["metrics"] if metric["verdict"] is not None]
    items = [f"<li>{_word(m['verdict'])} <b>{shown(m['name'])}</b> {shown(m['metric'])}: {shown(reading(m))}</li>" for m in judged]
    return f"<ul>{''.join(items)}</ul>" if items else ""


def _scores(metrics: Sequence[Mapping[str, Any]]) -> str:
    reach = plot_reach(metrics)
    heads = ("set", "metric", "verdict", "items", "base %", "candidate %", "change, points", "interval", axis(reach), "lost / gained")
    rows = [_score_row(metric, reach) for metric in metrics]
    legend = "Bar: the interval. Ring: the difference. Broken line: the margin; a bar wholly to its right passes, wholly to its left fails."
    return table(heads, rows, numbers=range(3, 8)) + f'<p class="note">{legend}</p>' + _variants(metrics)


def _score_row(metric: Mapping[str, Any], reach: float) -> list[str]:
    verdict = _word(metric["verdict"]) if metric["verdict"] else '<span class="note">for information</span>'
    numbers = [f"{metric['n']:,}", percent(metric["base"]), percent(metric["candidate"]), points(metric["delta"])]
    seen = interval(metric) if metric.get("ci_low") is not None else ""
    flips = f"{metric['lost']:,} / {metric['gained']:,}" if metric.get("lost") is not None else ""
    return [shown(metric["name"]), shown(metric["metric"]), verdict, *numbers, seen, interval_plot(metric, reach), flips]


def _variants(metrics: Sequence[Mapping[str, Any]]) -> str:
    """Which of a metric's variants was used: figures of one name are not always comparable with those of others."""
    known = {metric["metric"]: metric["variant"] for metric in metrics if metric.get("variant")}
    inner = table(("metric", "variant"), [[shown(name), shown(variant)] for name, variant in known.items()])
    return f"<details><summary>Variants of the metrics</summary>{inner}</details>" if known else ""


def _groups(head: str, key: str, groups: Sequence[Mapping[str, Any]], title: str) -> str:
    """The deciding metric by what the items have under `key`, folded away."""
    if not groups:
        return ""
    rows = [
        [shown(each["name"]), shown(each[key]), f"{each['n']:,}", percent(each["base"]), percent(each["candidate"]), points(each["delta"])]
        for each in groups
    ]
    inner = table(("set", head, "items", "base %", "candidate %", "change, points"), rows, numbers=(2, 3, 4, 5))
    return f"<details><summary>{title} ({len(rows)} rows)</summary>{inner}</details>"


def _counts(sets: Sequence[Mapping[str, Any]]) -> str:
    """Failed items, and answers that are no answers, on both sides; a column without any is left out."""
    if not sets:
        return ""
    kinds = {"n_empty": "empty answers", "n_truncated": "stopped by the limit", "n_unparsed": "not understood"}
    seen = {key: text for key, text in kinds.items() if any((side or {}).get(key) for each in sets for side in (each["base"], each["candidate"]))}
    rows = []
    for each in sets:
        both = [" / ".join("-" if side is None else str(side.get(key, 0)) for side in (each["base"], each["candidate"])) for key in seen]
        rows.append([shown(each["name"]), f"{each['items']:,}", f"{each['compared']:,}", f"{len(each['failures']):,}", *both])
    heads = ["set", "items", "compared", "failed", *(f"{text}, base / candidate" for text in seen.values())]
    return table(heads, rows, numbers=range(1, len(heads)))


def _damage(result: Mapping[str, Any]) -> str:
    """Whatever was measured besides the scores, the stage to blame first; what has no value is left out."""
    measured = dict(result.get("damage") or {})
    blame = measured.pop("blame", None) or result.get("blame")
    told = ""
    if isinstance(blame, Mapping) and blame.get("stage"):
        told, blame = f"<p><b>Blame: {shown(str(blame['stage']))}</b> {shown(str(blame.get('detail') or ''))}</p>", None
    blocks = plain_tables(blame or [], "blame") + plain_tables(measured, "next tokens and features")
    blocks += plain_tables(result.get("noise") or {}, "the base against itself")
    return f'<h2>Damage</h2>\n{told}<div class="columns">{"".join(blocks)}</div>' if told or blocks else ""


def _gallery(cases: Sequence[Case], pictures: Pictures, *, is_compared: bool) -> str:
    if not cases and not is_compared:
        return "<h2>Pictures answered wrongly</h2>\n<p>None: every answer that was scored is right.</p>"
    if not cases:
        return "<h2>Pictures that got worse</h2>\n<p>None: every answer that was compared is the same.</p>"
    told = most_telling(cases, MOST_CASES)
    counts = {kind: sum(case.kind == kind for case in cases) for kind in KINDS}
    words = ", ".join(f"{counts[kind]:,} {KINDS[kind]}" for kind in KINDS if counts[kind])
    rest = f" The {len(told)} most telling of them are here, all are in items.jsonl." if len(told) < len(cases) else ""
    gallery = Gallery(pictures)
    title = "Pictures answered wrongly" if counts["wrong"] and not counts["worse"] else "Pictures that got worse"
    cards = [gallery.card(case) for case in told]
    return "\n".join([f"<h2>{title}</h2>", f"<p>{words}.{rest}</p>", filters(told), *cards])


def _failures(result: Mapping[str, Any]) -> str:
    failed = [(each["name"], item["id"], item["reason"]) for each in result.get("sets", ()) for item in each["failures"]]
    if not failed:
        return ""
    rows = [[shown(cell) for cell in row] for row in failed[:MOST_FAILURES]]
    rest = f"<p>{MOST_FAILURES} of {len(failed):,} are shown; report.json has all.</p>" if len(failed) > MOST_FAILURES else ""
    return f"<h2>Failed items of {shown(result['candidate'])}</h2>\n{rest}{table(('set', 'item', 'reason'), rows)}"


def _conditions(document: Mapping[str, Any]) -> str:
    warnings = "".join(f"<li>{shown(text)}</li>" for text in document.get("warnings", ()))
    said = f"<ul>{warnings}</ul>" if warnings else ""
    text = json.dumps(finite(document.get("fingerprint", {})), indent=2, ensure_ascii=False)
    return f"<h2>Conditions</h2>\n{said}<details><summary>Data, prompts, engines and versions</summary><pre>{shown(text)}</pre></details>"


def _word(verdict: str) -> str:
    return f'<span class="word word-{verdict}">{VERDICTS[verdict][0]}</span>'


@cache
def _part(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode("ascii")
