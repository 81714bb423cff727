"""Writes the artifacts that the checks load: each case in each format, and its twin. Run in qvlopt's environment.

    make_artifacts.py FOLDER [--model builtin:nano] [--case vision]...

FOLDER/CASE/FORMAT for every case and format; `bf16` is the twin.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, NamedTuple

from qvlopt import api

FORMATS = ("awq", "compressed-tensors")
SINGLE = ("blocks.0.attn.qkv", "blocks.1.attn.proj", "blocks.1.mlp.linear_fc2", "deepstack_merger_list.1.*", "merger.linear_fc2")


class Case(NamedTuple):
    """Settings of `quantize_awq`, and the formats that have them."""

    settings: dict[str, Any]
    formats: tuple[str, ...] = FORMATS


CASES = {
    "vision": Case({}),
    "blocks": Case({"scope": "vision.blocks"}),
    "kept": Case({"keep": ["lm_head", *SINGLE]}),
    "float16": Case({"dtype": "float16"}),
    "groups": Case({"group_size": 64}),
    "symmetric": Case({"zero_point": False}, ("compressed-tensors",)),
    "eight": Case({"bits": 8}, ("compressed-tensors",)),
    "language": Case({"scope": "vision+language"}),
    "language-kept": Case({"scope": "vision+language", "keep": ["lm_head", "layers.0.self_attn.*", "layers.1.mlp.down_proj"]}),
    "compensated": Case({"search": {"compensate": True}}),
}
"""Every linear of the tower; not the mergers; single linears kept, of one merger both and of another one; other floats, groups,
zero points and bits; the decoder layers as well, some of their linears kept; error-compensated rounding."""
TWIN = "bf16"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", default="builtin:nano")
    parser.add_argument("--case", choices=CASES, action="append")
    asked = parser.parse_args()
    for case in asked.case or CASES:
        for form in (*CASES[case].formats, TWIN):
            print(make_artifact(asked.folder / case / form, model=asked.model, case=case, form=form))


def make_artifact(output: Path, *, model: str, case: str, form: str) -> Path:
    """Quantises `model` as the case says, with few calibration pictures: the numbers matter less than how they are stored."""
    settings = {**CASES[case].settings, "format": form}
    calibration = ["calibrate.data=builtin:nano", "calibrate.split=null", "calibrate.samples=16"]
    api.quantize_awq("demo", model=model, output=output, threads=1, settings=calibration, quantize_awq=settings)
    return output


if __name__ == "__main__":
    main()
