"""The scripts of tools/conformance as far as they run without another engine."""

from __future__ import annotations

import importlib.util
import json
import subprocess
from pathlib import Path
from types import ModuleType

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

TOOLS = Path(__file__).parents[2] / "tools" / "conformance"


@pytest.fixture(scope="module")
def checking() -> ModuleType:
    spec = importlib.util.spec_from_file_location("checking", TOOLS / "checking.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_packed_linears_are_those_stored_as_integers(checking: ModuleType, tmp_path: Path) -> None:
    first = {name: torch.zeros(1) for name in ("a.b.qweight", "a.b.qzeros", "a.c.weight")}
    second = {name: torch.zeros(1) for name in ("a.d.weight_packed", "a.d.weight_shape")}
    save_file(first, tmp_path / "model-00001-of-00002.safetensors")
    save_file(second, tmp_path / "model-00002-of-00002.safetensors")
    assert checking.packed_linears(str(tmp_path)) == {"a.b", "a.d"}


def test_questions_are_spread_over_the_set(checking: ModuleType, tmp_path: Path) -> None:
    Image.new("L", (4, 4)).save(tmp_path / "p.png")
    rows = [{"id": str(number), "images": ["p.png"], "question": "?"} for number in range(9)]
    (tmp_path / "manifest.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    questions = checking.read_questions(str(tmp_path), 3)
    assert [question.id for question in questions] == ["0", "3", "6"]
    assert questions[0].picture.mode == "RGB"
    assert len(checking.read_questions(str(tmp_path), 99)) == 9


@pytest.mark.parametrize(("passed", "status"), [(True, 0), (False, 1)])
def test_a_check_ends_with_one_json_line_and_its_status(passed: bool, status: int, checking: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        checking.finish({"artifact": "a"}, passed=passed, packages=["torch"])
    assert ended.value.code == status
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["passed"] is passed


def test_an_unknown_environment_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    done = subprocess.run(["bash", TOOLS / "make_envs.sh", tmp_path / "envs", "vllm", "vlm"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "'vlm'" in done.stderr
    assert not (tmp_path / "envs").exists()
