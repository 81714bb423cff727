"""Prints the tables of docs/nano.md from a report of `qvlopt run` over all of nano-eval.

python tools/nano_scores.py out/demo/evaluate/latest/report.json
"""

from __future__ import annotations

import json
import pathlib
import sys
from typing import Any

PRIMARY = {"ocr": "exact_match", "vqa": "vqa_exact", "doc": "anls"}


def score_rows(metrics: list[dict[str, Any]]) -> list[str]:
    rows = ["| task | metric | n | source | tower INT4 | change, 90 % interval |", "|---|---|---|---|---|---|"]
    for metric in metrics:
        interval = "" if metric["ci_low"] is None else f", {metric['ci_low']:+.2%} to {metric['ci_high']:+.2%}"
        scores = f"{metric['base']:.2%} | {metric['candidate']:.2%} | {metric['delta']:+.2%}{interval}"
        rows.append(f"| {metric['name']} | {metric['metric']} | {metric['n']} | {scores} |")
    return rows


def size_rows(by_size: list[dict[str, Any]]) -> list[str]:
    titles = " | ".join(f"{task} ({metric})" for task, metric in PRIMARY.items())
    rows = [f"| size | {titles} |", "|---|---|---|---|"]
    for size in dict.fromkeys(row["size"] for row in by_size):
        of_size = {row["name"]: row for row in by_size if row["size"] == size}
        cells = [f"{of_size[task]['base']:.1%}, {of_size[task]['candidate']:.1%} (n {of_size[task]['n']})" for task in PRIMARY]
        rows.append(f"| {size} | {' | '.join(cells)} |")
    return rows


def main() -> None:
    result = json.loads(pathlib.Path(sys.argv[1]).read_text(encoding="utf-8"))["results"][0]
    print("\n".join((*score_rows(result["metrics"]), "", *size_rows(result["by_size"]))))


if __name__ == "__main__":
    main()
