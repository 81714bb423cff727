"""What a GitHub job shows of an evaluation: annotations, the step's summary and its outputs.

Every text is escaped as the runner wants it (workflow commands) or as Markdown, so nothing that a model or a file says
can become a command. `python -m qvlopt.report.github DOCUMENT.json` prints the annotations of a `--json` document.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from qvlopt.report.figures import VERDICTS, reading
from qvlopt.report.plain import safe, short
from qvlopt.report.tables import markdown_text

SUMMARY_VARIABLE, OUTPUT_VARIABLE = "GITHUB_STEP_SUMMARY", "GITHUB_OUTPUT"

SUMMARY_BYTES = 900_000
"""GitHub drops the whole summary of a step above 1 MiB; what stands in the file already counts as well."""

MOST_ANNOTATIONS = 10
"""Of one kind; GitHub shows no more for a step."""

SEVERITY = ("error", "not_comparable", "fail", "inconclusive")
"""Verdicts that are no pass, the worst first."""


def annotate(document: Mapping[str, Any]) -> list[str]:
    """Workflow commands for a `--json` document, worst first: one for each gate that did not pass, or for the failure."""
    if "error" in document:
        error = document["error"]
        lines = [error["message"], *(f"{each['where']}: {each['message']}" for each in error["problems"]), error["hint"] or ""]
        return [_command("error", f"qvlopt {document['command']}", "\n".join(line for line in lines if line))]
    found = sorted(_findings(document), key=lambda finding: SEVERITY.index(finding[0]))
    unsure = {3: "error", 0: "notice"}.get(document.get("exit_code", 5), "warning")
    commands = [_command(unsure if verdict == "inconclusive" else "error", title, text) for verdict, title, text in found]
    shown = [line for kind in ("error", "warning", "notice") for line in [c for c in commands if c.startswith(f"::{kind} ")][:MOST_ANNOTATIONS]]
    return shown or [_command("notice", "qvlopt evaluate", f"verdict: {document.get('verdict', 'done')}")]


def append_summary(path: Path, markdown: str) -> None:
    """Appends to the step's summary what still fits into it. Raises OSError."""
    held = path.stat().st_size if path.exists() else 0
    with path.open("a", encoding="utf-8", errors="backslashreplace", newline="\n") as handle:
        handle.write(("\n" if held else "") + fitted(markdown, SUMMARY_BYTES - held))


def append_outputs(path: Path, document: Mapping[str, Any]) -> None:
    """Appends `verdict`, `exit_code` and `report` (the folder) for later steps. Raises OSError."""
    values = {"verdict": document["verdict"], "exit_code": document["exit_code"], "report": document["output"]}
    lines = [f"{key}={safe(str(value))}\n" for key, value in values.items()]
    with path.open("a", encoding="utf-8", newline="\n") as handle:
        handle.write("".join(lines))


def tell_github(document: Mapping[str, Any], markdown: str, environment: Mapping[str, str] = os.environ) -> list[str]:
    """Writes summary and outputs where the job's variables name files. Returns what could not be written, in words."""
    problems = []
    for variable in (SUMMARY_VARIABLE, OUTPUT_VARIABLE):
        if not environment.get(variable):
            continue
        path = Path(environment[variable])
        try:
            if variable == SUMMARY_VARIABLE:
                append_summary(path, markdown)
            else:
                append_outputs(path, document)
        except OSError as error:
            problems.append(f"{variable}: {path} could not be written ({error.strerror})")
    return problems


def fitted(markdown: str, budget: int) -> str:
    """`markdown`, or as many of its lines from the start as `budget` bytes hold, with a word on the rest.

    Lines are never cut, and a table loses its last rows, so that what is left is still what it says.
    """
    if len(markdown.encode("utf-8", "backslashreplace")) <= budget:
        return markdown
    note = "\n\nThe rest is left out here; report.md has it.\n"
    kept, size = [], len(note)
    for line in markdown.split("\n"):
        size += len(line.encode("utf-8", "backslashreplace")) + 1
        if size > budget:
            break
        kept.append(line)
    return "\n".join(kept) + note if kept else ""


def main(argv: list[str]) -> int:
    """Prints the annotations of the document in the file `argv[0]`; of an unreadable one it says so."""
    try:
        document = json.loads(Path(argv[0]).read_text(encoding="utf-8"))
        lines = annotate(document)
        if "error" in document and os.environ.get(SUMMARY_VARIABLE):
            text = f"## qvlopt: {markdown_text(document['error']['message'])}\n\n{markdown_text(document['error']['hint'] or '')}\n"
            append_summary(Path(os.environ[SUMMARY_VARIABLE]), text)
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        lines = [_command("error", "qvlopt", "the command ended without a result; its log says why")]
    print("\n".join(lines))
    return 0


def _findings(document: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """(verdict, title, text) of everything that is no pass."""
    for result in document.get("results", ()):
        said = set()
        for metric in result["metrics"]:
            if metric["verdict"] in SEVERITY:
                said.add(metric["verdict"])
                yield metric["verdict"], f"{metric['name']} {metric['metric']}", f"{result['candidate']}: {reading(metric)}"
        if result["verdict"] in SEVERITY and result["verdict"] not in said:
            reasons = "; ".join(result.get("reasons", ())) or VERDICTS[result["verdict"]][1]
            yield result["verdict"], f"verdict: {result['verdict']}", f"{result['candidate']}: {reasons}"


def _command(kind: str, title: str, text: str) -> str:
    """A workflow command in one line; properties need two more signs escaped than the message."""
    return f"::{kind} title={_escaped(title).replace(':', '%3A').replace(',', '%2C')}::{_escaped(short(text))}"


def _escaped(text: str) -> str:
    lines = safe(text, keep_lines=True)
    return lines.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
