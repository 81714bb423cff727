"""Output folders are complete or absent, whatever ends the run."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from qvlopt.artifact.folder import existing_state, is_done, require_space, write_folder
from qvlopt.artifact.lock import locked
from qvlopt.artifact.manifest import MANIFEST, Manifest, read_manifest, write_manifest
from qvlopt.artifact.tensors import TensorWriter
from qvlopt.errors import RunError, UsageError

DIGEST = "1" * 64


def fill(folder: Path, *, digest: str = DIGEST, weights: bytes = b"weights") -> None:
    (folder / "sub").mkdir()
    (folder / "sub" / "settings.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(weights)
    write_manifest(folder, Manifest(kind="awq", digest=digest, recipe={}))


def make(destination: Path, *, digest: str = DIGEST, weights: bytes = b"weights", overwrite: bool = False) -> None:
    with write_folder(destination, digest=digest, overwrite=overwrite) as temporary:
        fill(temporary, digest=digest, weights=weights)


def content(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def dead_pid() -> int:
    """The id of a process that has ended."""
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    return child.pid


def test_a_finished_folder_has_its_name_and_nothing_is_beside_it(tmp_path: Path) -> None:
    make(tmp_path / "out")
    assert names(tmp_path) == ["out"]
    assert set(content(tmp_path / "out")) == {MANIFEST, "model.safetensors", "sub/settings.json"}


def test_the_folder_is_written_beside_and_appears_at_the_end(tmp_path: Path) -> None:
    with write_folder(tmp_path / "out", digest=DIGEST) as temporary:
        assert temporary.parent == tmp_path
        assert temporary.name.startswith(f".out.tmp-{os.getpid()}-")
        fill(temporary)
        assert not (tmp_path / "out").exists()
    assert (tmp_path / "out").is_dir()


def test_every_file_and_folder_is_synced_before_the_name_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[tuple[str, bool]] = []
    fsync = os.fsync

    def record(descriptor: int) -> None:
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        synced.append((Path(path).name if ".tmp-" not in Path(path).name else "TEMPORARY", (tmp_path / "out").exists()))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", record)
    make(tmp_path / "out")
    assert {name for name, named in synced if not named} == {"settings.json", "sub", "model.safetensors", MANIFEST, "TEMPORARY"}
    assert synced[-1] == (tmp_path.name, True)


def test_missing_parents_are_made_and_go_again_after_an_error(tmp_path: Path) -> None:
    with pytest.raises(KeyError), write_folder(tmp_path / "a" / "b" / "out", digest=DIGEST):
        raise KeyError
    assert names(tmp_path) == []
    make(tmp_path / "a" / "b" / "out")
    assert names(tmp_path / "a" / "b") == ["out"]


def test_an_empty_folder_is_free(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    make(tmp_path / "out")
    assert (tmp_path / "out" / MANIFEST).exists()


@pytest.mark.parametrize("error", [KeyError, KeyboardInterrupt, SystemExit, MemoryError])
def test_after_any_error_nothing_is_left(tmp_path: Path, error: type[BaseException]) -> None:
    def broken() -> None:
        with write_folder(tmp_path / "out", digest=DIGEST) as temporary:
            fill(temporary)
            raise error

    with pytest.raises(error):
        broken()
    assert names(tmp_path) == []


def test_a_folder_without_its_manifest_is_not_finished(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"no readable qvlopt\.json"), write_folder(tmp_path / "out", digest=DIGEST) as temporary:
        (temporary / "model.safetensors").write_bytes(b"x")
    with pytest.raises(RunError, match=r"has digest 2+, expected 1+"), write_folder(tmp_path / "out", digest=DIGEST) as temporary:
        fill(temporary, digest="2" * 64)
    assert names(tmp_path) == []


@pytest.mark.parametrize(("code", "said"), [(errno.ENOSPC, "the disk is full"), (errno.EDQUOT, "quota"), (errno.EFBIG, "larger than allowed")])
def test_a_full_disk_leaves_nothing_and_is_status_5(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, said: str) -> None:
    pwrite = os.pwrite

    def full(descriptor: int, data: bytes, position: int) -> int:
        if position > 500:
            raise OSError(code, os.strerror(code))
        return pwrite(descriptor, data[:100], position)

    monkeypatch.setattr(os, "pwrite", full)

    def write() -> None:
        with write_folder(tmp_path / "out", digest=DIGEST) as temporary, TensorWriter(temporary / "m.safetensors", [("t", "U8", (1000,))]) as writer:
            writer.write("t", bytes(1000))

    with pytest.raises(RunError, match=rf"out was not written: .*{said}") as caught:
        write()
    assert caught.value.exit_code == 5
    assert names(tmp_path) == []


def test_an_error_of_the_block_that_is_not_the_disk_stays_what_it_was(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), write_folder(tmp_path / "out", digest=DIGEST) as temporary:
        (temporary / "absent").read_bytes()
    assert names(tmp_path) == []


def test_a_real_limit_on_file_sizes_leaves_nothing(tmp_path: Path) -> None:
    program = run_in_child(
        tmp_path / "out",
        """
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        try:
            with write_folder(out, digest="d") as temporary, TensorWriter(temporary / "m", [("t", "U8", (1_000_000,))]) as writer:
                writer.write("t", bytes(1_000_000))
        except RunError as error:
            print(error.message)
        """,
    )
    said, _ = program.communicate()
    assert "out was not written: a file became larger than allowed" in said
    assert names(tmp_path) == []


def run_in_child(out: Path, body: str) -> subprocess.Popen[str]:
    lines = [line.removeprefix(" " * 8) for line in body.splitlines()]
    header = [
        "import os, resource, signal, sys",
        "from pathlib import Path",
        "from qvlopt.artifact.folder import write_folder",
        "from qvlopt.artifact.tensors import TensorWriter",
        "from qvlopt.errors import RunError",
        f"out = Path({str(out)!r})",
    ]
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    return subprocess.Popen([sys.executable, "-c", "\n".join(header + lines)], stdout=subprocess.PIPE, text=True, env=environment)


STUCK = """
        with write_folder(out, digest="d") as temporary, TensorWriter(temporary / "m", [("a", "U8", (9,)), ("b", "U8", (9,))]) as writer:
            writer.write("a", bytes(9))
            print("half", flush=True)
            signal.pause()
        """


def test_an_interrupt_in_the_middle_leaves_nothing(tmp_path: Path) -> None:
    child = run_in_child(tmp_path / "deep" / "out", STUCK)
    assert child.stdout is not None
    assert child.stdout.readline() == "half\n"
    assert len(names(tmp_path / "deep")) == 2
    child.send_signal(signal.SIGINT)
    child.communicate()
    assert child.returncode != 0
    assert names(tmp_path) == []


def test_a_killed_run_leaves_no_folder_and_the_next_one_cleans_up(tmp_path: Path) -> None:
    child = run_in_child(tmp_path / "out", STUCK)
    assert child.stdout is not None
    child.stdout.readline()
    child.kill()
    child.communicate()
    assert not (tmp_path / "out").exists()
    assert len(names(tmp_path)) == 2
    make(tmp_path / "out")
    assert names(tmp_path) == ["out"]


def test_a_second_run_is_refused_while_the_first_one_writes(tmp_path: Path) -> None:
    child = run_in_child(tmp_path / "out", STUCK)
    assert child.stdout is not None
    child.stdout.readline()
    before = names(tmp_path)
    with pytest.raises(RunError, match=rf"out is being written by another run \(process {child.pid}\)"):
        make(tmp_path / "out")
    assert names(tmp_path) == before
    child.kill()
    child.communicate()


def test_two_outputs_side_by_side_do_not_disturb_each_other(tmp_path: Path) -> None:
    with write_folder(tmp_path / "out", digest=DIGEST) as first:
        make(tmp_path / "out2")
        make(tmp_path / "out.tmp-1-a")
        assert first.exists()
        fill(first)
    assert names(tmp_path) == ["out", "out.tmp-1-a", "out2"]


def test_a_lock_that_was_unlinked_while_waiting_is_not_taken_for_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = tmp_path / ".out.lock"
    flock, calls = fcntl.flock, []

    def unlinked_once(descriptor: int, operation: int) -> None:
        flock(descriptor, operation)
        calls.append(operation)
        if len(calls) == 1:
            lock.unlink()

    monkeypatch.setattr(fcntl, "flock", unlinked_once)
    with write_folder(tmp_path / "out", digest=DIGEST) as temporary:
        assert lock.exists()
        fill(temporary)
    assert len(calls) == 2


def test_temporaries_of_the_dead_go_and_those_of_the_living_stay(tmp_path: Path, dead_pid: int) -> None:
    alive, of_another_output = f".out.tmp-{os.getppid()}-0b", f".other.tmp-{dead_pid}-0c"
    unlike = [f".out.tmp-{dead_pid}-xyz", f".out.tmp-{dead_pid}", f"out.tmp-{dead_pid}-0a"]
    for name in [f".out.tmp-{dead_pid}-0a", alive, of_another_output, *unlike]:
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("x")
    (tmp_path / f".out.tmp-{dead_pid}-0d").symlink_to(tmp_path / of_another_output)
    make(tmp_path / "out")
    assert names(tmp_path) == sorted(["out", alive, of_another_output, *unlike, f".out.tmp-{dead_pid}-0d"])
    assert (tmp_path / of_another_output / "file").exists()


def test_a_leftover_with_our_own_process_id_goes_too(tmp_path: Path) -> None:
    (tmp_path / f".out.tmp-{os.getpid()}-0a").mkdir()
    make(tmp_path / "out")
    assert names(tmp_path) == ["out"]


def test_an_output_that_exists_names_the_ways_on(tmp_path: Path) -> None:
    make(tmp_path / "out", digest="2" * 64)
    with pytest.raises(UsageError, match="holds another result: awq with digest 222222222222, expected 111111111111") as caught:
        make(tmp_path / "out")
    assert caught.value.exit_code == 2
    assert "--overwrite" in (caught.value.hint or "")
    assert "--resume" in (caught.value.hint or "")
    assert read_manifest(tmp_path / "out").digest == "2" * 64
    assert names(tmp_path) == ["out"]


@pytest.mark.parametrize("overwrite", [True, False])
def test_a_folder_or_file_that_is_no_artifact_is_never_replaced(tmp_path: Path, overwrite: bool) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "a.jpg").write_text("precious")
    (tmp_path / "file").write_text("precious")
    for name in ["photos", "file"]:
        with pytest.raises(UsageError) as caught:
            make(tmp_path / name, overwrite=overwrite)
        assert caught.value.exit_code == 2
    assert content(tmp_path) == {"photos/a.jpg": b"precious", "file": b"precious"}


def test_what_appears_during_the_run_is_not_replaced(tmp_path: Path) -> None:
    def write() -> None:
        with write_folder(tmp_path / "out", digest=DIGEST) as temporary:
            fill(temporary)
            shutil.copytree(temporary, tmp_path / "out")

    with pytest.raises(UsageError, match="holds this result already"):
        write()
    assert names(tmp_path) == ["out"]


@pytest.mark.parametrize("digest", [DIGEST, "2" * 64])
def test_overwrite_replaces_an_unchanged_artifact_whole(tmp_path: Path, digest: str) -> None:
    with write_folder(tmp_path / "out", digest=digest) as temporary:
        fill(temporary, digest=digest)
        (temporary / "only in the old one").write_text("x")
        write_manifest(temporary, read_manifest(temporary))
    make(tmp_path / "out", weights=b"new", overwrite=True)
    assert names(tmp_path) == ["out"]
    assert content(tmp_path / "out")["model.safetensors"] == b"new"
    assert "only in the old one" not in content(tmp_path / "out")


def test_overwrite_that_fails_keeps_the_old_artifact(tmp_path: Path) -> None:
    make(tmp_path / "out", weights=b"old")
    before = content(tmp_path / "out")

    def write() -> None:
        with write_folder(tmp_path / "out", digest=DIGEST, overwrite=True) as temporary:
            fill(temporary)
            raise KeyError

    with pytest.raises(KeyError):
        write()
    assert content(tmp_path / "out") == before
    assert names(tmp_path) == ["out"]


class Forgery(NamedTuple):
    """A change to an artifact after which it must not be removed; `said` is part of the message."""

    change: Callable[[Path], object]
    said: str


def list_more(name: str, *, sha256: str = "", size: int = 0) -> Callable[[Path], object]:
    """Adds a file to the manifest without a check of the name."""

    def change(out: Path) -> None:
        manifest = (out / MANIFEST).read_text()
        entry = f'"{name}": {{"sha256": "{sha256}", "bytes": {size}}}, '
        (out / MANIFEST).write_text(manifest.replace('"files": {', f'"files": {{{entry}'))

    return change


def swap_for_link(out: Path) -> None:
    (out / "model.safetensors").unlink()
    (out / "model.safetensors").symlink_to(out.parent / "victim")


def swap_folder_for_link(out: Path) -> None:
    shutil.move(out / "sub", out.parent / "elsewhere")
    (out / "sub").symlink_to(out.parent / "elsewhere")


def swap_manifest_for_link(out: Path) -> None:
    shutil.copy(out / MANIFEST, out / "copy")
    (out / MANIFEST).unlink()
    (out / MANIFEST).symlink_to("copy")


FORGED = {
    "a file of the user": Forgery(lambda out: (out / "notes.txt").write_text("mine"), "notes.txt (not listed)"),
    "a file of the user deep inside": Forgery(lambda out: (out / "sub" / "notes").write_text("mine"), "sub/notes (not listed)"),
    "an empty folder of the user": Forgery(lambda out: (out / "mine").mkdir(), "mine/ (not listed)"),
    "an edited file": Forgery(lambda out: (out / "model.safetensors").write_bytes(b"w3ights"), "model.safetensors (changed since"),
    "a longer file": Forgery(lambda out: (out / "model.safetensors").write_bytes(b"weights and more"), "model.safetensors (changed since"),
    "a link to a file outside": Forgery(swap_for_link, "model.safetensors (no regular file)"),
    "a link to a folder outside": Forgery(swap_folder_for_link, "sub (no regular file)"),
    "a manifest that is a link": Forgery(swap_manifest_for_link, "qvlopt.json (no regular file)"),
    "a pipe": Forgery(lambda out: os.mkfifo(out / "pipe"), "pipe (no regular file)"),
    "a listed path that climbs": Forgery(list_more("../victim", size=8), "leaves the folder"),
    "a listed absolute path": Forgery(list_more("/etc/hostname"), "leaves the folder"),
    "a listed user's file with another digest": Forgery(
        lambda out: ((out / "notes").write_text("mine"), list_more("notes", sha256="0" * 64, size=4)(out)), "notes (changed since"
    ),
    "no manifest": Forgery(lambda out: (out / MANIFEST).unlink(), "no readable qvlopt.json"),
    "a broken manifest": Forgery(lambda out: (out / MANIFEST).write_text("{"), "qvlopt.json is broken"),
}


@pytest.mark.parametrize("case", FORGED)
def test_overwrite_refuses_and_removes_nothing_when_the_folder_is_not_what_its_manifest_says(tmp_path: Path, case: str) -> None:
    (tmp_path / "victim").write_text("precious")
    make(tmp_path / "out")
    FORGED[case].change(tmp_path / "out")
    before = content(tmp_path)
    with pytest.raises(UsageError) as caught:
        make(tmp_path / "out", overwrite=True)
    assert caught.value.exit_code == 2
    assert FORGED[case].said in caught.value.message
    assert content(tmp_path) == before
    assert not [name for name in names(tmp_path) if name.startswith(".out")]


def test_overwrite_refuses_before_any_work_is_done(tmp_path: Path) -> None:
    make(tmp_path / "out")
    (tmp_path / "out" / "notes").write_text("mine")
    with pytest.raises(UsageError), write_folder(tmp_path / "out", digest=DIGEST, overwrite=True):
        pytest.fail("the block was entered")


def test_overwrite_refuses_a_file_that_came_during_the_run(tmp_path: Path) -> None:
    make(tmp_path / "out", weights=b"old")

    def write() -> None:
        with write_folder(tmp_path / "out", digest=DIGEST, overwrite=True) as temporary:
            fill(temporary)
            (tmp_path / "out" / "notes").write_text("mine")

    with pytest.raises(UsageError, match=r"notes \(not listed\)"):
        write()
    assert content(tmp_path / "out")["notes"] == b"mine"
    assert content(tmp_path / "out")["model.safetensors"] == b"old"
    assert names(tmp_path) == ["out"]


def test_files_that_the_user_removed_are_no_obstacle_to_overwrite(tmp_path: Path) -> None:
    make(tmp_path / "out")
    (tmp_path / "out" / "model.safetensors").unlink()
    make(tmp_path / "out", weights=b"new", overwrite=True)
    assert content(tmp_path / "out")["model.safetensors"] == b"new"


@pytest.mark.parametrize("step", [1, 2])
def test_an_interrupt_between_the_renames_leaves_one_whole_artifact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    make(tmp_path / "out", weights=b"old")
    rename, calls = Path.rename, []

    def interrupted(source: Path, target: Path) -> Path:
        calls.append(target)
        done = rename(source, target)
        if len(calls) == step:
            raise KeyboardInterrupt
        return done

    monkeypatch.setattr(Path, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt):
        make(tmp_path / "out", weights=b"new", overwrite=True)
    assert names(tmp_path) == ["out"]
    assert content(tmp_path / "out")["model.safetensors"] == (b"old" if step == 1 else b"new")


def test_an_artifact_that_lost_its_name_in_a_crash_gets_it_back(tmp_path: Path, dead_pid: int) -> None:
    make(tmp_path / "out")
    (tmp_path / "out").rename(tmp_path / f".out.old-{dead_pid}-0a")
    with pytest.raises(UsageError, match="holds this result already"):
        make(tmp_path / "out")
    assert names(tmp_path) == ["out"]
    assert existing_state(tmp_path / "out", DIGEST) == "same"


def test_a_link_named_like_an_old_artifact_is_left_alone(tmp_path: Path, dead_pid: int) -> None:
    make(tmp_path / "elsewhere")
    (tmp_path / f".out.old-{dead_pid}-0a").symlink_to(tmp_path / "elsewhere")
    make(tmp_path / "out", digest="2" * 64)
    assert names(tmp_path) == [f".out.old-{dead_pid}-0a", "elsewhere", "out"]
    assert existing_state(tmp_path / "elsewhere", DIGEST) == "same"


def test_an_old_artifact_that_a_crash_left_beside_goes_unless_it_holds_more(tmp_path: Path, dead_pid: int) -> None:
    for name in ["0a", "0b"]:
        make(tmp_path / "elsewhere" / "out")
        (tmp_path / "elsewhere" / "out").rename(tmp_path / f".out.old-{dead_pid}-{name}")
    (tmp_path / f".out.old-{dead_pid}-0b" / "notes").write_text("mine")
    (tmp_path / "out").mkdir()
    make(tmp_path / "out")
    assert names(tmp_path) == [f".out.old-{dead_pid}-0b", "elsewhere", "out"]


def test_a_destination_that_is_a_link_is_written_where_it_leads(tmp_path: Path) -> None:
    (tmp_path / "big disk").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "big disk" / "awq")
    make(tmp_path / "out")
    assert (tmp_path / "out").is_symlink()
    assert (tmp_path / "big disk" / "awq" / MANIFEST).exists()


def test_a_place_that_cannot_be_written_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(RunError, match="Not a directory"):
        make(tmp_path / "file" / "out")


def test_states_of_an_output(tmp_path: Path) -> None:
    assert existing_state(tmp_path / "out", DIGEST) == "absent"
    (tmp_path / "out").mkdir()
    assert existing_state(tmp_path / "out", DIGEST) == "absent"
    make(tmp_path / "out")
    assert existing_state(tmp_path / "out", DIGEST) == "same"
    assert existing_state(tmp_path / "out", "2" * 64) == "other"
    (tmp_path / "file").write_text("x")
    assert existing_state(tmp_path / "file", DIGEST) == "other"


@pytest.mark.parametrize(
    "damage",
    [
        lambda out: (out / "model.safetensors").unlink(),
        lambda out: (out / "model.safetensors").write_bytes(b"w"),
        lambda out: (out / "model-00001-of-00002.safetensors").write_bytes(b"foreign"),
        lambda out: (out / MANIFEST).write_text("{"),
    ],
    ids=["missing", "cut", "foreign weights", "broken manifest"],
)
def test_a_damaged_result_is_not_the_same(tmp_path: Path, damage: Callable[[Path], object]) -> None:
    make(tmp_path / "out")
    damage(tmp_path / "out")
    assert existing_state(tmp_path / "out", DIGEST) == "other"


def test_a_flipped_bit_is_noticed_and_an_edited_card_is_none_of_our_business(tmp_path: Path) -> None:
    make(tmp_path / "out", weights=b"weights")
    (tmp_path / "out" / "README.md").write_text("card")
    write_manifest(tmp_path / "out", read_manifest(tmp_path / "out"))
    (tmp_path / "out" / "README.md").write_text("my own words")
    assert existing_state(tmp_path / "out", DIGEST) == "same"
    (tmp_path / "out" / "model.safetensors").write_bytes(b"wEights")
    assert existing_state(tmp_path / "out", DIGEST) == "other"
    with pytest.raises(UsageError, match=r"but damaged: model\.safetensors has another content") as caught:
        is_done(tmp_path / "out", DIGEST, overwrite=False)
    assert "Move it away" in (caught.value.hint or "")


@pytest.mark.parametrize("overwrite", [True, False])
def test_what_is_done_is_known_before_any_work(tmp_path: Path, overwrite: bool) -> None:
    assert not is_done(tmp_path / "out", DIGEST, overwrite=overwrite)
    make(tmp_path / "out")
    assert is_done(tmp_path / "out", DIGEST, overwrite=overwrite)
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "a.jpg").touch()
    with pytest.raises(UsageError, match="photos"):
        is_done(tmp_path / "photos", DIGEST, overwrite=overwrite)


def test_what_killed_runs_left_beside_a_finished_result_goes_too(tmp_path: Path, dead_pid: int) -> None:
    make(tmp_path / "out")
    (tmp_path / f".out.tmp-{dead_pid}-0a").mkdir()
    shutil.copytree(tmp_path / "out", tmp_path / f".out.old-{dead_pid}-0b")
    (tmp_path / f".out.old-{dead_pid}-0b" / "model.safetensors").unlink()
    (tmp_path / ".out.lock").touch()
    assert is_done(tmp_path / "out", DIGEST, overwrite=False)
    assert names(tmp_path) == ["out"]


def test_a_finished_result_is_known_while_another_run_holds_it(tmp_path: Path) -> None:
    make(tmp_path / "out")
    with locked(tmp_path / "out"):
        assert is_done(tmp_path / "out", DIGEST, overwrite=False)


def test_another_result_is_refused_before_any_work_unless_it_may_go(tmp_path: Path) -> None:
    make(tmp_path / "out", digest="2" * 64)
    with pytest.raises(UsageError, match="holds another result") as caught:
        is_done(tmp_path / "out", DIGEST, overwrite=False)
    assert "--overwrite" in (caught.value.hint or "")
    assert not is_done(tmp_path / "out", DIGEST, overwrite=True)


def test_too_little_space_is_found_before_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Path] = []

    def usage(path: Path) -> object:
        asked.append(path)
        return shutil._ntuple_diskusage(total=10**10, used=0, free=2 * 10**9)

    monkeypatch.setattr(shutil, "disk_usage", usage)
    require_space(tmp_path / "not" / "there", 2 * 10**9)
    assert asked == [tmp_path]
    with pytest.raises(RunError, match=r"needs 2\.50 GB, its disk has 2\.00 GB free"):
        require_space(tmp_path / "not" / "there", 25 * 10**8)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: shutil._ntuple_diskusage(total=10**10, used=0, free=0))
    with pytest.raises(RunError, match=r"needs 3\.00 MB, its disk has 0\.00 MB free"):
        require_space(tmp_path, 3 * 10**6)


def test_unusual_names_work(tmp_path: Path) -> None:
    make(tmp_path / "模型 für [alle] (é)*")
    make(tmp_path / "模型 für [alle] (é)*", weights=b"new", overwrite=True)
    assert names(tmp_path) == ["模型 für [alle] (é)*"]
