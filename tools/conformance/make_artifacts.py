"""Writes the artifacts that the checks load: each case in each format, and its twin. Run in qvlopt's environment.

    make_artifacts.py FOLDER [--model builtin:nano] [--case vision]...

FOLDER/CASE/FORMAT for every case and format; `bf16` is the twin.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from qvlopt import api

INTEGERS = ("awq", "compressed-tensors")
SINGLE = ("blocks.0.attn.qkv", "blocks.1.attn.proj", "blocks.1.mlp.linear_fc2", "deepstack_merger_list.1.*", "merger.linear_fc2")
CASES: dict[str, dict[str, Any]] = {
    "vision": {},
    "blocks": {"scope": "vision.blocks"},
    "kept": {"keep": ["lm_head", *SINGLE]},
    "float16": {"dtype": "float16"},
}
"""Settings of `quantize_awq`: every linear of the tower; mergers kept; single linears kept, one merger whole and one half; other floats."""
TWIN = "bf16"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", default="builtin:nano")
    parser.add_argument("--case", choices=CASES, action="append")
    asked = parser.parse_args()
    for case in asked.case or CASES:
        for form in (*INTEGERS, TWIN):
            print(make_artifact(asked.folder / case / form, model=asked.model, case=case, form=form))


def make_artifact(output: Path, *, model: str, case: str, form: str) -> Path:
    """Quantises `model` as the case says, with few calibration pictures: the numbers matter less than how they are stored."""
    settings = {**CASES[case], "format": form}
    calibration = ["calibrate.data=builtin:nano", "calibrate.split=null", "calibrate.samples=16"]
    api.quantize_awq("demo", model=model, output=output, threads=1, settings=calibration, quantize_awq=settings)
    return output


if __name__ == "__main__":
    main()
