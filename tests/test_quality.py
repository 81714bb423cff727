"""The source is clean by the same tools and settings that pre-commit uses, and keeps to the sizes of the style guide."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).parents[1]
PACKAGE = CHECKOUT / "qvlopt"
MODULES = sorted(PACKAGE.rglob("*.py"))
FORBIDDEN_NAMES = {"utils", "util", "helpers", "helper", "common", "manager", "misc"}
MAX_FILE, MAX_FUNCTION, MAX_ARGUMENTS = 300, 40, 6


def run(*words: str) -> None:
    done = subprocess.run([sys.executable, "-m", *words], capture_output=True, text=True, cwd=CHECKOUT, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_ruff_finds_nothing() -> None:
    run("ruff", "check", "--no-cache", ".")


@pytest.mark.slow
def test_mypy_strict_finds_nothing(tmp_path: Path) -> None:
    run("mypy", "--cache-dir", str(tmp_path))


def functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def test_files_and_functions_keep_to_the_sizes() -> None:
    over = []
    for path in MODULES:
        shown = path.relative_to(CHECKOUT)
        lines = len(path.read_text(encoding="utf-8").splitlines())
        if lines > MAX_FILE:
            over.append(f"{shown}: {lines} lines")
        for function in functions(path):
            length = (function.end_lineno or 0) - function.lineno + 1
            arguments = function.args.posonlyargs + function.args.args + function.args.kwonlyargs
            taken = [argument for argument in arguments if argument.arg not in ("self", "cls")]
            if length > MAX_FUNCTION:
                over.append(f"{shown}: {function.name} has {length} lines")
            if len(taken) > MAX_ARGUMENTS:
                over.append(f"{shown}: {function.name} takes {len(taken)} arguments")
    assert over == []


def test_every_module_says_what_it_is_for() -> None:
    assert [path.name for path in MODULES if not ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))] == []


def test_no_module_is_named_after_nothing() -> None:
    assert [path for path in MODULES if path.stem in FORBIDDEN_NAMES] == []


def test_test_files_have_names_of_their_own() -> None:
    names = [path.name for path in (CHECKOUT / "tests").rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))
