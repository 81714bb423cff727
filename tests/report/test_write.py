"""Reports are complete or absent, UTF-8 everywhere, and valid JSON whatever the numbers are."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from qvlopt.report.write import jsonl_text, new_folder, write_report


def test_lines_are_valid_json_whatever_the_numbers_and_texts_are() -> None:
    text = jsonl_text([{"a": math.nan, "b": [math.inf, 1.5]}, {"c": "x\u2028\ny\ud800", "d": "扫描"}])
    lines = text.split("\n")
    assert len(lines) == 3
    assert json.loads(lines[0]) == {"a": None, "b": [None, 1.5]}
    assert json.loads(lines[1])["d"] == "扫描"


def test_a_report_is_written_whole_and_latest_points_to_it(tmp_path: Path) -> None:
    for stamp in ("20260101T000000Z", "20260102T000000Z"):
        write_report(new_folder(tmp_path, stamp), {"report.json": "{}\n", "report.md": "été\n"})
    assert (tmp_path / "latest").resolve().name == "20260102T000000Z"
    assert (tmp_path / "latest" / "report.md").read_text(encoding="utf-8") == "été\n"
    assert os.readlink(tmp_path / "latest") == "20260102T000000Z"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["20260101T000000Z", "20260102T000000Z", "latest"]


def test_two_reports_of_one_second_get_two_folders(tmp_path: Path) -> None:
    names = []
    for _ in range(3):
        folder = new_folder(tmp_path, "now")
        write_report(folder, {"a": "x"})
        names.append(folder.name)
    assert names == ["now", "now-2", "now-3"]


def test_a_failure_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="directory"):
        write_report(tmp_path / "now", {"good": "x", "no/such/folder": "x"})
    assert list(tmp_path.iterdir()) == []


def test_a_folder_called_latest_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "latest").mkdir()
    (tmp_path / "latest" / "mine").touch()
    write_report(tmp_path / "now", {"a": "x"})
    assert (tmp_path / "latest" / "mine").exists()
    assert (tmp_path / "now" / "a").exists()


def test_files_are_utf8_whatever_the_locale_says(tmp_path: Path) -> None:
    code = "import sys, pathlib; from qvlopt.report.write import write_report; write_report(pathlib.Path(sys.argv[1]) / 'r', {'a': '\\u626b\\ud800'})"
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], env=environment, check=True)
    assert (tmp_path / "r" / "a").read_bytes() == "扫\\ud800".encode()
