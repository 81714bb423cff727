"""What a GitHub job gets: annotations, a summary under the limit, outputs; foreign text never becomes a command."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from qvlopt.report.github import SUMMARY_BYTES, annotate, append_summary, fitted, main, tell_github
from tests.documents import document_of
from tests.evaluations import HOSTILE, evaluation, metric, result


def test_annotations_are_one_a_gate_and_worst_first() -> None:
    unsure = result(metric("doc", verdict="inconclusive"), metric("ocr", verdict="fail"), metric("vqa"), verdict="fail")
    lines = annotate(evaluation(unsure, verdict="fail", exit_code=1))
    assert [line.split("::")[1] for line in lines] == ["error title=ocr exact_match", "warning title=doc exact_match"]
    assert "dropped by more than 2.00 points" in lines[0]


def test_a_pass_is_a_notice() -> None:
    assert annotate(evaluation(result(metric()))) == ["::notice title=qvlopt evaluate::verdict: pass"]


@pytest.mark.parametrize(("status", "level"), [(3, "error"), (1, "warning"), (0, "notice")])
def test_an_inconclusive_result_is_as_loud_as_what_it_does(status: int, level: str) -> None:
    lines = annotate(evaluation(result(metric(verdict="inconclusive"), verdict="inconclusive"), verdict="inconclusive", exit_code=status))
    assert [line.split(" ")[0] for line in lines] == [f"::{level}"]


def test_unlike_conditions_are_told_by_their_reasons() -> None:
    odd = result(metric(), verdict="not_comparable", reasons=["not comparable: pixels is 1 for the base and 2 for the candidate"])
    assert "pixels is 1" in annotate(evaluation(odd, verdict="not_comparable", exit_code=4))[0]


def test_no_more_are_shown_than_github_shows() -> None:
    many = result(*(metric(f"set{i}", verdict="fail") for i in range(15)), verdict="fail")
    assert len(annotate(evaluation(many, verdict="fail", exit_code=1))) == 10


def test_a_command_without_a_result_has_its_message_annotated() -> None:
    error = {"message": "2 problems in the recipe", "hint": "see the docs", "problems": [{"where": "r.yaml:3", "message": "bits, 50% wrong"}]}
    (line,) = annotate(document_of("evaluate", {"error": error}, exit_code=2))
    assert line == "::error title=qvlopt evaluate::2 problems in the recipe%0Ar.yaml:3: bits, 50%25 wrong%0Asee the docs"


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_text_stays_inside_one_command(text: str) -> None:
    hostile = result(metric("ocr", metric=text, verdict="fail"), candidate=text, verdict="error", reasons=[text])
    lines = annotate(evaluation(hostile, verdict="error", exit_code=5))
    printed = "\n".join(lines).encode("utf-8").decode("utf-8")
    assert len(printed.splitlines()) == len(lines) == 2
    for line in lines:
        title = line.removeprefix("::error title=").split("::", 1)[0]
        assert not set(title) & set(",\r\n:")
        assert line.startswith("::error title=")
        assert "\x1b" not in line
        assert "##[" not in line


def test_the_summary_is_appended_and_stays_under_the_limit(tmp_path: Path) -> None:
    path = tmp_path / "summary.md"
    path.write_text("before\n", encoding="utf-8")
    append_summary(path, "### ours\n")
    assert path.read_text(encoding="utf-8") == "before\n\n### ours\n"
    append_summary(path, "| row of a table \u6587 |\n" * 100_000)
    size = path.stat().st_size
    assert SUMMARY_BYTES - 1000 < size <= SUMMARY_BYTES + 1
    text = path.read_text(encoding="utf-8")
    assert text.endswith("The rest is left out here; report.md has it.\n")
    assert set(text.splitlines()[4:-2]) == {"| row of a table \u6587 |"}
    append_summary(path, "more\n")
    assert path.stat().st_size < 2**20


def test_what_fits_is_not_touched() -> None:
    assert fitted("a\nb", 3) == "a\nb"
    assert fitted("a\nb", 2) == ""


def test_outputs_are_one_line_each(tmp_path: Path) -> None:
    document = evaluation(result(metric()), output="out/x\ny=1")
    variables = {"GITHUB_OUTPUT": str(tmp_path / "o"), "GITHUB_STEP_SUMMARY": str(tmp_path / "s")}
    assert tell_github(document, "text\n", variables) == []
    assert (tmp_path / "o").read_text(encoding="utf-8") == "verdict=pass\nexit_code=0\nreport=out/x\\ny=1\n"
    assert (tmp_path / "s").read_text(encoding="utf-8") == "text\n"


def test_outside_of_github_nothing_is_written_and_a_lost_file_is_a_remark(tmp_path: Path) -> None:
    document = evaluation(result(metric()))
    assert tell_github(document, "text\n", {}) == []
    (problem,) = tell_github(document, "text\n", {"GITHUB_STEP_SUMMARY": str(tmp_path / "no" / "s")})
    assert "could not be written (No such file or directory)" in problem


def run_module(path: Path) -> str:
    return subprocess.run([sys.executable, "-m", "qvlopt.report.github", str(path)], capture_output=True, text=True, check=True).stdout


def test_the_module_prints_the_annotations_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    path.write_text(json.dumps(evaluation(result(metric(verdict="fail"), verdict="fail"), verdict="fail", exit_code=1)), encoding="utf-8")
    assert run_module(path).startswith("::error title=ocr exact_match::out/awq: dropped by more than")


@pytest.mark.parametrize("content", ["", "{", "[]", '{"results": 1}', '{"error": {}, "command": "x"}'])
def test_a_broken_file_is_an_annotation_too(tmp_path: Path, content: str, capsys: Any) -> None:
    path = tmp_path / "result.json"
    path.write_text(content, encoding="utf-8")
    assert main([str(path)]) == 0
    assert capsys.readouterr().out.startswith("::error title=qvlopt::the command ended without a result")
