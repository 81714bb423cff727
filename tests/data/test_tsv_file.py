"""What csv's writer writes is read as it was, and any damage to a file is an error with its line or a readable row."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from qvlopt.data.tsv_file import TsvFile
from qvlopt.errors import RunError

texts = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12).filter(lambda text: not text.startswith("["))
rows = st.lists(st.tuples(texts, st.text("a\t\"\n\r' ", max_size=6).map(lambda text: f"q{text}")), max_size=5)


def written(values: list[tuple[str, str]]) -> bytes:
    text = io.StringIO()
    writer = csv.writer(text, delimiter="\t", lineterminator="\n")
    writer.writerow(["index", "question", "answer"])
    writer.writerows([[str(number), question, answer] for number, (answer, question) in enumerate(values)])
    return text.getvalue().encode()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows)
def test_texts_come_back_as_they_were_written(tmp_path: Path, values: list[tuple[str, str]]) -> None:
    path = tmp_path / "set.tsv"
    path.write_bytes(written(values))
    found = [(record.values["answers"], record.values["question"]) for record in TsvFile(path, {}).records()]
    assert found == values


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 60), st.binary(max_size=4))
def test_damage_is_an_error_that_names_the_file_or_a_readable_row(tmp_path: Path, place: int, put: bytes) -> None:
    data = written([("one", 'two "three"'), ("four\tfive", "six")])
    path = tmp_path / "set.tsv"
    path.write_bytes(data[:place] + put + data[place + 2 :])
    message, questions = "set.tsv", []
    try:
        questions = [record.values.get("question", "") for record in TsvFile(path, {}).records()]
    except RunError as error:
        message = error.message
    assert "set.tsv" in message
    assert all(isinstance(question, str) for question in questions)


def test_a_quoted_text_that_never_ends_is_found_without_reading_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qvlopt.data.tsv_file.MAX_ROW", 100)
    path = tmp_path / "set.tsv"
    path.write_bytes(b'index\tquestion\n1\t"open\n' + b"more\n" * 1000 + b'"\n')
    with pytest.raises(RunError, match=r"set\.tsv:2: a quoted text that begins here is never closed"):
        list(TsvFile(path, {}).records())
