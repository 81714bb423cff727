"""The page holds everything that a person needs, needs nothing from outside, and obeys no text."""

from __future__ import annotations

import base64
import hashlib
import io
import re
from collections.abc import Iterable
from html.parser import HTMLParser
from typing import Any

import pytest
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from qvlopt.errors import ItemError
from qvlopt.report import html as module
from qvlopt.report import html_cases
from qvlopt.report.html import html_page
from qvlopt.report.picture import MOST_SIDE, embed
from tests.evaluations import HOSTILE, evaluation, informing, metric, pictures, result, row


class Page(HTMLParser):
    """Elements with their attributes, and all text between them."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(source)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


def page(document: dict[str, Any], rows: Iterable[dict[str, Any]] = (), shown: Any = pictures) -> str:
    return html_page(document, rows, shown)


FAILING = evaluation(result(metric(verdict="fail"), informing(), verdict="fail"), verdict="fail", exit_code=1)


def test_the_verdict_stands_first() -> None:
    text = Page(page(FAILING)).text
    assert text.index("Fail") < text.index("Scores") < text.index("Pictures that got worse")
    assert "exit status 1" in text
    assert "dropped by more than 2.00 points" in text


@pytest.mark.parametrize("verdict", ["pass", "fail", "inconclusive", "not_comparable", "error"])
def test_every_verdict_has_words(verdict: str) -> None:
    source = page(evaluation(result(metric(verdict=verdict), verdict=verdict), verdict=verdict))
    assert f'<section class="verdict {verdict}">' in source


def test_an_inconclusive_result_that_passes_by_the_recipe_says_so() -> None:
    document = evaluation(result(metric(verdict="inconclusive"), verdict="inconclusive"), verdict="inconclusive", exit_code=0)
    assert "lets an inconclusive result pass" in page(document)


def test_scores_have_an_interval_that_is_drawn_to_scale() -> None:
    source = page(FAILING)
    bar = next(attributes for tag, attributes in Page(source).elements if tag == "line" and (attributes["class"] or "").startswith("bar"))
    zero = next(attributes for tag, attributes in Page(source).elements if tag == "line" and attributes["class"] == "zero")
    margin = next(attributes for tag, attributes in Page(source).elements if tag == "line" and attributes["class"] == "margin")
    low, high, none, limit = (float(each[key] or "nan") for each, key in ((bar, "x1"), (bar, "x2"), (zero, "x1"), (margin, "x1")))
    assert limit < low < none < high
    assert (none - low) / (none - limit) == pytest.approx(0.0181 / 0.02, abs=0.02)
    assert "[-1.81, +0.79]" in source


def test_what_got_worse_is_shown_with_both_answers_and_the_difference_marked() -> None:
    source = page(FAILING, [row("sign-1", "A 17", "A 11")])
    card = source[source.index("<article") : source.index("</article>")]
    assert "A 1<del>7</del></bdi>" in card
    assert "A 1<ins>1</ins></bdi>" in card
    assert "What does the sign say?" in card
    assert "100.00 → 0.00 %" in card
    assert "data:image/png;base64," in card


def test_the_worst_stand_first_and_the_rest_can_be_filtered() -> None:
    rows = [row("same", "A 17", "A 17"), row("better", "x", "A 17"), row("words", "x", "y", set="vqa", task="vqa"), row("worse", "A 17", "x")]
    document = evaluation(result(metric(verdict="fail"), metric("vqa"), verdict="fail"), verdict="fail", exit_code=1)
    found = Page(page(document, rows))
    assert [each["data-kind"] for each in found.all("article")] == ["worse", "changed", "better"]
    assert {each["name"] for each in found.all("select")} == {"kind", "set"}
    assert [each["value"] for each in found.all("option") if "selected" in each] == ["worse"]
    assert "1 got worse, 1 other words, same score, 1 got better." in found.text


def test_without_a_base_wrong_answers_are_shown() -> None:
    alone = result(metric(base=None, delta=None, ci_low=None, ci_high=None, lost=None, gained=None), baseline=None)
    source = page(evaluation(alone), [row("a", None, "A 17"), row("b", None, "wrong")])
    assert len(Page(source).all("article")) == 1
    assert "Pictures answered wrongly" in source
    assert "Scored only" in source


def test_without_a_base_and_without_a_wrong_answer_nothing_is_said_to_be_the_same() -> None:
    alone = result(metric(base=None, delta=None, ci_low=None, ci_high=None, lost=None, gained=None), baseline=None)
    text = Page(page(evaluation(alone), [row("a", None, "A 17")])).text
    assert "None: every answer that was scored is right." in text
    assert "is the same" not in text


def test_scores_by_kind_are_there_where_a_set_has_kinds() -> None:
    kinds = [{"name": "chart", "metric": "relaxed_accuracy", "kind": "<human>", "n": 1250, "base": 0.8, "candidate": 0.7, "delta": -0.1}]
    text = Page(page(evaluation(result(metric(), by_stratum=kinds)))).text
    assert all(word in text for word in ("By kind of item (1 rows)", "<human>", "1,250", "80.00", "-10.00"))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"ci_high": 0.001, "n_needed": 5000}, "cannot rule out a drop of more than 2.00 points"),
        ({"ci_high": 0.001, "n_needed": 5000}, "about 5,000 items would be needed (80 % power)"),
        ({"ci_high": 0.001, "n_needed": 100}, "what was seen is close to the margin, more items may not decide"),
        ({"ci_low": -0.08, "ci_high": -0.03, "p_drop_holm": 0.071}, "chance may do that (p = 0.071 after Holm's correction)"),
    ],
)
def test_why_it_is_inconclusive_is_said(changes: dict[str, Any], words: str) -> None:
    source = page(evaluation(result(metric(verdict="inconclusive", margin=0.02, n=1000, **changes), verdict="inconclusive"), verdict="inconclusive"))
    assert words in Page(source).text


def test_equal_answers_leave_no_gallery() -> None:
    assert "None: every answer that was compared is the same." in page(evaluation(result(metric())), [row("a", "A 17", "A 17")])


def test_damage_and_blame_are_shown_whatever_their_keys() -> None:
    layers = [{"name": "model.visual.blocks.1.attn.qkv", "sqnr_db": 18.23456}]
    document = evaluation(result(metric(), damage={"kl_mean": 0.0123, "top1_agreement": None, "layers": layers}, blame=[{"stage": "merger"}]))
    text = Page(page(document)).text
    assert all(word in text for word in ("Damage", "kl mean", "0.0123", "model.visual.blocks.1.attn.qkv", "18.235", "merger"))
    assert "top1" not in text
    assert "Damage" not in Page(page(evaluation(result(metric())))).text


def test_the_stage_to_blame_stands_before_the_figures() -> None:
    blame = {"stage": "tower block 2", "share": 0.7, "detail": "KL 0.1 nats <alone>"}
    source = page(evaluation(result(metric(), damage={"kl_mean": 0.5, "blame": blame, "notes": ["no <logits>"]}, noise={"flips": 3})))
    assert "<b>Blame: tower block 2</b> KL 0.1 nats &lt;alone&gt;" in source
    assert source.index("Blame: tower") < source.index("kl mean") < source.index("no &lt;logits&gt;") < source.index("the base against itself")


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_text_adds_no_element_and_no_attribute(text: str) -> None:
    def hostile(word: str) -> str:
        broken = result(metric(metric=word, verdict="fail"), verdict="fail", candidate=word, reasons=[word], blame=[{"stage": word, word: 1}])
        broken["sets"][0]["failures"] = [{"id": word, "reason": word}]
        broken["by_size"][0]["size"] = word
        rows = [row(f"x{word}", "A 17", f"{word}1", candidate=word, question=word, answers=["A 17"])]
        rows[0]["candidate_answer"]["scores"] = {word: 0.0}
        rows[0]["base_answer"]["scores"] = {word: 1.0}
        document = evaluation(broken, verdict="fail", exit_code=1, warnings=[word], fingerprint={"gate": {"on_inconclusive": "fail"}, word: word})
        return page(document, rows)

    plain, source = Page(hostile("plain")), Page(hostile(text))
    outline = [(tag, sorted(attributes)) for tag, attributes in plain.elements if tag not in ("del", "ins")]
    assert [(tag, sorted(attributes)) for tag, attributes in source.elements if tag not in ("del", "ins")] == outline
    raw = hostile(text)
    assert "\u202e" not in raw
    assert "\x1b" not in raw
    raw.encode("utf-8")


def test_the_policy_allows_this_pages_style_and_script_and_nothing_else() -> None:
    source = page(FAILING, [row("a", "A 17", "x")])
    found = Page(source)
    policy = next(each["content"] for each in found.all("meta") if each.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules["default-src"] == "'none'"
    assert rules["img-src"] == "data:"
    for tag, rule in (("style", "style-src"), ("script", "script-src")):
        (inside,) = re.findall(f"<{tag}>(.*?)</{tag}>", source, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()
        assert rules[rule] == f"'sha256-{digest}'"
    assert not any("style" in attributes or any(name.startswith("on") for name in attributes) for _, attributes in found.elements)


def test_nothing_is_asked_from_a_network() -> None:
    source = page(FAILING, [row("a", "A 17", "x")])
    for tag, attributes in Page(source).elements:
        for name in ("src", "href", "action", "srcset", "data"):
            assert attributes.get(name) is None or (attributes[name] or "").startswith("data:image/"), (tag, attributes)
    assert "http://" not in source
    assert "https://" not in source
    assert "@import" not in source
    assert "url(" not in source


def test_a_picture_that_cannot_be_read_is_said_in_its_place() -> None:
    def broken(_set: str, _id: str) -> Iterable[Image.Image]:
        raise ItemError("0.png: <b>is empty</b>")

    source = page(FAILING, [row("a", "A 17", "x")], broken)
    assert "0.png: &lt;b&gt;is empty" in source


def test_pages_have_a_limit_of_cards_and_of_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_CASES", 6)
    monkeypatch.setattr(html_cases, "PICTURE_BYTES", 1000)
    rows = [row(f"{name}{i}", "A 17", "x", set=name, task=name) for name in ("ocr", "vqa") for i in range(8)]
    document = evaluation(result(metric(verdict="fail"), metric("vqa"), verdict="fail"), verdict="fail", exit_code=1)
    found = Page(page(document, rows))
    assert [each["data-set"] for each in found.all("article")] == ["ocr"] * 3 + ["vqa"] * 3, "a set must not hide another"
    assert "The 6 most telling of them are here" in found.text
    assert sum(len(each["src"] or "") for each in found.all("img")) <= 1000
    assert "the page has no room for more pictures" in found.text


def test_pictures_that_are_shown_again_take_room_again(monkeypatch: pytest.MonkeyPatch) -> None:
    url = next(each["src"] for each in Page(page(FAILING, [row("sign-1", "A 17", "x")])).all("img")) or ""
    monkeypatch.setattr(html_cases, "PICTURE_BYTES", len(url) + 50)
    two = [{**row("sign-1", "A 17", "x"), "candidate": name} for name in ("a", "b")]
    results = [{**result(metric(verdict="fail"), verdict="fail"), "candidate": name} for name in ("a", "b")]
    found = Page(page(evaluation(*results, verdict="fail", exit_code=1), two))
    assert (len(found.all("article")), len(found.all("img"))) == (2, 1)
    assert "the page has no room for more pictures" in found.text


def test_many_sizes_become_ranges() -> None:
    rows = [row(f"a{i}", "A 17", "x", size=[[32 * (i + 1), 32]]) for i in range(20)]
    found = Page(page(FAILING, rows))
    sizes = {each["data-size"] for each in found.all("article")}
    assert sizes == {"up to 6,144 pixels", "up to 11,264 pixels", "up to 16,384 pixels", "up to 20,480 pixels"}


def test_pictures_lose_their_metadata_and_are_capped() -> None:
    secret = PngInfo()
    secret.add_text("Comment", "taken at home")
    stream = io.BytesIO()
    image = Image.effect_noise((1600, 900), 90).convert("RGB")
    exif = Image.Exif()
    exif[271] = "Secret Camera"
    image.save(stream, "PNG", pnginfo=secret, exif=exif, icc_profile=b"profile")
    shown = embed(Image.open(io.BytesIO(stream.getvalue())))
    data = base64.b64decode(shown.url.partition(",")[2])
    again = Image.open(io.BytesIO(data))
    assert max(again.size) == MOST_SIDE == max(shown.size)
    assert shown.is_reduced
    assert not again.getexif()
    assert not {"Comment", "icc_profile", "exif", "comment"} & set(again.info)
    assert b"home" not in data
    assert b"Secret" not in data


def test_small_pictures_stay_without_loss() -> None:
    image = Image.effect_noise((64, 48), 90).convert("RGB")
    again = Image.open(io.BytesIO(base64.b64decode(embed(image).url.partition(",")[2])))
    assert again.format == "PNG"
    assert again.tobytes() == image.tobytes()
