"""Every format gives the same set; what is wrong in one is told with its file and row, and nothing is loaded whole."""

from __future__ import annotations

import base64
import gc
import json
import os
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets.arrow_writer import ArrowWriter

from qvlopt.data.arrow_tables import HubSet, hub_set
from qvlopt.data.preflight import check_pictures
from qvlopt.data.samples import SampleSet, read_samples
from qvlopt.data.set_files import find_set
from qvlopt.errors import ItemError, RunError, UsageError
from tests import data_formats
from tests.data_formats import FORMATS, ROWS, png


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> SampleSet:
    return read_samples(data_formats.files(tmp_path_factory.mktemp("files") / "set", ROWS), task="vqa")


@pytest.mark.parametrize("name", FORMATS)
def test_the_format_makes_no_difference(name: str, tmp_path: Path, expected: SampleSet) -> None:
    found = read_samples(FORMATS[name](tmp_path / "set", ROWS), task="vqa", split="eval")
    assert found.digest == expected.digest
    for sample, other in zip(found.samples, expected.samples, strict=True):
        assert (sample.id, sample.question, sample.answers, sample.cluster) == (other.id, other.question, other.answers, other.cluster)
        assert [image.load().tobytes() for image in sample.images] == [image.load().tobytes() for image in other.images]
        assert [image.header() for image in sample.images] == [image.header() for image in other.images]
        assert [image.sha256() for image in sample.images] == [image.sha256() for image in other.images]
    assert len(found.samples[3].images) == 2


@pytest.mark.parametrize("name", FORMATS)
def test_a_limit_picks_the_same_items_from_every_format(name: str, tmp_path: Path, expected: SampleSet) -> None:
    found = read_samples(FORMATS[name](tmp_path / "set", ROWS), task="vqa", split="eval", limit=5, seed=1)
    assert len(found.samples) == 5
    assert {sample.id for sample in found.samples} < {sample.id for sample in expected.samples}
    assert [sample.id for sample in found.samples] == ["0", "4", "5", "6", "7"] or len({sample.id for sample in found.samples}) == 5


@pytest.mark.parametrize("name", [name for name in FORMATS if name != "files"])
@pytest.mark.parametrize("held", [0, 1 << 30])
def test_stored_pictures_can_be_asked_for_in_any_order(name: str, held: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qvlopt.data.row_groups.HELD_BYTES", held)
    samples = read_samples(FORMATS[name](tmp_path / "set", ROWS), task="vqa", split="eval").samples
    for number in (11, 0, 5, 4, 10, 3, 3, 1):
        assert samples[number].images[-1].load().width == 32 + 10 * number + (number == 3)


# one row of every published schema; pictures are ours
OBJECT = {"bytes": png(1), "path": "1.png"}
TEN = ["yes"] * 6 + ["no"] * 4
SCHEMAS: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "VQAv2": (
        "vqa",
        {
            "question_type": "is the",
            "multiple_choice_answer": "yes",
            "answers": [{"answer": answer, "answer_confidence": "maybe", "answer_id": i} for i, answer in enumerate(TEN)],
            "image_id": 9,
            "answer_type": "yes/no",
            "question_id": 9001,
            "question": "Is it?",
            "image": OBJECT,
        },
        tuple(TEN),
    ),
    "TextVQA": (
        "vqa",
        {
            "image_id": "x",
            "question_id": 34602,
            "question": "Is it?",
            "image": OBJECT,
            "image_width": 8,
            "answers": TEN,
            "ocr_tokens": ["A"],
            "set_name": "val",
        },
        tuple(TEN),
    ),
    "DocVQA": (
        "doc",
        {
            "questionId": "337",
            "question": "Is it?",
            "question_types": ["handwritten", "form"],
            "image": OBJECT,
            "docId": 1,
            "answers": ["a", "b"],
            "data_split": "val",
        },
        ("a", "b"),
    ),
    "InfographicVQA": (
        "doc",
        {"questionId": "98313", "question": "Is it?", "answers": ["a"], "operation/reasoning": ["count"], "image": OBJECT},
        ("a",),
    ),
    "ChartQA of lmms-lab": ("chart", {"type": "human_test", "question": "Is it?", "answer": "14", "image": OBJECT}, ("14",)),
    "ChartQA of HuggingFaceM4": ("chart", {"image": OBJECT, "query": "Is it?", "label": ["14"], "human_or_machine": 1}, ("14",)),
    "ChartQA of ahmed-masry": ("chart", {"imgname": "1.png", "query": "Is it?", "label": "14", "type": "human", "image": png(1)}, ("14",)),
    "OCRBench": (
        "ocrbench",
        {"dataset": "HME100k", "question": "Is it?", "question_type": "Formula", "answer": ["x ^ 2"], "image": OBJECT},
        ("x ^ 2",),
    ),
    "OCRBench v2": (
        "ocrbench",
        {"id": 5, "dataset_name": "d", "question": "Is it?", "type": "t", "answers": ["a"], "image": OBJECT, "eval": "", "content": []},
        ("a",),
    ),
}


@pytest.mark.parametrize("name", SCHEMAS)
def test_published_schemas_are_read_as_they_are(name: str, tmp_path: Path) -> None:
    task, row, answers = SCHEMAS[name]
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "validation-00000-of-00001.parquet")
    (sample,) = read_samples(tmp_path, task=task, split="validation").samples
    assert (sample.question, sample.answers, sample.task) == ("Is it?", answers, task)
    assert sample.id == str(row.get("question_id", row.get("questionId", row.get("id", 0))))
    assert sample.images[0].load().size == (33, 40)
    assert sample.dataset == row.get("dataset", row.get("dataset_name"))
    strata = {"VQAv2": "yes/no", "TextVQA": None, "DocVQA": "handwritten+form", "InfographicVQA": None, "OCRBench": "Formula", "OCRBench v2": "t"}
    strata |= {"ChartQA of lmms-lab": "human_test", "ChartQA of HuggingFaceM4": "1", "ChartQA of ahmed-masry": "human"}
    assert sample.stratum == strata[name]


def test_classes_have_their_names(tmp_path: Path) -> None:
    features = datasets.Features(
        {"query": datasets.Value("string"), "label": datasets.Value("string"), "human_or_machine": datasets.ClassLabel(names=["human", "machine"])}
    )
    made = datasets.Dataset.from_dict({"query": ["q"], "label": ["a"], "human_or_machine": [1]}, features=features)
    made.save_to_disk(str(tmp_path / "saved"))
    made.to_parquet(str(tmp_path / "set.parquet"))
    for place in (tmp_path / "saved", tmp_path / "set.parquet"):
        assert read_samples(place, task="chart").samples[0].stratum == "machine"


def tsv(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "set.tsv"
    path.write_bytes(text.encode())
    return path


PNG = base64.b64encode(png(2)).decode()


def test_a_tsv_of_vlmevalkit_with_options_and_shared_pictures(tmp_path: Path) -> None:
    text = f"index\timage\tquestion\tA\tB\tC\tanswer\tcategory\n7\t{PNG}\tWhich?\ta cat\ta dog\t\tB\tk\n8\t7\tAnd now?\tx\ty\tz\tC\tk\n"
    first, second = read_samples(tsv(tmp_path, text), task="choice").samples
    assert (first.choices, second.choices) == (("a cat", "a dog"), ("x", "y", "z"))
    assert first.question == "Which?\nA. a cat\nB. a dog"
    assert (first.answers, first.stratum) == (("B",), "k")
    assert first.cluster == second.cluster
    assert second.images[0].load().size == first.images[0].load().size == (34, 40)


@pytest.mark.parametrize(
    ("cell", "answers"),
    [("['a', \"b's\"]", ("a", "b's")), ('"[""a""]"', ("a",)), ("[12]", ("[12]",)), ("[open", ("[open",)), ("plain", ("plain",)), ("12", ("12",))],
)
def test_lists_in_a_tsv_are_read_and_never_evaluated(tmp_path: Path, cell: str, answers: tuple[str, ...]) -> None:
    assert read_samples(tsv(tmp_path, f"index\tquestion\tanswer\n1\tq\t{cell}\n"), task="text").samples[0].answers == answers


def test_code_in_a_tsv_is_text(tmp_path: Path) -> None:
    code = "[__import__('os').getcwd()]"
    assert read_samples(tsv(tmp_path, f"index\tquestion\tanswer\n1\tq\t{code}\n"), task="text").samples[0].answers == (code,)


@pytest.mark.parametrize("change", ["bom", "crlf", "no last newline", "blank lines"])
def test_line_ends_and_marks_of_a_tsv_do_not_matter(tmp_path: Path, change: str) -> None:
    text = 'index\tquestion\tanswer\n1\t"two\n\tlines"\ta\n2\tq"2\tb\n'
    expected = [(sample.question, sample.answers) for sample in read_samples(tsv(tmp_path, text), task="text").samples]
    assert expected == [("two\n\tlines", ("a",)), ('q"2', ("b",))]
    changes = {"bom": "\ufeff" + text, "no last newline": text.rstrip(), "blank lines": text.replace("2\tq", "\n\n2\tq")}
    changed = changes.get(change, text.replace('lines"\ta\n', 'lines"\ta\r\n').replace("answer\n", "answer\r\n"))
    found = read_samples(tsv(tmp_path, changed), task="text").samples
    assert [(sample.question, sample.answers) for sample in found] == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("index\tquestion\n1\tq\t\n", r"set\.tsv:2: 3 columns, the header has 2"),
        ('index\tquestion\n1\tq\n2\t"open\n3\tq\n', r"set\.tsv:3: a quoted text that begins here is never closed"),
        ("index\tprompt\n1\tq\n", r"set\.tsv:1: no column for the question \(question, query\); columns: index, prompt"),
        ("index\tquestion\n1\t\n", r"set\.tsv:2: question is None"),
        ("index\tquestion\n\tq\n", r"set\.tsv:2: id is None"),
    ],
)
def test_a_broken_tsv_is_told_by_file_and_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(RunError, match=message):
        read_samples(tsv(tmp_path, text))


def test_a_tsv_that_is_not_utf8_is_told(tmp_path: Path) -> None:
    (tmp_path / "set.tsv").write_bytes("index\tquestion\n1\té\n".encode("latin-1"))
    with pytest.raises(RunError, match=r"set\.tsv:2: byte 1 of a column is not UTF-8"):
        read_samples(tmp_path / "set.tsv")


def table(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    pq.write_table(pa.Table.from_pylist(list(rows)), path)
    return path


def test_equal_ids_across_files_are_refused_with_both_places(tmp_path: Path) -> None:
    for shard in range(2):
        table(tmp_path / f"eval-0000{shard}-of-00002.parquet", [{"id": i, "question": "q"} for i in range(2)])
    with pytest.raises(UsageError, match=r"eval-00000-of-00002\.parquet:1 and .*eval-00001-of-00002\.parquet:1: both have the id '0'"):
        read_samples(tmp_path)


def test_rows_without_ids_are_numbered_over_all_files(tmp_path: Path) -> None:
    for shard in range(2):
        table(tmp_path / f"eval-0000{shard}-of-00002.parquet", [{"question": "q"} for _ in range(2)])
    assert [sample.id for sample in read_samples(tmp_path).samples] == ["0", "1", "2", "3"]


@pytest.mark.parametrize("name", ["../x.png", "/etc/passwd", "C:\\x.png"])
@pytest.mark.parametrize("kind", ["text", "object"])
def test_pictures_outside_the_folder_are_refused_with_the_row(tmp_path: Path, name: str, kind: str) -> None:
    image: Any = name if kind == "text" else {"bytes": None, "path": name}
    path = table(tmp_path / "set.parquet", [{"question": "q", "image": None}, {"question": "q", "image": image}])
    with pytest.raises(UsageError, match=r"set\.parquet:2: the picture"):
        read_samples(path)


def test_paths_in_a_table_are_relative_to_its_folder(tmp_path: Path) -> None:
    (tmp_path / "p.png").write_bytes(png(3))
    path = table(tmp_path / "set.parquet", [{"question": "q", "image": {"bytes": None, "path": "p.png"}}, {"question": "q", "image": None}])
    first, second = read_samples(path).samples
    assert first.images[0].load().size == (35, 40)
    assert second.images == ()


@pytest.mark.parametrize("image", [b"", b"no picture", {"bytes": b"", "path": None}, "iVBORw0KGgo" + "!" * 80, "iVBORw0KGgo" + "A" * 80])
def test_a_damaged_picture_fails_its_item_only(tmp_path: Path, image: object) -> None:
    kind = {"bytes": pa.binary(), "path": pa.string()}
    column = pa.array([image, image], pa.struct(kind) if isinstance(image, dict) else None)
    pq.write_table(pa.table({"question": ["q", "q"], "image": column, "id": ["a", "b"]}), tmp_path / "set.parquet")
    checked = check_pictures(read_samples(tmp_path / "set.parquet").samples)
    assert [item.id for item in checked.skipped] == ["a", "b"]
    assert all("set.parquet:" in item.reason or "is missing" in item.reason or "!" in item.reason for item in checked.skipped)


def test_columns_map_a_tables_names(tmp_path: Path) -> None:
    path = table(tmp_path / "set.parquet", [{"frage": "q?", "gold": "a", "answer": "no", "type": "x"}])
    columns = {"question": "frage", "answers": "gold"}
    assert read_samples(path, columns=columns).samples[0].answers == ("a",)
    with pytest.raises(UsageError, match="there is no column 'bild' for images; columns: frage, gold, answer, type"):
        read_samples(path, columns={**columns, "images": "bild"})
    with pytest.raises(RunError, match="no column for the question"):
        read_samples(path)


def test_boxes_become_texts_with_their_unit(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"id": "a", "box": [1, 2.5, 3, 4]},
        {"id": "b", "box_xywh": [42, 1102, 197, 70]},
        {"id": "c", "box_1000": [[1, 2, 3, 4], [5, 6, 7, 8]]},
    ]
    path = data_formats.jsonl(tmp_path / "set.jsonl", [{**row, "question": "q"} for row in rows])
    answers = [sample.answers for sample in read_samples(path, task="grounding").samples]
    assert answers == [("[1, 2.5, 3, 4]",), ("[42, 1102, 238, 1171] px",), ("[1, 2, 3, 4] /1000", "[5, 6, 7, 8] /1000")]
    data_formats.jsonl(path, [{"id": "a", "question": "q", "box": [1, 2, 3]}])
    with pytest.raises(RunError, match=r"set\.jsonl:1: box is \[1, 2, 3\], expected four numbers"):
        read_samples(path, task="grounding")


def test_the_split_chooses_the_shards(tmp_path: Path) -> None:
    for split in ("train", "validation"):
        table(tmp_path / f"{split}-00000-of-00001.parquet", [{"question": split}])
    assert [sample.question for sample in read_samples(tmp_path, split="validation").samples] == ["validation"]
    with pytest.raises(UsageError, match="has several splits or configurations; found train, validation"):
        read_samples(tmp_path)
    with pytest.raises(UsageError, match="has no files of the split 'test'; found train, validation"):
        read_samples(tmp_path, split="test")


def test_a_file_that_names_its_split_stands_for_no_other(tmp_path: Path) -> None:
    table(tmp_path / "train-00000-of-00001.parquet", [{"question": "q"}])
    with pytest.raises(UsageError, match="no files of the split 'validation'; found train"):
        read_samples(tmp_path, split="validation")


def test_configurations_in_folders_are_told_apart(tmp_path: Path) -> None:
    for config in ("DocVQA", "InfographicVQA"):
        (tmp_path / config).mkdir()
        table(tmp_path / config / "validation-00000-of-00001.parquet", [{"question": config}])
    with pytest.raises(UsageError, match="found DocVQA/validation, InfographicVQA/validation"):
        read_samples(tmp_path, split="validation")
    assert read_samples(tmp_path, split="DocVQA/validation").samples[0].question == "DocVQA"
    assert read_samples(tmp_path / "InfographicVQA", split="validation").samples[0].question == "InfographicVQA"


def test_what_is_no_set_is_said(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="holds no set"):
        read_samples(tmp_path)
    (tmp_path / "x.csv").write_text("a,b\n")
    with pytest.raises(UsageError, match=r"x\.csv: files of this kind are not read"):
        read_samples(tmp_path / "x.csv")
    (tmp_path / "x.parquet").write_bytes(b"PAR1 broken")
    with pytest.raises(RunError, match=r"x\.parquet cannot be read as parquet"):
        read_samples(tmp_path)
    (tmp_path / "x.tsv").write_text("question\n")
    with pytest.raises(UsageError, match=r"holds files of several kinds: \.parquet, \.tsv"):
        read_samples(tmp_path)


def test_a_damaged_saved_set_is_told(tmp_path: Path) -> None:
    place = data_formats.saved(tmp_path, ROWS)
    with pytest.raises(UsageError, match="has several splits; splits: eval, other"):
        read_samples(place)
    with pytest.raises(UsageError, match="has no split 'test'"):
        read_samples(place, split="test")
    next((place / "eval").glob("*.arrow")).write_bytes(b"broken")
    with pytest.raises(RunError, match="cannot be read as a saved data set"):
        read_samples(place, split="eval")


def test_a_parquet_file_that_is_damaged_in_its_pages_fails_with_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qvlopt.data.row_groups.HELD_BYTES", 0)
    place = data_formats.parquet_bytes(tmp_path, ROWS) / "eval-00000-of-00002.parquet"
    samples = read_samples(place).samples
    data = bytearray(place.read_bytes())
    data[4:200] = os.urandom(196)
    place.write_bytes(bytes(data))
    with pytest.raises(ItemError, match=r"eval-00000-of-00002\.parquet:1"):
        samples[0].images[0].load()


@pytest.mark.parametrize(("held", "least", "most"), [(0, 0, 24), (1 << 30, 40, 48)])
def test_a_large_set_holds_no_pictures_and_a_small_one_is_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, held: int, least: int, most: int
) -> None:
    """40 MB of pictures in one row group of pages of 1 MB; `least` and `most` MB stay in memory."""
    import pyarrow

    monkeypatch.setattr("qvlopt.data.row_groups.HELD_BYTES", held)

    noise = os.urandom(1 << 20)
    rows = {"id": [str(i) for i in range(40)], "question": ["q"] * 40, "image": [noise[i:] + noise[:i] for i in range(40)]}
    pq.write_table(pa.table(rows), tmp_path / "set.parquet", row_group_size=40, compression="snappy", write_batch_size=1)
    del rows
    gc.collect()  # other tests' tables, which would count
    before = pyarrow.total_allocated_bytes()
    tracemalloc.start()
    samples = read_samples(tmp_path / "set.parquet").samples
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len({sample.images[0].digest for sample in samples}) == 40
    assert peak < 8 << 20
    assert least << 20 <= pyarrow.total_allocated_bytes() - before < most << 20


def prepared_cache(cache: Path, made: Any) -> None:
    """What the datasets library leaves of `org/name` in its cache, split `eval`, commit 0123abc."""
    place = cache / "org___name" / "default" / "0.0.0" / "0123abc"
    place.mkdir(parents=True)
    with ArrowWriter(features=made.features, path=str(place / "name-eval.arrow")) as writer:
        for part in made.with_format("arrow").iter(100):
            writer.write_table(part)
        items, size = writer.finalize()
    splits = {"eval": {"name": "eval", "num_bytes": size, "num_examples": items, "dataset_name": "name"}}
    names = {"config_name": "default", "dataset_name": "name", "builder_name": "parquet", "version": "0.0.0"}
    datasets.DatasetInfo(features=made.features, splits=splits, **names).write_to_directory(str(place))


def test_a_hub_id_is_read_from_the_cache_when_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, expected: SampleSet) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    prepared_cache(tmp_path, data_formats.dataset(ROWS))
    for wanted in (HubSet("org/name", None, None), HubSet("org/name", None, "0123abc")):
        found = read_samples(wanted, task="vqa", split="eval")
        assert found.digest == expected.digest
        assert found.samples[3].origin == "org/name@0123abc/eval:4"
    with pytest.raises(UsageError, match="org/name has no split 'test'; splits: eval"):
        read_samples(HubSet("org/name", None, None), split="test")
    with pytest.raises(UsageError, match="org/name:other"):
        read_samples(HubSet("org/name", "other", None), split="eval")
    with pytest.raises(RunError, match="org/name@v2: the hub cannot be asked, and the cache holds 0123abc"):
        read_samples(HubSet("org/name", None, "v2"), split="eval")
    with pytest.raises(RunError, match=f"not in the cache {tmp_path}: HF_HUB_OFFLINE is set"):
        read_samples(HubSet("org/gone", None, None), split="eval")


def test_a_dry_run_reads_the_cache_and_downloads_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, expected: SampleSet) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.delenv("HF_HUB_OFFLINE")
    prepared_cache(tmp_path, data_formats.dataset(ROWS))
    found = find_set("org/name", tmp_path, download=False)
    assert found == HubSet("org/name", None, None, download=False)
    assert read_samples(found, task="vqa", split="eval").digest == expected.digest
    with pytest.raises(RunError, match="a dry run downloads nothing"):
        read_samples(HubSet("org/gone", None, None, download=False), split="eval")
    assert datasets.config.HF_HUB_OFFLINE is False


def test_a_local_folder_goes_before_a_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert find_set("org/name", tmp_path) == HubSet("org/name", None, None)
    assert find_set("data/gone.parquet", tmp_path) is None
    (tmp_path / "org" / "name").mkdir(parents=True)
    assert find_set("org/name", tmp_path) == tmp_path / "org" / "name"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("lmms-lab/DocVQA", HubSet("lmms-lab/DocVQA", None, None)),
        ("lmms-lab/DocVQA:DocVQA@refs/pr/1", HubSet("lmms-lab/DocVQA", "DocVQA", "refs/pr/1")),
        ("a/b@0123abc", HubSet("a/b", None, "0123abc")),
        ("gone", None),
        ("a/b/c", None),
        ("../a", None),
        ("/a/b", None),
        ("", None),
    ],
)
def test_how_hub_ids_are_written(text: str, expected: HubSet | None) -> None:
    assert hub_set(text) == expected
    assert expected is None or str(expected) == text


def test_jsonl_with_objects_of_bytes_and_path(tmp_path: Path) -> None:
    (tmp_path / "p.png").write_bytes(png(3))
    images = [{"bytes": PNG}, {"bytes": None, "path": "p.png"}]
    path = data_formats.jsonl(tmp_path / "set.jsonl", [{"id": "a", "question": "q", "answers": "a", "images": images}])
    assert [image.load().width for image in read_samples(path).samples[0].images] == [34, 35]


def test_a_jsonl_file_that_changed_meanwhile_fails_the_item(tmp_path: Path) -> None:
    path = data_formats.base64_jsonl(tmp_path, ROWS)
    sample = read_samples(path).samples[5]
    path.write_text(json.dumps({"id": 1}) + "\n")
    with pytest.raises(ItemError, match="was changed while it was in use"):
        sample.images[0].load()
