"""Reports are complete or absent, UTF-8 everywhere, and valid JSON whatever the numbers are."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from qvlopt.artifact.process import is_another_alive
from qvlopt.report.write import jsonl_text, new_folder, prepare_parent, write_report


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


def test_a_name_that_another_run_took_is_told_and_nothing_is_left(tmp_path: Path) -> None:
    assert write_report(tmp_path / "now", {"a": "theirs"})
    assert not write_report(tmp_path / "now", {"a": "ours"})
    assert (tmp_path / "now" / "a").read_text(encoding="utf-8") == "theirs"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "now"]


def test_a_failure_leaves_no_folder_that_it_made(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="directory"):
        write_report(tmp_path / "out" / "evaluate" / "now", {"no/such/folder": "x"})
    assert list(tmp_path.iterdir()) == []


def test_a_place_is_tried_before_the_work_and_nothing_stays(tmp_path: Path) -> None:
    prepare_parent(tmp_path / "out" / "evaluate", is_alive=is_another_alive)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError):
        prepare_parent(tmp_path / "file" / "evaluate", is_alive=is_another_alive)


def test_what_killed_runs_left_goes_and_nothing_else(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        ended.wait()
    (tmp_path / f".20260101T000000Z-2.tmp-{ended.pid}-0a").mkdir()
    (tmp_path / f".20260101T000000Z-2.tmp-{ended.pid}-0a" / "report.md").touch()
    (tmp_path / f".latest.tmp-{ended.pid}").symlink_to("20260101T000000Z")
    kept = [f".20260101T000000Z.tmp-{os.getppid()}-0a", f".mine.tmp-{ended.pid}", ".latest.tmp-x", "20260101T000000Z"]
    for name in kept:
        (tmp_path / name).mkdir()
    prepare_parent(tmp_path, is_alive=is_another_alive)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(kept)
