"""What the conformance checks share. Needs Pillow only: it runs in every engine's own environment, without qvlopt.

A check compares an artifact with its twin: the same integers written out as 16-bit weights (`format: bf16`), which an
engine loads without any quantised code.
"""

from __future__ import annotations

import argparse
import json
import struct
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from PIL import Image

PACKED = (".qweight", ".weight_packed")
"""Suffixes of the integers of a linear in AutoAWQ's and in compressed-tensors' layout."""
GRIDS = ((6, 10), (4, 4), (10, 2))
"""Rows and columns of patches of the pictures that the towers are compared on."""


class Question(NamedTuple):
    """A row of a set: its id, its picture in RGB, and what is asked about it."""

    id: str
    picture: Image.Image
    text: str


def read_arguments(description: str, positional: Sequence[str]) -> argparse.Namespace:
    """The command line of a check: `positional` folders, then the questions that are asked."""
    parser = argparse.ArgumentParser(description=description)
    for name in positional:
        parser.add_argument(name)
    parser.add_argument("--questions", required=True, help="folder with manifest.jsonl, such as calib/nano-eval")
    parser.add_argument("--limit", type=int, default=12, help="how many of them, spread over the set")
    parser.add_argument("--max-new-tokens", type=int, default=16)
    parser.add_argument("--answers", help="answers.json of answer.py: how many of the engine's answers are ours is told too")
    return parser.parse_args()


def read_questions(folder: str, limit: int) -> list[Question]:
    """`limit` rows at equal distances, so that every task of a sorted set has its share."""
    lines = Path(folder, "manifest.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(lines[index * len(lines) // limit]) for index in range(min(limit, len(lines)))]
    return [Question(row["id"], Image.open(Path(folder, row["images"][0])).convert("RGB"), row["question"]) for row in rows]


def messages(question: Question, *, kind: str = "image") -> list[dict[str, Any]]:
    """The question as a chat; `kind` is what the engine calls a picture in memory."""
    return [{"role": "user", "content": [{"type": kind, kind: question.picture}, {"type": "text", "text": question.text}]}]


def packed_linears(folder: str) -> set[str]:
    """Names of the linears that the folder stores as integers, from the headers of its safetensors files."""
    names: set[str] = set()
    for path in Path(folder).glob("*.safetensors"):
        with path.open("rb") as file:
            names |= json.loads(file.read(struct.unpack("<Q", file.read(8))[0])).keys()
    return {name.removesuffix(suffix) for name in names for suffix in PACKED if name.endswith(suffix)}


def relative_error(found: Any, expected: Any) -> float:
    """Norm of the difference of two tensors over the norm of `expected`."""
    return float((found.float() - expected.float()).norm() / expected.float().norm())


def compared_answers(found: Mapping[str, list[int]], answers: str | None) -> dict[str, Any]:
    """How many of the engine's token ids by question are those of our own engine, and which are not."""
    if answers is None:
        return {}
    ours = json.loads(Path(answers).read_text(encoding="utf-8"))["token_ids"]
    other = [name for name, ids in found.items() if ids != ours[name]]
    return {"as_ours": len(found) - len(other), "not_as_ours": other}


def finish(result: Mapping[str, Any], *, passed: bool, packages: Sequence[str]) -> NoReturn:
    """Prints the result as the last line, one JSON object, and ends with 0 when all holds, else 1."""
    print(json.dumps({**result, "passed": passed, "versions": {name: version(name) for name in packages}}))
    sys.exit(0 if passed else 1)
