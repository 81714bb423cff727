"""Other engines load our artifacts as they were meant. Each runs in an environment of its own (docs/conformance.md).

A variable names the interpreter of each environment; without it the engine's tests are skipped.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.tiny import build_tiny

pytestmark = pytest.mark.conformance

ROOT = Path(__file__).parents[2]
TOOLS = ROOT / "tools" / "conformance"
QUESTIONS = ROOT / "calib" / "nano-eval"
LINEARS = {"vision": 14, "blocks": 8, "kept": 8, "float16": 14, "groups": 14, "symmetric": 14, "eight": 14, "compensated": 14}
LINEARS |= {"language": 28, "language-kept": 23}
"""How many linears of the tiny checkpoint (2 blocks of 4, 3 mergers of 2, 2 decoder layers of 7) each case of make_artifacts.py quantises."""
FUSED = {"language": 22, "language-kept": 19}
"""The same as vLLM counts them, which joins q, k, v and gate, up."""
CASES = ("vision", "blocks", "kept", "float16", "groups", "language", "language-kept", "compensated")
BOTH = [(case, form) for case in CASES for form in ("awq", "compressed-tensors")]
"""Cases in the formats that both engines load on a CPU."""
SYMMETRIC, EIGHT = ("symmetric", "compressed-tensors"), ("eight", "compressed-tensors")

Artifact = Callable[[str, str], Path]


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    """Gives the folder of a case in a format; a case is made in every format when first asked for."""
    folder = tmp_path_factory.mktemp("conformance")
    model = build_tiny(folder / "model")

    def find(case: str, form: str) -> Path:
        if not (folder / case).exists():
            run(sys.executable, "make_artifacts.py", folder, "--model", model, "--case", case, PYTHONPATH=str(ROOT))
        return folder / case / form

    return find


@pytest.mark.parametrize(("case", "form"), [*BOTH, SYMMETRIC, EIGHT])
def test_transformers_gives_the_twins_outputs(case: str, form: str, artifact: Artifact) -> None:
    result = check("hf-awq", "check_transformers.py", artifact, case=case, form=form)
    assert result["passed"], json.dumps(result, indent=1)
    assert result["quantised"] == LINEARS[case]


@pytest.mark.parametrize(("case", "form"), [*BOTH, SYMMETRIC])
def test_vllm_gives_the_twins_outputs(case: str, form: str, artifact: Artifact) -> None:
    result = check("vllm", "check_vllm.py", artifact, case=case, form=form)
    assert result["passed"], json.dumps(result, indent=1)
    assert result["quantised"] == (LINEARS | FUSED)[case]


@pytest.mark.parametrize(("case", "form"), [("vision", "awq"), SYMMETRIC])
def test_transformers_loads_with_no_option(case: str, form: str, artifact: Artifact) -> None:
    python = interpreter("hf-awq")
    run(python, "load_plainly.py", artifact(case, form))


def test_transformers_still_needs_an_option_for_zero_points_of_compressed_tensors(artifact: Artifact) -> None:
    """When this fails, transformers has learnt to load them: the artifacts' README can drop its hint."""
    python = interpreter("hf-awq")
    done = run(python, "load_plainly.py", artifact("vision", "compressed-tensors"), fails=True)
    assert "weight_zero_point" in done.stdout + done.stderr


def check(environment: str, script: str, artifact: Artifact, *, case: str, form: str) -> dict[str, Any]:
    """The JSON that a check prints last, whether or not all holds. Makes nothing where the engine is not installed."""
    python = interpreter(environment)
    done = run(python, script, artifact(case, form), artifact(case, "bf16"), "--questions", QUESTIONS, "--limit", "6", fails=None)
    try:
        return dict(json.loads(done.stdout.splitlines()[-1]))
    except (IndexError, ValueError):
        pytest.fail(f"{script} ended with {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")


def interpreter(environment: str) -> str:
    variable = "QVLOPT_CONFORMANCE_" + environment.upper().replace("-", "_")
    python = os.environ.get(variable)
    if not python:
        pytest.skip(f"{variable} names no interpreter; tools/conformance/make_envs.sh makes the environment {environment}")
    return python


def run(python: str, script: str, *arguments: object, fails: bool | None = False, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs a script of tools/conformance; `fails` says how it must end, None that either is right."""
    command = [python, str(TOOLS / script), *map(str, arguments)]
    done = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, check=False)
    assert fails is None or fails == bool(done.returncode), f"{script} ended with {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done
