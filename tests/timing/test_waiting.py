"""Time in line for a processor, as the kernel writes it, and as a call has it."""

from __future__ import annotations

from pathlib import Path

from qvlopt.timing.waiting import waited_seconds


def thread(process: Path, number: int, content: str) -> None:
    (process / "task" / str(number)).mkdir(parents=True)
    (process / "task" / str(number) / "schedstat").write_text(content)


def test_all_threads_are_summed_in_seconds(tmp_path: Path) -> None:
    thread(tmp_path, 1, "123456789 1500000000 10\n")
    thread(tmp_path, 2, "123456789 500000000 10\n")
    assert waited_seconds(process=tmp_path) == 2.0


def test_a_kernel_that_does_not_count_says_nothing(tmp_path: Path) -> None:
    assert waited_seconds(process=tmp_path / "none") is None
    (tmp_path / "task" / "1").mkdir(parents=True)
    assert waited_seconds(process=tmp_path) is None
