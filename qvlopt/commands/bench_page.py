"""Bench's report for people: Markdown, and one HTML page that needs nothing but itself."""

from __future__ import annotations

import base64
import hashlib
import html
from collections.abc import Mapping, Sequence
from typing import Any

import qvlopt
from qvlopt.commands.bench_plots import Plot
from qvlopt.commands.bench_tables import bench_tables, headline, remarks
from qvlopt.report.plain import safe
from qvlopt.report.tables import Table, markdown_text, to_markdown
from qvlopt.timing.result import BenchFindings

STYLE = """
body { margin: 0 auto; max-width: 76rem; padding: 1.5rem 1.25rem 4rem; color: #1b1f24; background: #fff;
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", "DejaVu Sans", sans-serif; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; }
.verdict { background: #f6f7f9; border-left: .4rem solid #5b6570; padding: .75rem 1rem; }
.pass { border-color: #1a7f37; } .fail, .not_comparable { border-color: #c02026; } .inconclusive { border-color: #9a6700; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .6rem; border-bottom: 1px solid #d8dce2; text-align: left; } .right { text-align: right; }
figure { margin: 1.5rem 0; } img { max-width: 100%; height: auto; } figcaption, .quiet { color: #5b6570; }
"""


def markdown_page(findings: BenchFindings, plots: Sequence[Plot]) -> str:
    """The tables, then the plots by their files, then what to know about the numbers."""
    parts = [f"## Bench: {markdown_text(headline(findings))}", ""]
    parts += [to_markdown(table) for table in bench_tables(findings)]
    parts += [f"![{markdown_text(plot.words)}]({plot.name}.svg)\n" for plot in plots]
    parts += [f"- {markdown_text(remark)}" for remark in remarks(findings)]
    return "\n".join(
        [*parts, f"- {markdown_text(machine(findings.environment))}", "", "Raw values and the whole environment are in report.json.", ""]
    )


def html_page(findings: BenchFindings, plots: Sequence[Plot]) -> str:
    """The same with the plots inside. The content policy allows this style and pictures in the page, nothing else."""
    digest = base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode("ascii")
    policy = f"default-src 'none'; img-src data:; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    said = "".join(f"<li>{_shown(remark)}</li>" for remark in remarks(findings))
    body = [
        f'<p class="quiet">qvlopt {_shown(qvlopt.__version__)} · bench</p>',
        f'<p class="verdict {findings.comparison.verdict or ""}">{_shown(headline(findings))}</p>',
        *(_figure(plot) for plot in plots),
        *(_table(table) for table in bench_tables(findings)),
        f"<h2>About these numbers</h2><ul>{said}<li>{_shown(machine(findings.environment))}</li></ul>",
        '<p class="quiet">Raw values and the whole environment are in report.json.</p>',
    ]
    head = [
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1"><meta name="referrer" content="no-referrer">',
        f"<title>qvlopt bench</title><style>{STYLE}</style></head><body>",
    ]
    return "\n".join([*head, *body, "</body></html>", ""])


def machine(environment: Mapping[str, Any]) -> str:
    """The environment in a line; what is unknown is left out."""
    versions = environment.get("versions") or {}
    quota = environment.get("processor_quota")
    parts = [
        environment.get("cpu_model"),
        f"{environment.get('threads')} threads of {environment.get('processors')} processors",
        f"quota {quota:g}" if quota else None,
        (environment.get("gpu") or {}).get("name"),
        environment.get("system"),
        f"Python {environment.get('python')}",
        *(f"{name} {versions[name]}" for name in ("torch", "onnxruntime", "transformers") if versions.get(name)),
    ]
    return ", ".join(part for part in parts if part)


def _figure(plot: Plot) -> str:
    data = base64.b64encode(plot.svg.encode()).decode("ascii")
    return f'<figure><img src="data:image/svg+xml;base64,{data}" alt="{_shown(plot.words)}"><figcaption>{_shown(plot.words)}</figcaption></figure>'


def _table(table: Table) -> str:
    kinds = [column.align for column in table.columns]
    head = "".join(f'<th class="{kind}" scope="col">{_shown(column.title)}</th>' for kind, column in zip(kinds, table.columns, strict=True))
    rows = "\n".join(
        "<tr>" + "".join(f'<td class="{kind}">{_shown(cell)}</td>' for kind, cell in zip(kinds, row, strict=True)) + "</tr>" for row in table.rows
    )
    return f'<h2>{_shown(table.title)}</h2><div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>\n{rows}</tbody></table></div>'


def _shown(text: str) -> str:
    return html.escape(safe(text), quote=True)
