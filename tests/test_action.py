"""The GitHub Action: its script is run as the runner would run it, and its file keeps to the rules for safe actions."""

from __future__ import annotations

import json
import os
import re
import stat
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from tests.evaluations import evaluation, metric, result

CHECKOUT = Path(__file__).parents[1]
SCRIPT = CHECKOUT / "ci" / "action.sh"
ACTION: dict[str, Any] = YAML(typ="safe").load(CHECKOUT / "action.yml")
STEPS: list[dict[str, Any]] = ACTION["runs"]["steps"]

STUB = """#!{python}
import json, os, sys
json.dump(sys.argv[1:] + [os.environ.get("QVLOPT_API_KEY")], open({arguments!r}, "w"))
print("::error::a library printed this", file=sys.stderr, flush=True)
sys.stdout.write(open({document!r}).read())
sys.exit({status})
"""


class Job:
    """A step's surroundings: its files, and a qvlopt on the PATH that a test writes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "bin").mkdir()
        (folder / "temp").mkdir()
        for name in ("summary", "output", "path"):
            (folder / name).touch()

    def qvlopt(self, text: str) -> None:
        path = self.folder / "bin" / "qvlopt"
        path.write_text(text, encoding="utf-8")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)

    def stub(self, document: str, *, status: int) -> None:
        (self.folder / "document").write_text(document, encoding="utf-8")
        place = {"arguments": str(self.folder / "arguments"), "document": str(self.folder / "document")}
        self.qvlopt(STUB.format(python=sys.executable, status=status, **place))

    def real(self) -> None:
        self.qvlopt(f"#!{sys.executable}\nfrom qvlopt.__main__ import main\nmain()\n")

    def run(self, step: str, **values: str) -> subprocess.CompletedProcess[str]:
        surroundings = {
            "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}",
            "PYTHON": sys.executable,
            "PYTHONPATH": str(CHECKOUT),
            "RUNNER_TEMP": str(self.folder / "temp"),
            "GITHUB_ACTIONS": "true",
            "GITHUB_STEP_SUMMARY": str(self.folder / "summary"),
            "GITHUB_OUTPUT": str(self.folder / "output"),
            "GITHUB_PATH": str(self.folder / "path"),
        }
        command = ["bash", str(SCRIPT), step]
        environment = os.environ | surroundings | values
        return subprocess.run(command, capture_output=True, text=True, cwd=self.folder, env=environment, check=False)

    def text(self, name: str) -> str:
        return (self.folder / name).read_text(encoding="utf-8")


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


def test_inputs_become_arguments_and_the_status_is_qvlopts(job: Job) -> None:
    job.stub(json.dumps(evaluation(result(metric(verdict="fail"), verdict="fail"), verdict="fail", exit_code=1)), status=1)
    inputs = {
        "QVLOPT_RECIPE": "my recipe.yaml",
        "QVLOPT_MODEL": "/models/x y",
        "QVLOPT_SETTINGS": "\n  evaluate.limit=3\nevaluate.reports=[json, html]  \n\n",
        "QVLOPT_CANDIDATES": "out/a b\nhttp://localhost:1/v1#m; touch owned\n$(touch owned)\n",
        "QVLOPT_API_KEY": "",
    }
    done = job.run("evaluate", **inputs)
    assert done.returncode == 1, done.stderr
    assert json.loads(job.text("arguments")) == [
        *("evaluate", "--json", "--recipe", "my recipe.yaml", "--model", "/models/x y"),
        *("--set", "evaluate.limit=3", "--set", "evaluate.reports=[json, html]"),
        *("--", "out/a b", "http://localhost:1/v1#m; touch owned", "$(touch owned)", None),
    ]
    assert not (job.folder / "owned").exists()
    assert "exit_code=1\n" in job.text("output")


def test_what_is_printed_below_is_no_command_and_the_annotations_are(job: Job) -> None:
    job.stub(json.dumps(evaluation(result(metric(verdict="fail"), verdict="fail"), verdict="fail", exit_code=1)), status=1)
    lines = job.run("evaluate").stdout.splitlines()
    stop = re.fullmatch("::stop-commands::([0-9a-f]{32})", lines[0])
    assert stop is not None
    assert lines[1:3] == ["", f"::{stop[1]}::"]
    assert lines[3].startswith("::error title=ocr exact_match::")
    assert len(lines) == 4
    assert job.run("evaluate").stdout.splitlines()[0] != lines[0], "the word that ends it must not be known before"


@pytest.mark.parametrize("document", ["", "Traceback ::error::x"])
def test_a_crash_without_a_document_is_annotated(job: Job, document: str) -> None:
    job.stub(document, status=5)
    done = job.run("evaluate")
    assert done.returncode == 5
    assert done.stdout.splitlines()[-1] == "::error title=qvlopt::the command ended without a result; its log says why"
    assert job.text("output") == "exit_code=5\n"


def test_a_wrong_recipe_is_told_in_the_summary(job: Job) -> None:
    job.real()
    done = job.run("evaluate", QVLOPT_SETTINGS="evaluate.gate.margn=1")
    assert done.returncode == 2
    assert "::error title=qvlopt evaluate::1 problem in the recipe%0A" in done.stdout
    assert "margin" in done.stdout
    assert "1 problem in the recipe" in job.text("summary")


@pytest.mark.slow
def test_a_whole_evaluation_of_the_built_in_checkpoint(job: Job) -> None:
    job.real()
    settings = "evaluate.limit=2\nevaluate.gate.on_inconclusive=warn\nhardware.threads=1"
    done = job.run("evaluate", QVLOPT_SETTINGS=settings, QVLOPT_CANDIDATES="model")
    assert done.returncode == 0, done.stderr
    output = dict(line.split("=", 1) for line in job.text("output").splitlines())
    assert (output["verdict"], output["exit_code"]) == ("pass", "0")
    report = job.folder / output["report"]
    assert {"report.html", "report.json", "junit.xml", "items.jsonl"} <= {path.name for path in report.iterdir()}
    assert job.text("summary") == (report / "report.md").read_text(encoding="utf-8")
    assert done.stdout.splitlines()[-1] == "::notice title=qvlopt evaluate::verdict: pass"


@pytest.mark.slow
def test_installing_makes_an_environment_and_puts_it_on_the_path(job: Job) -> None:
    wheel = job.folder / "tool-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("tool.py", "def main():\n    print('works')\n")
        archive.writestr("tool-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tool\nVersion: 1.0\n")
        archive.writestr("tool-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr("tool-1.0.dist-info/entry_points.txt", "[console_scripts]\ntool = tool:main\n")
        archive.writestr("tool-1.0.dist-info/RECORD", "")
    done = job.run("install", QVLOPT_INSTALL=str(wheel), QVLOPT_PIP_ARGUMENTS="--no-deps\n--no-index\n")
    assert done.returncode == 0, done.stderr
    (folder,) = job.text("path").split()
    assert subprocess.run([f"{folder}/tool"], capture_output=True, text=True, check=True).stdout == "works\n"


def test_other_words_are_refused(job: Job) -> None:
    assert job.run("frobnicate").returncode == 2


def test_inputs_never_stand_inside_a_script() -> None:
    for step in STEPS:
        assert "${{" not in step.get("run", "")
        assert "${{" not in step.get("if", "")


def test_actions_of_others_are_pinned_by_their_full_digest() -> None:
    used = [step["uses"] for step in STEPS if "uses" in step]
    assert used
    assert all(re.fullmatch(r"[\w.-]+/[\w./-]+@[0-9a-f]{40}", name) for name in used)


def test_the_report_is_uploaded_whatever_the_verdict() -> None:
    upload = next(step for step in STEPS if "uses" in step)
    assert upload["if"].startswith("always()")
    assert upload["with"]["path"] == "${{ steps.evaluate.outputs.report }}"


def test_every_input_reaches_the_script_and_every_output_is_written() -> None:
    script = SCRIPT.read_text(encoding="utf-8")
    given = {name: value for step in STEPS for name, value in step.get("env", {}).items()}
    assert all(f"${{{name}:-" in script or f"${{{name}}}" in script for name in given), "the script reads what it is given"
    text = (CHECKOUT / "action.yml").read_text(encoding="utf-8")
    for name in ACTION["inputs"]:
        assert f"inputs.{name}" in text
    assert {value["value"] for value in ACTION["outputs"].values()} == {
        f"${{{{ steps.evaluate.outputs.{name} }}}}" for name in ("verdict", "exit_code", "report")
    }
