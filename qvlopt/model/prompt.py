"""A question and its pictures become token ids through the checkpoint's own chat template and tokenizer.

The template is rendered with placeholders where the user's text will stand, and only what the template itself wrote is
searched for special tokens. The user's text goes through a tokenizer that knows none, so nothing in a question ever
acts: not `<|im_end|>`, not `<|image_pad|>`, not `<think>`. Pieces of text that touch are encoded as one, as the
checkpoint's processor does, so that ordinary questions get exactly its ids.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
import jinja2.ext
import jinja2.sandbox
from tokenizers import Tokenizer

from qvlopt.errors import ItemError, RunError
from qvlopt.model.positions import Grid, merged_tokens
from qvlopt.model.settings import RESTORE

PICTURE_MARK = "<image>"
"""Where a question wants its pictures; without it they come before the text."""
ENCODED_TEXTS = 4096
"""How many distinct pieces of text keep their ids; sets ask the same questions again and again."""


class _Slot(NamedTuple):
    """Where the user's text piece of that number stands."""

    number: int


_Part = str | int | _Slot
"""The template's plain text, one of its special tokens, or a place for the user's text."""


@dataclass(frozen=True)
class Prompter:
    """Encodes questions and decodes answers of one checkpoint."""

    tokenizer: Tokenizer
    template: str
    template_names: Mapping[str, str]
    image_token_id: int
    merge: int
    max_tokens: int
    eos_ids: tuple[int, ...]
    _layouts: dict[tuple[bool, ...], tuple[_Part, ...]] = field(default_factory=dict, repr=False)

    @classmethod
    def from_folder(cls, folder: Path) -> Prompter:
        """Reads tokenizer.json, the chat template (three places are known) and the ids of config.json.

        Raises RunError naming the file that is missing or broken.
        """
        config = _read_json(folder / "config.json")
        tokenizer_config = _read_json(folder / "tokenizer_config.json", optional=True)
        tokenizer = _read_tokenizer(folder / "tokenizer.json")
        try:
            merge, max_tokens = config["vision_config"]["spatial_merge_size"], config["text_config"]["max_position_embeddings"]
            image_token_id = config["image_token_id"]
        except (KeyError, TypeError) as error:
            raise RunError(f"{folder / 'config.json'}: {error} is missing, expected the config of a Qwen3-VL checkpoint", hint=RESTORE) from error
        return cls(
            tokenizer=tokenizer,
            template=_read_template(folder, tokenizer_config),
            template_names={k: _content(v) for k, v in tokenizer_config.items() if k.endswith("_token") and _content(v)},
            image_token_id=image_token_id,
            merge=merge,
            max_tokens=max_tokens,
            eos_ids=_eos_ids(folder, config, tokenizer_config, tokenizer),
        )

    @functools.cached_property
    def vocabulary_size(self) -> int:
        """Number of ids that the tokenizer knows; an embedding table padded beyond it has rows that mean nothing."""
        return max(self.tokenizer.get_vocab(with_added_tokens=True).values()) + 1

    def encode(self, question: str, pictures: Sequence[Grid] = ()) -> list[int]:
        """Token ids of a prompt without system message, ready for the answer.

        `<image>` in the question marks the places of the pictures, one each; otherwise they come first. Raises ItemError
        when the marks do not fit the pictures, or when the prompt is longer than the model's positions.
        """
        kinds, texts = arrange(question, len(pictures))
        if kinds not in self._layouts:
            self._layouts[kinds] = self._layout(kinds)
        ids: list[int] = []
        plain, picture = "", 0
        for part in self._layouts[kinds]:
            if isinstance(part, str):
                plain += part
            elif isinstance(part, _Slot):
                plain += texts[part.number]
            else:
                ids += self._encode_plain(plain)
                count, plain = 1, ""
                if part == self.image_token_id:
                    count = merged_tokens(pictures[picture], self.merge)
                    picture += 1
                ids += [part] * count
        ids += self._encode_plain(plain)
        if len(ids) > self.max_tokens:
            raise ItemError(f"the prompt needs {len(ids)} tokens, the model has {self.max_tokens} positions (max_position_embeddings)")
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of an answer's ids without special tokens, otherwise raw."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True))

    @functools.cached_property
    def _plain_tokenizer(self) -> Tokenizer:
        """The same model without any added token, special or not."""
        plain = Tokenizer(self.tokenizer.model)
        for step in ("normalizer", "pre_tokenizer"):
            if getattr(self.tokenizer, step) is not None:
                setattr(plain, step, getattr(self.tokenizer, step))
        return plain

    @functools.cached_property
    def _encode_plain(self) -> functools._lru_cache_wrapper[list[int]]:
        """Ids of text in which nothing is special; the lists are shared and not to be modified."""
        plain = self._plain_tokenizer
        return functools.lru_cache(maxsize=ENCODED_TEXTS)(lambda text: list(plain.encode(text, add_special_tokens=False).ids) if text else [])

    def _layout(self, kinds: tuple[bool, ...]) -> tuple[_Part, ...]:
        """The rendered template, taken apart, for content whose pieces are pictures (True) and texts (False)."""
        names = [f"QvloptSlot{number}Here" for number in range(kinds.count(False))]
        waiting = iter(names)
        content = [{"type": "image"} if kind else {"type": "text", "text": next(waiting)} for kind in kinds]
        rendered = _render(self.template, [{"role": "user", "content": content}], self.template_names)
        special = {token.content: number for number, token in self.tokenizer.get_added_tokens_decoder().items()}
        parts = _take_apart(rendered, names, special)
        slots = [part.number for part in parts if isinstance(part, _Slot)]
        if sorted(slots) != list(range(len(names))):
            raise RunError("the chat template does not show each text of a message once, as it is; expected a Qwen3-VL template", hint=RESTORE)
        if parts.count(self.image_token_id) != kinds.count(True):
            raise RunError(
                f"the chat template wrote {parts.count(self.image_token_id)} image tokens for {kinds.count(True)} pictures; "
                "expected <|image_pad|> once for each, as Qwen3-VL's template does"
            )
        return parts


def arrange(text: str, pictures: int) -> tuple[tuple[bool, ...], list[str]]:
    """Order of pictures (True) and texts (False) in a message, and its texts. Raises ItemError when the marks do not fit."""
    marks = text.count(PICTURE_MARK) if pictures else 0
    if not marks:
        return (True,) * pictures + ((False,) if text or not pictures else ()), [text]
    if marks != pictures:
        raise ItemError(f"the text marks {marks} places with {PICTURE_MARK}, the sample has {pictures} pictures")
    kinds: list[bool] = []
    texts: list[str] = []
    for number, piece in enumerate(text.split(PICTURE_MARK)):
        kinds += [True] if number else []
        if piece:
            kinds.append(False)
            texts.append(piece)
    return tuple(kinds), texts


def _take_apart(rendered: str, names: Sequence[str], special: Mapping[str, int]) -> tuple[_Part, ...]:
    """Splits at special tokens and at the placeholders `names`; longer tokens first, as one may begin another."""
    known: dict[str, _Part] = {**special, **{name: _Slot(number) for number, name in enumerate(names)}}
    pattern = "|".join(re.escape(token) for token in sorted(known, key=len, reverse=True) if token)
    pieces = re.split(f"({pattern})", rendered) if pattern else [rendered]
    return tuple(known.get(piece, piece) for piece in pieces if piece)


def _render(template: str, messages: list[dict[str, Any]], names: Mapping[str, str]) -> str:
    """Renders a chat template as transformers does, in the immutable sandbox; it has no clock and no files."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    try:
        return environment.from_string(template).render(messages=messages, add_generation_prompt=True, **names)
    except (jinja2.TemplateError, TypeError, ValueError, OverflowError, MemoryError) as error:
        raise RunError(f"the chat template cannot be rendered: {error}", hint=RESTORE) from error


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(value: object, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _read_json(path: Path, *, optional: bool = False) -> dict[str, Any]:
    if optional and not path.is_file():
        return {}
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise RunError(f"{path}: missing", hint="copy it from the original checkpoint") from error
    except ValueError as error:
        raise RunError(f"{path}: not valid JSON ({error})", hint=RESTORE) from error
    if not isinstance(data, dict):
        raise RunError(f"{path}: expected a JSON object", hint=RESTORE)
    return data


def _read_tokenizer(path: Path) -> Tokenizer:
    if not path.is_file():
        raise RunError(f"{path}: missing", hint="save the checkpoint's tokenizer with a fast tokenizer, which writes tokenizer.json")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the tokenizers library raises bare Exception for any broken file
        raise RunError(f"{path}: not a tokenizer ({error})", hint=RESTORE) from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _read_template(folder: Path, tokenizer_config: Mapping[str, Any]) -> str:
    """chat_template.jinja, else chat_template.json, else the tokenizer's config (also its list of named templates)."""
    if (folder / "chat_template.jinja").is_file():
        return (folder / "chat_template.jinja").read_text(encoding="utf-8")
    stored = _read_json(folder / "chat_template.json", optional=True).get("chat_template") or tokenizer_config.get("chat_template")
    if isinstance(stored, list):
        stored = {entry.get("name"): entry.get("template") for entry in stored if isinstance(entry, dict)}.get("default")
    if not isinstance(stored, str):
        raise RunError(
            f"{folder}: no chat template, expected chat_template.jinja, chat_template.json or chat_template in tokenizer_config.json",
            hint="copy chat_template.jinja from the original checkpoint",
        )
    return stored


def _content(token: object) -> str:
    """A token of tokenizer_config.json: text, or an object with `content`; empty when it is neither."""
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else ""


def _eos_ids(folder: Path, config: Mapping[str, Any], tokenizer_config: Mapping[str, Any], tokenizer: Tokenizer) -> tuple[int, ...]:
    """Every id that any of the checkpoint's files calls end of sequence; nothing else of generation_config is read."""
    generation = _read_json(folder / "generation_config.json", optional=True)
    named = [generation.get("eos_token_id"), config.get("eos_token_id"), config["text_config"].get("eos_token_id")]
    named.append(tokenizer.token_to_id(_content(tokenizer_config.get("eos_token"))))
    ids = [number for value in named for number in (value if isinstance(value, list) else [value])]
    return tuple(sorted({number for number in ids if isinstance(number, int) and not isinstance(number, bool)}))
