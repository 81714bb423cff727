"""The shipped set `general`: locked, disjoint, as large and as mixed as the contract says, and nobody's photograph unnamed."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from pathlib import Path

import pytest

from qvlopt.data.samples import Sample, read_samples
from qvlopt.data.sets import LockedSet, open_set
from qvlopt.recipe.shipped import builtin

CHECKOUT = Path(__file__).parents[1]
KINDS = {"chart", "code", "document", "form", "gui", "handwriting", "photo", "receipt", "scan", "sign", "slide", "table", "web"}
SCRIPTS = {"latin", "chinese", "arabic", "cyrillic"}
MEGABYTE = 1_000_000


@pytest.fixture(scope="module")
def locked() -> LockedSet:
    return open_set(builtin("builtin:general", "calib"))


@pytest.fixture(scope="module")
def splits(locked: LockedSet) -> dict[str, tuple[Sample, ...]]:
    return {split: read_samples(locked.folder, split=split).samples for split in ("calibrate", "eval")}


def pictures(samples: tuple[Sample, ...]) -> dict[str, str]:
    """SHA-256 by name."""
    return {image.name: image.sha256() for sample in samples for image in sample.images}


def test_the_lock_holds_every_file_and_the_set_stays_small(locked: LockedSet) -> None:
    found = {path.relative_to(locked.folder).as_posix() for path in locked.folder.rglob("*") if path.is_file()} - {"lock.json"}
    assert found == set(locked.files)
    assert sum(file.bytes for file in locked.files.values()) < 12 * MEGABYTE
    assert locked.name == "general"
    assert "CC-BY-2.0" in locked.licence


def test_splits_have_their_sizes_and_share_no_picture(splits: dict[str, tuple[Sample, ...]], locked: LockedSet) -> None:
    assert len(splits["calibrate"]) == len({sample.cluster for sample in splits["calibrate"]}) == 128
    assert len({sample.cluster for sample in splits["eval"]}) == 64
    calibrate, held_out = (pictures(splits[split]) for split in ("calibrate", "eval"))
    every = [*calibrate.values(), *held_out.values()]
    assert len(every) == len(set(every)) >= 192
    assert not {sample.cluster for sample in splits["calibrate"]} & {sample.cluster for sample in splits["eval"]}
    assert set(calibrate) | set(held_out) == {name for name, file in locked.files.items() if file.kind == "picture"}


def test_each_split_has_every_kind_and_every_script(splits: dict[str, tuple[Sample, ...]]) -> None:
    for samples in splits.values():
        assert {sample.stratum for sample in samples} == KINDS
        by_script = Counter(sample.dataset for sample in samples if sample.stratum != "photo")
        assert set(by_script) == SCRIPTS
        assert min(by_script.values()) >= 8
    scripts = defaultdict(set)
    for sample in (*splits["calibrate"], *splits["eval"]):
        scripts[sample.stratum].add(sample.dataset)
    assert {kind for kind, found in scripts.items() if found == SCRIPTS} == KINDS - {"photo"}


def test_pictures_have_the_sizes_of_real_ones_and_decode(splits: dict[str, tuple[Sample, ...]]) -> None:
    shapes = set()
    for sample in (*splits["calibrate"], *splits["eval"]):
        for image in sample.images:
            picture = image.load()
            assert min(picture.size) >= 448, image.name
            assert max(picture.size) <= 1600, image.name
            assert len(picture.resize((48, 48)).getcolors(48 * 48) or ()) > 1, f"{image.name} is blank"
            shapes.add(picture.size)
    ratios = sorted(width / height for width, height in shapes)
    assert ratios[0] < 0.5
    assert ratios[-1] > 2
    assert len(shapes) > 50


def test_questions_have_answers_where_they_are_drawn(splits: dict[str, tuple[Sample, ...]]) -> None:
    assert [sample.id for sample in splits["eval"] if not all(sample.answers) or not sample.answers] == []
    open_ended = {sample.stratum for sample in splits["calibrate"] if not sample.answers}
    assert open_ended == {"photo"}
    assert {sample.task for sample in splits["eval"]} >= {"ocr", "vqa", "doc", "chart"}
    assert any(len(sample.images) > 1 for sample in splits["eval"])
    assert max(Counter(sample.cluster for sample in splits["eval"]).values()) > 1


def test_notice_names_every_photograph(splits: dict[str, tuple[Sample, ...]]) -> None:
    notice = (CHECKOUT / "NOTICE").read_text(encoding="utf-8")
    photos = {image.name for samples in splits.values() for sample in samples if sample.stratum == "photo" for image in sample.images}
    named = set(re.findall(r"photo-\w+\.jpg", notice))
    assert {Path(name).name for name in photos} == named


def test_the_document_shows_the_counts_of_this_version(splits: dict[str, tuple[Sample, ...]]) -> None:
    text = (CHECKOUT / "docs" / "general.md").read_text(encoding="utf-8")
    last = next(line for line in text.splitlines() if line.startswith("| all |"))
    cells = [int(cell) for cell in last.strip("| ").split(" | ")[1:]]
    counts = [len(pictures(splits[split])) for split in ("calibrate", "eval")]
    assert cells[-3:] == [*counts, sum(counts)]
