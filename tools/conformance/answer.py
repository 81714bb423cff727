"""Our own engine's greedy answers, for the checks' `--answers`. Run in qvlopt's environment.

    answer.py CHECKPOINT ANSWERS.json --questions calib/nano-eval [--dtype float32]

The questions are those that a check with the same `--questions` and `--limit` asks.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from checking import read_questions

from qvlopt.data.samples import read_samples
from qvlopt.model.source import open_source
from qvlopt.runtime.torch_engine import TorchEngine


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint")
    parser.add_argument("answers", type=Path)
    parser.add_argument("--questions", required=True)
    parser.add_argument("--limit", type=int, default=12)
    parser.add_argument("--max-new-tokens", type=int, default=16)
    parser.add_argument("--dtype", default="float32")
    asked = parser.parse_args()
    wanted = {question.id for question in read_questions(asked.questions, asked.limit)}
    samples = [sample for sample in read_samples(Path(asked.questions)).samples if sample.id in wanted]
    engine = TorchEngine.open(open_source(asked.checkpoint, folder=Path.cwd()), dtype=getattr(torch, asked.dtype), device="cpu")
    answers = engine.generate([engine.prepare(sample) for sample in samples], max_new_tokens=asked.max_new_tokens)
    right = sum(answer.text in sample.answers for answer, sample in zip(answers, samples, strict=True))
    document = {
        "checkpoint": asked.checkpoint,
        "dtype": asked.dtype,
        "right": right,
        "token_ids": {answer.id: answer.token_ids for answer in answers},
        "texts": {answer.id: answer.text for answer in answers},
    }
    asked.answers.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"{len(answers)} answers, {right} right: {asked.answers}")


if __name__ == "__main__":
    main()
