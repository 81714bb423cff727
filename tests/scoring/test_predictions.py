"""Exported answers can be read back by their formats' own rules, and no row is missing."""

from __future__ import annotations

import ast
import csv
import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from qvlopt.data.samples import Sample, read_samples
from qvlopt.runtime.engine import Answer
from qvlopt.scoring.compare import Comparison
from qvlopt.scoring.predictions import lmms_eval_rows, prediction_files, vlmevalkit_tsv

SAMPLES = (
    Sample("1", (), 'tab\tand "line"\n?', ("a", 'b"c'), "doc", "1", "x:1", stratum="form"),
    Sample("2", (), "Which?", ("B",), "choice", "2", "x:2", choices=("x", "y")),
    Sample("3", (), "q", ("[__import__('os')]",), "doc", "3", "x:3"),
    Sample("4", (), "q", ("d",), "doc", "4", "x:4"),
)
ANSWERS = {
    "1": Answer("1", (5,), 'said\tthis\nand "that"', "eos", 3),
    "2": Answer("2", (5,), "B", "eos", 3),
    "3": Answer("3", (), "", "error", 3, "out of memory"),
}


def test_the_tsv_reads_back_as_it_was(tmp_path: Path) -> None:
    rows = list(csv.DictReader(io.StringIO(vlmevalkit_tsv(SAMPLES, ANSWERS)), delimiter="\t"))
    assert [row["index"] for row in rows] == ["1", "2", "3", "4"]
    assert [row["prediction"] for row in rows] == ['said\tthis\nand "that"', "B", "", ""]
    assert [row["answer"] for row in rows] == ["['a', 'b\"c']", "B", "[\"[__import__('os')]\"]", "['d']"]
    assert [ast.literal_eval(rows[number]["answer"]) for number in (0, 2)] == [["a", 'b"c'], ["[__import__('os')]"]]
    assert (rows[1]["A"], rows[1]["B"], rows[0]["A"], rows[0]["category"]) == ("x", "y", "", "form")
    (tmp_path / "set.tsv").write_text(vlmevalkit_tsv(SAMPLES, ANSWERS), encoding="utf-8")
    again = read_samples(tmp_path / "set.tsv", task="doc").samples
    assert [(sample.id, sample.answers) for sample in again] == [(sample.id, sample.answers) for sample in SAMPLES]


def test_lmms_evals_rows_hold_the_document_the_target_and_what_was_said() -> None:
    rows = list(lmms_eval_rows(SAMPLES, ANSWERS))
    assert [row["doc_id"] for row in rows] == [0, 1, 2, 3]
    assert rows[0]["target"] == rows[0]["answers"] == rows[0]["doc"]["answers"] == ["a", 'b"c']
    assert rows[0]["filtered_resps"] == [rows[0]["prediction"]] == rows[0]["resps"][0] == ['said\tthis\nand "that"']
    assert [row["prediction"] for row in rows[2:]] == ["", ""]
    assert json.loads(json.dumps(rows)) == rows


def comparison(*names: str) -> Comparison:
    sets = [SimpleNamespace(each=SimpleNamespace(name=name, chosen=SAMPLES)) for name in names]
    run = SimpleNamespace(answered={name: SimpleNamespace(answers=ANSWERS) for name in names})
    return cast(Comparison, cast(Any, SimpleNamespace(sets=sets, runs=(None, run))))


def test_every_candidate_and_set_has_files_of_its_own() -> None:
    assert sorted(prediction_files([comparison("doc")])) == ["predictions-doc.jsonl", "predictions-doc.tsv"]
    several = prediction_files([comparison("a", "b"), comparison("a", "b")])
    assert sorted(several) == [f"predictions-{name}-{number}.{kind}" for name in "ab" for number in (1, 2) for kind in ("jsonl", "tsv")]
