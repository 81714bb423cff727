"""Manifests are read the same on every machine; rows and ids are never lost, merged or guessed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from qvlopt.data.samples import read_samples
from qvlopt.data.sets import write_lock
from qvlopt.errors import ItemError, RunError, UsageError

ROWS: list[dict[str, Any]] = [
    {"id": "a", "images": ["p.png"], "question": "Read the text.", "answers": ["été 扫描"], "task": "ocr"},
    {"id": "b", "images": "q.png", "question": "What?", "answers": "yes", "task": "vqa", "cluster": "page 1", "split": "eval"},
    {
        "id": 3,
        "images": ["p.png", "q.png"],
        "question": "Which?",
        "answers": [7, {"answer": "x", "answer_id": 1}],
        "task": "vqa",
        "size": [8, 8],
        "kind": "k",
    },
]


def write(folder: Path, rows: list[dict[str, Any]], text: str | None = None) -> Path:
    folder.mkdir(exist_ok=True)
    for name, colour in {"p.png": "red", "q.png": "blue"}.items():
        Image.new("RGB", (8, 8), colour).save(folder / name)
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows) if text is None else text
    (folder / "manifest.jsonl").write_text(lines, encoding="utf-8")
    return folder


def test_rows_become_samples_in_their_order(tmp_path: Path) -> None:
    samples = read_samples(write(tmp_path, ROWS)).samples
    assert [sample.id for sample in samples] == ["a", "b", "3"]
    assert [sample.answers for sample in samples] == [("été 扫描",), ("yes",), ("7", "x")]
    assert [[image.name for image in sample.images] for sample in samples] == [["p.png"], ["q.png"], ["p.png", "q.png"]]
    assert samples[1].cluster == "page 1"
    assert samples[2].origin == f"{tmp_path / 'manifest.jsonl'}:3"
    assert samples[0].images[0].load().getpixel((0, 0)) == (255, 0, 0)


@pytest.mark.parametrize("change", ["", "bom", "crlf", "blank", "no last newline"])
def test_encodings_and_line_ends_do_not_matter(tmp_path: Path, change: str) -> None:
    folder = write(tmp_path, ROWS)
    path = folder / "manifest.jsonl"
    expected = read_samples(folder)
    raw = path.read_bytes()
    changes = {
        "bom": b"\xef\xbb\xbf" + raw,
        "crlf": raw.replace(b"\n", b"\r\n"),
        "blank": b"\n \n" + raw.replace(b"\n", b"\n\r\n\n"),
        "no last newline": raw.rstrip(b"\n"),
    }
    path.write_bytes(changes.get(change, raw))
    found = read_samples(folder)
    assert found.digest == expected.digest
    assert [sample.answers for sample in found.samples] == [sample.answers for sample in expected.samples]


def test_the_locale_does_not_matter(tmp_path: Path) -> None:
    folder = write(tmp_path, ROWS)
    code = "import sys, pathlib; from qvlopt.data.samples import read_samples; print(read_samples(pathlib.Path(sys.argv[1])).digest)"
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    run = subprocess.run([sys.executable, "-c", code, str(folder)], env=environment, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == read_samples(folder).digest


def test_a_line_separator_inside_a_text_is_no_line_end(tmp_path: Path) -> None:
    row = {**ROWS[0], "answers": ["a\u2028b\x85c"]}
    assert read_samples(write(tmp_path, [row])).samples[0].answers == ("a\u2028b\x85c",)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{broken", "not valid JSON"),
        ("[1]", "expected an object"),
        ('{"id": "z", "images": [], "question": "q", "answers": "a", "anwser": 1}', "unknown key 'anwser'.*did you mean answers"),
        ('{"images": [], "question": "q", "answers": "a", "task": "ocr"}', "id is None"),
        ('{"id": true, "question": "q", "task": "ocr"}', "id is True"),
        ('{"id": 1.5, "question": "q", "task": "ocr"}', "id is 1.5"),
        ('{"id": "z", "task": "ocr"}', "question is None"),
        ('{"id": "z", "question": "q", "task": "ocrr"}', "task is 'ocrr', expected one of ocr, vqa"),
        ('{"id": "z", "question": "q", "answers": [null]}', "answers holds None"),
        ('{"id": "z", "question": "q", "answers": [true]}', "answers holds True"),
        ('{"id": "z", "question": "q", "images": [4]}', "images holds 4"),
        ('{"id": "z", "question": "q", "cluster": ["x"]}', "cluster is"),
        ("[" * 100_000, "not valid JSON"),
    ],
)
def test_a_broken_line_is_told_by_file_and_number(tmp_path: Path, line: str, message: str) -> None:
    folder = write(tmp_path, [], json.dumps(ROWS[0]) + "\n\n" + line + "\n")
    with pytest.raises(RunError, match=rf"manifest\.jsonl:3: {message}"):
        read_samples(folder)


def test_half_of_a_surrogate_pair_is_read_as_an_unknown_character(tmp_path: Path) -> None:
    line = '{"id": "a\\ud800", "images": ["\\udc00.png"], "question": "\\ud83d\\ude00 \\ud83d?", "answers": ["\\ud800"], "task": "ocr"}'
    sample = read_samples(write(tmp_path, [], line)).samples[0]
    assert (sample.id, sample.question, sample.answers) == ("a\ufffd", "😀 \ufffd?", ("\ufffd",))
    assert sample.images[0].name == "\ufffd.png"


def test_a_picture_whose_name_no_file_can_have_fails_its_item_only(tmp_path: Path) -> None:
    sample = read_samples(write(tmp_path, [{**ROWS[0], "images": ["x" * 300 + ".png"]}])).samples[0]
    with pytest.raises(ItemError, match="File name too long"):
        sample.images[0].load()
    with pytest.raises(ItemError, match="is missing"):
        sample.images[0].sha256()


def test_a_line_that_is_not_utf8_is_told(tmp_path: Path) -> None:
    folder = write(tmp_path, ROWS)
    path = folder / "manifest.jsonl"
    path.write_bytes(path.read_bytes().replace("été".encode(), "été".encode("latin-1")))
    with pytest.raises(RunError, match=r"manifest\.jsonl:1: byte \d+ is not UTF-8"):
        read_samples(folder)


def test_equal_ids_are_refused_with_both_lines(tmp_path: Path) -> None:
    folder = write(tmp_path, [{**ROWS[0], "id": "1"}, ROWS[1], {**ROWS[0], "id": "1", "question": "Another?"}])
    with pytest.raises(UsageError, match=r"manifest\.jsonl:1 and line 3: both have the id '1'"):
        read_samples(folder)


def test_the_number_1_and_the_text_1_are_refused_as_one_id(tmp_path: Path) -> None:
    folder = write(tmp_path, [{**ROWS[0], "id": 1}, {**ROWS[1], "id": "1"}])
    with pytest.raises(UsageError, match=r"manifest\.jsonl:1 and line 2"):
        read_samples(folder, task="ocr")


@pytest.mark.parametrize("name", ["../p.png", "/etc/passwd", "a/../../p.png", "C:\\p.png"])
@pytest.mark.parametrize("key", ["images", "video"])
def test_pictures_outside_the_folder_are_refused_with_the_line(tmp_path: Path, name: str, key: str) -> None:
    folder = write(tmp_path, [ROWS[0], {"id": "z", "question": "q", "answers": "a", "task": "ocr", key: name}])
    with pytest.raises(UsageError, match=r"manifest\.jsonl:2: the picture"):
        read_samples(folder)


def test_items_about_one_picture_share_a_cluster_whatever_its_name(tmp_path: Path) -> None:
    rows = [{**ROWS[0], "id": str(i), "images": [name]} for i, name in enumerate(["p.png", "q.png", "copy.png", "gone.png"])]
    folder = write(tmp_path, rows)
    (folder / "copy.png").write_bytes((folder / "p.png").read_bytes())
    clusters = [sample.cluster for sample in read_samples(folder).samples]
    assert clusters[0] == clusters[2]
    assert len(set(clusters)) == 3


def test_an_item_without_pictures_is_its_own_cluster(tmp_path: Path) -> None:
    folder = write(tmp_path, [{"id": "t", "question": "q", "answers": "a", "task": "text"}])
    assert read_samples(folder).samples[0].cluster == "t"


def test_the_task_filters_and_fills_in(tmp_path: Path) -> None:
    folder = write(tmp_path, [*ROWS, {"id": "free", "question": "q", "answers": "a"}])
    assert [sample.id for sample in read_samples(folder, task="ocr").samples] == ["a", "free"]
    assert read_samples(folder, task="ocr").samples[1].task == "ocr"
    with pytest.raises(UsageError, match=r"no row has the task 'doc'; tasks in the file: ocr \(1\), vqa \(2\)"):
        read_samples(write(tmp_path, ROWS), task="doc")


def test_the_split_filters(tmp_path: Path) -> None:
    folder = write(tmp_path, ROWS)
    assert [sample.id for sample in read_samples(folder, split="eval").samples] == ["b"]
    with pytest.raises(UsageError, match=r"no row has the split 'test'; splits in the file: none \(2\), eval \(1\)"):
        read_samples(folder, split="test")


def test_a_file_without_splits_is_one_split(tmp_path: Path) -> None:
    rows = [{key: value for key, value in row.items() if key != "split"} for row in ROWS]
    assert len(read_samples(write(tmp_path, rows), split="calibrate").samples) == 3


def test_an_empty_set_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="has no rows"):
        read_samples(write(tmp_path, [], "\n\n"))


def test_a_missing_set_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"nowhere/manifest\.jsonl cannot be read"):
        read_samples(tmp_path / "nowhere")


def test_columns_map_our_names_to_the_files(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"questionId": 1, "image": "p.png", "query": "q", "label": ["a"], "task": "ocr"}]
    columns = {"id": "questionId", "images": "image", "question": "query", "answers": "label"}
    assert read_samples(write(tmp_path, rows), columns=columns).samples[0].answers == ("a",)
    with pytest.raises(UsageError, match="columns: unknown key 'image'"):
        read_samples(tmp_path, columns={"image": "x"})


def test_one_file_is_a_set_too(tmp_path: Path) -> None:
    folder = write(tmp_path / "set", ROWS)
    (folder / "manifest.jsonl").rename(folder / "ocr.jsonl")
    found = read_samples(folder / "ocr.jsonl")
    assert (found.name, len(found.samples)) == ("ocr", 3)


def many(folder: Path, order: int = 1) -> Path:
    rows: list[dict[str, Any]] = [{"id": f"item {i}", "question": "q", "answers": "a", "task": "text"} for i in range(500)]
    return write(folder, rows[::order])


def test_a_limit_picks_the_same_items_whatever_the_order_and_keeps_it(tmp_path: Path) -> None:
    forward = [sample.id for sample in read_samples(many(tmp_path / "f"), limit=50, seed=3).samples]
    backward = [sample.id for sample in read_samples(many(tmp_path / "b", -1), limit=50, seed=3).samples]
    assert forward == backward[::-1]
    assert len(set(forward)) == 50
    assert forward == sorted(forward, key=lambda item: int(item.split()[1]))


def test_a_limit_spreads_over_the_file_and_follows_the_seed(tmp_path: Path) -> None:
    folder = many(tmp_path)
    first, second = ({sample.id for sample in read_samples(folder, limit=100, seed=seed).samples} for seed in (0, 1))
    assert first != second
    assert 35 <= sum(int(item.split()[1]) < 250 for item in first) <= 65


def test_a_larger_limit_contains_the_smaller_one(tmp_path: Path) -> None:
    folder = many(tmp_path)
    small, large = ({sample.id for sample in read_samples(folder, limit=limit).samples} for limit in (20, 60))
    assert small < large
    assert len(read_samples(folder, limit=10_000).samples) == 500


def test_the_digest_follows_texts_pictures_and_choice_but_not_the_folder(tmp_path: Path) -> None:
    first, second = write(tmp_path / "x", ROWS), write(tmp_path / "y", ROWS)
    expected = read_samples(first).digest
    assert read_samples(second).digest == expected
    assert read_samples(first, limit=2).digest != expected
    Image.new("RGB", (8, 8), "green").save(second / "p.png")
    assert read_samples(second).digest != expected
    assert read_samples(write(tmp_path / "z", [*ROWS[:2], {**ROWS[2], "answers": "8"}])).digest != expected


def test_a_locked_set_is_verified_and_lends_its_digests(tmp_path: Path) -> None:
    folder = write(tmp_path, ROWS)
    expected = read_samples(folder)
    locked = write_lock(folder, name="drawn", licence="CC0-1.0")
    found = read_samples(folder)
    assert found.name == "drawn"
    assert found.digest == expected.digest
    assert found.samples[0].images[0].sha256() == locked.files["p.png"].sha256
    (folder / "p.png").write_bytes((folder / "q.png").read_bytes())
    with pytest.raises(RunError, match=r"p\.png was changed"):
        read_samples(folder)


def test_videos_and_missing_pictures_fail_when_asked_for_and_not_before(tmp_path: Path) -> None:
    frames: dict[str, Any] = {"id": "v", "question": "q", "answers": "a", "task": "vqa", "video": ["p.png", "q.png"]}
    clip: dict[str, Any] = {"id": "c", "question": "q", "answers": "a", "task": "vqa", "images": ["clip.mp4"]}
    gone: dict[str, Any] = {"id": "g", "question": "q", "answers": "a", "task": "vqa", "images": ["gone.png"]}
    samples = read_samples(write(tmp_path, [frames, clip, gone])).samples
    for sample, reason in zip(samples, ["is a video", "is a video", "is missing"], strict=True):
        with pytest.raises(ItemError, match=reason):
            sample.images[0].load()
        with pytest.raises(ItemError, match=reason):
            sample.images[0].header()
    with pytest.raises(ItemError, match="is missing"):
        samples[2].images[0].sha256()


def test_a_book_in_place_of_a_word_is_not_repeated_in_the_message(tmp_path: Path) -> None:
    with pytest.raises(RunError) as error:
        read_samples(write(tmp_path, [{**ROWS[0], "question": ["word"] * 10_000}]))
    assert len(error.value.message) < 1000
