"""Which of the given options an answer states, or None: a choice is read, never guessed.

A letter counts where it stands as an answer (alone, in front of an option, behind "the answer is", in brackets), never
because a word begins with it. Of several statements the last one counts; letters that contradict each other without
one do not.
"""

from __future__ import annotations

import re
import string
from collections.abc import Mapping, Sequence

from qvlopt.scoring.text import normalised

LETTERS = string.ascii_uppercase
YES_NO = ("yes", "no")
UNLISTED = 10
"""Letters that are taken for options (A to J) where the options are not known."""

STATED = (
    r"(?:(?:answer|option|choice)s?\s*(?:(?:is|are|would\s+be|should\s+be|must\s+be)\b\s*:?|[:=])"
    r"|I\s+(?:choose|pick|select)\b)\s*(?:(?:option|choice)\s+)?"
)
"""What comes before a stated choice: `the answer is`, `Answer:`, `I choose option`."""

END = r"(?=\s*(?:$|[\n).,:;!?\]}\"']))"
NEGATED = r"(?:\bnot|n't|\bneither|\bnor|\bexcept|\bexcluding)\s+(?:the\s+)?(?:answer\s+|option\s+|choice\s+)?$"
DENIED = r"(?!\s*(?:(?:is|are|was)\s+(?:not\b|wrong|incorrect|false)|isn't\b))"
FOLLOWS_YES_NO = r"(?=\s*(?:$|[\n.,:;!?)\-\u2013\u2014])|\s+(?:there|it|he|she|they|this|that|these|those|the|we|you|i|because|both)\b)"
"""What may stand behind a `yes` or `no` at the start of an answer; `no` before a noun is no answer."""


def choice_accuracy(prediction: str, golds: Sequence[str], *, question: str = "", choices: Sequence[str] = ()) -> float | None:
    """1.0 when the stated option is one of the golds, 0.0 when another one is, None when none is stated.

    Golds are letters, the texts of options, or yes and no. `choices` are the options' texts in the order of their
    letters; left out, they are read from lines such as `A. cat` in the question.
    """
    plain = {_plain(gold) for gold in golds}
    if plain <= set(YES_NO):
        said = stated_yes_no(prediction)
        return None if said is None else float(said in plain)
    options = _options(question, choices)
    letter = stated_letter(prediction, options)
    return None if letter is None else float(letter in {_gold_letter(gold, options) for gold in golds})


def is_readable(gold: str, *, question: str = "", choices: Sequence[str] = ()) -> bool:
    """Whether a gold is yes, no, or one of the options by its letter or text, so that some answer can be right."""
    return _plain(gold) in YES_NO or _gold_letter(gold, _options(question, choices)) is not None


def stated_letter(prediction: str, options: Mapping[str, str]) -> str | None:
    """The letter of the option that the answer states. `options`: letter to text, which is empty where it is not known."""
    text = _without_markup(prediction)
    valid = "".join(options)
    if not valid:
        return None
    if match := re.fullmatch(rf"(?:(?i:option|choice)\s+)?[(\[]?([{valid}{valid.lower()}])[)\]]?[.:]?", text):
        return match[1].upper()
    if whole := _by_text(text, options):
        return whole
    readings = (_called_right, _leading, _last_line, _only_bracketed)
    return _last_stated(text, options) or next((letter for read in readings if (letter := read(text, valid))), None)


def stated_yes_no(prediction: str) -> str | None:
    """`yes` or `no` where the answer states it: at its start, behind "the answer is", or as its last line."""
    text = _without_markup(prediction)
    stated = re.findall(rf"\b(?i:{STATED})[\"'(]*(?i:(yes|no))\b{END}", text)
    if stated:
        return str(stated[-1]).lower()
    if match := re.match(rf"[\"'(]*(yes|no)\b{FOLLOWS_YES_NO}", text, re.IGNORECASE):
        return match[1].lower()
    last = text.rpartition("\n")[2].strip(" .!\"'()").lower()
    return last if last in YES_NO else None


def _options(question: str, choices: Sequence[str]) -> dict[str, str]:
    """Letter to text: the given options, those that the question lists from A on, or the first letters without texts."""
    if choices:
        return dict(zip(LETTERS, choices, strict=False))
    listed: dict[str, str] = {}
    for letter, text in re.findall(r"^[ \t]*[(\[]?([A-Z])[)\].:][ \t]*(\S.*)$", question, re.MULTILINE):
        if letter == LETTERS[len(listed)]:
            listed[letter] = text.strip()
    return listed if len(listed) > 1 else dict.fromkeys(LETTERS[:UNLISTED], "")


def _gold_letter(gold: str, options: Mapping[str, str]) -> str | None:
    text = normalised(gold)
    bare = text.strip("()[]. ").upper()
    return bare if bare in options else _by_text(text, options)


def _by_text(text: str, options: Mapping[str, str]) -> str | None:
    """The one option whose whole text this is, whatever its case and its full stop."""
    plain = _plain(text)
    found = [letter for letter, option in options.items() if plain and _plain(option) == plain]
    return found[0] if len(found) == 1 else None


def _plain(text: str) -> str:
    return " ".join(normalised(text).casefold().rstrip(".").split())


def _last_stated(text: str, options: Mapping[str, str]) -> str | None:
    """The last letter or option text behind words like "the answer is". A bare `A` before a word is an article."""
    valid = "".join(options)
    found: str | None = None
    for match in re.finditer(rf"\b(?i:{STATED})", text):
        rest = text[match.end() :].lstrip(" \t\n\"'")
        letter = re.match(rf"(?:[(\[]([{valid}])[)\]]|([{valid}])(?:{END}|(?<![AI])\s))", rest)
        sentence = re.split(r"\.(?:\s|$)|[\n;]", rest, maxsplit=1)[0]
        found = (letter[1] or letter[2] if letter else _by_text(sentence, options)) or found
    return found


def _called_right(text: str, valid: str) -> str | None:
    """The last one of `B is correct`, `(B) is the right answer`."""
    found = re.findall(rf"(?<!\w)[(\[]?([{valid}])[)\]]?\s+is\s+(?:the\s+)?(?i:correct|right)\b", text)
    return str(found[-1]) if found else None


def _leading(text: str, valid: str) -> str | None:
    """`(B) cat`, `B. cat`, `B: cat` or `B) cat` at the start."""
    match = re.match(rf"(?:[(\[]([{valid}])[)\]]|([{valid}])[).:](?=\s|$)){DENIED}", text)
    letter = (match[1] or match[2]) if match else None
    return letter if _bracketed(text, valid) <= {letter} else None


def _last_line(text: str, valid: str) -> str | None:
    match = re.fullmatch(rf"[(\[]?([{valid}])[)\]]?[.:]?", text.rpartition("\n")[2].strip())
    return match[1] if match else None


def _only_bracketed(text: str, valid: str) -> str | None:
    """The one letter that stands in brackets anywhere, denied ones apart."""
    found = _bracketed(text, valid)
    return found.pop() if len(found) == 1 else None


def _bracketed(text: str, valid: str) -> set[str]:
    matches = re.finditer(rf"[(\[]([{valid}])[)\]]{DENIED}", text)
    return {match[1] for match in matches if not re.search(NEGATED, text[: match.start()], re.IGNORECASE)}


def _without_markup(text: str) -> str:
    r"""Without Markdown's asterisks, dollars and the wrappers \boxed{} and \text{}."""
    plain = re.sub(r"\\(?:boxed|text|mathrm)\s*\{([^{}]*)\}", r"\1", re.sub(r"[*$`]", "", normalised(text)))
    return re.sub(r"\\boxed\s*\{([^{}]*)\}", r"\1", plain).strip()
