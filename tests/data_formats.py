"""One small set written in every format that is read, so that tests can ask whether the format makes a difference."""

from __future__ import annotations

import base64
import csv
import io
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

Rows = Sequence[Mapping[str, Any]]

ROWS: list[dict[str, Any]] = [
    {"id": str(i), "question": f'What is\tin picture {i}?\nSay "it".', "answers": [f"été {i}", "b"], "pages": 1 + (i == 3)} for i in range(12)
]
"""`pages`: how many pictures a row shows."""

PICTURE = {"bytes": pa.binary(), "path": pa.string()}


def png(number: int) -> bytes:
    """A picture that no other number gives."""
    buffer = io.BytesIO()
    Image.new("RGB", (32 + number, 40), (number, 255 - number, 7)).save(buffer, "PNG")
    return buffer.getvalue()


def pictures_of(row: Mapping[str, Any]) -> list[bytes]:
    return [png(10 * int(row["id"]) + page) for page in range(row["pages"])]


def plain(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row's texts, without pictures."""
    return {key: value for key, value in row.items() if key != "pages"}


def files(folder: Path, rows: Rows) -> Path:
    """manifest.jsonl with pictures as files."""
    (folder / "p").mkdir(parents=True)
    lines = []
    for row in rows:
        names = [f"p/{row['id']}-{page}.png" for page in range(row["pages"])]
        for name, data in zip(names, pictures_of(row), strict=True):
            (folder / name).write_bytes(data)
        lines.append({**plain(row), "images": names})
    return jsonl(folder / "manifest.jsonl", lines).parent


def jsonl(path: Path, rows: Rows) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def base64_jsonl(folder: Path, rows: Rows, before: str = "") -> Path:
    return jsonl(folder / "set.jsonl", [{**plain(row), "images": [before + _base64(data) for data in pictures_of(row)]} for row in rows])


def data_uri_jsonl(folder: Path, rows: Rows) -> Path:
    return base64_jsonl(folder, rows, "data:image/png;base64,")


def tsv(folder: Path, rows: Rows) -> Path:
    """As pandas writes VLMEvalKit's files: minimal quoting, lists as Python spells them."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "set.tsv"
    with path.open("w", encoding="utf-8", newline="") as handle:
        writer = csv.writer(handle, delimiter="\t", lineterminator="\n")
        writer.writerow(["index", "image", "question", "answer"])
        for row in rows:
            pictures = [_base64(data) for data in pictures_of(row)]
            writer.writerow([row["id"], pictures[0] if len(pictures) == 1 else repr(pictures), row["question"], repr(row["answers"])])
    return path


def parquet(folder: Path, rows: Rows, item: Callable[[bytes], Any] = lambda data: {"bytes": data, "path": "x.png"}, kind: Any = None) -> Path:
    """Lists of the hub's objects in two shards of small row groups; `item` and `kind` say how pictures are stored instead."""
    folder.mkdir(parents=True, exist_ok=True)
    half = len(rows) // 2
    for shard, part in enumerate((rows[:half], rows[half:])):
        columns: dict[str, Any] = {
            "images": pa.array([[item(data) for data in pictures_of(row)] for row in part], pa.list_(kind or pa.struct(PICTURE))),
            "question": [row["question"] for row in part],
            "answers": [row["answers"] for row in part],
            "id": [row["id"] for row in part],
        }
        pq.write_table(pa.table(columns), folder / f"eval-{shard:05}-of-00002.parquet", row_group_size=4)
    return folder


def parquet_bytes(folder: Path, rows: Rows) -> Path:
    return parquet(folder, rows, lambda data: data, pa.binary())


def parquet_text(folder: Path, rows: Rows) -> Path:
    return parquet(folder, rows, _base64, pa.string())


def saved(folder: Path, rows: Rows) -> Path:
    """`save_to_disk` of a dictionary of splits with real picture features."""
    made = dataset(rows)
    datasets.DatasetDict({"eval": made, "other": made.select(range(2))}).save_to_disk(str(folder / "saved"))
    return folder / "saved"


def dataset(rows: Rows) -> Any:
    columns = {"images": [[{"bytes": data, "path": None} for data in pictures_of(row)] for row in rows]}
    columns |= {key: [row[key] for row in rows] for key in ("id", "question", "answers")}
    features = datasets.Features(
        {
            "images": datasets.List(datasets.Image()),
            "id": datasets.Value("string"),
            "question": datasets.Value("string"),
            "answers": datasets.List(datasets.Value("string")),
        }
    )
    return datasets.Dataset.from_dict(columns, features=features)


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


FORMATS: dict[str, Callable[[Path, Rows], Path]] = {
    "files": files,
    "base64 in jsonl": base64_jsonl,
    "data URIs in jsonl": data_uri_jsonl,
    "tsv": tsv,
    "parquet of structs": parquet,
    "parquet of bytes": parquet_bytes,
    "parquet of base64": parquet_text,
    "save_to_disk": saved,
}
