"""What docs/answering.md shows runs as it stands there."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.tiny import build_tiny
from tests.tiny_onnx import build_onnx

PAGE = (Path(__file__).parents[1] / "docs" / "answering.md").read_text(encoding="utf-8")


def test_the_example_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    build_onnx(build_tiny(tmp_path / "model", seed=3), tmp_path / "out" / "int8")
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 96, 3), dtype=np.uint8)).save(tmp_path / "receipt.png")
    monkeypatch.chdir(tmp_path)
    exec(compile(example, "answering.md", "exec"), {"__name__": "answering"})
    said = capsys.readouterr().out
    assert len(re.findall(r" (?:eos|length) None$", said, re.MULTILINE)) == 2
    assert len(list((tmp_path / "features").glob("*.safetensors"))) == 1, "one picture, however many questions"
