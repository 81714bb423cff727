"""The files that each engine of `peers.py` opens, made from one checkpoint by the engine's own tools."""

from __future__ import annotations

import argparse
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from benchmarks import int8
from benchmarks.peer_engines import HERE, PEERS, Peer
from benchmarks.runtime import prepare_checkpoint, prepare_models
from qvlopt.errors import QvloptError


def prepare(folder: Path, environments: Path, wanted: Sequence[str], asked: argparse.Namespace) -> dict[str, str]:
    """Makes every engine's files that are not there yet. Returns why an engine cannot be run, by its name."""
    prepare_checkpoint(folder / "model", asked.blocks, asked.layers)
    missing: dict[str, str] = {}
    for name in wanted:
        peer = PEERS[name]
        if peer.environment and not (environments / peer.environment / "finished").exists():
            missing[name] = f"environment {peer.environment} is not made (benchmarks/peer_envs.sh)"
            continue
        try:
            if not (folder / peer.files).exists():
                MAKERS[peer.kind](Making(folder, environments, asked), Path(peer.files))
        except (QvloptError, subprocess.CalledProcessError, OSError) as error:
            missing[name] = f"its files could not be made: {_reason(error)}"
    return missing


def _reason(error: Exception) -> str:
    """Of a program the first error that it printed, since what follows is about that."""
    if not isinstance(error, subprocess.CalledProcessError):
        return str(error)
    lines = [line.strip() for line in (error.stderr or "").splitlines()]
    said = next((line for line in lines if "Error" in line.split(":")[0]), lines[-1] if lines else "it said nothing")
    return f"{Path(error.cmd[0]).name}: {said[:300]}"


class Making(NamedTuple):
    """Where files are made, by whose tools, and in what shape."""

    folder: Path
    environments: Path
    asked: argparse.Namespace


def make_ours(making: Making, files: Path) -> None:
    """The export, or an INT8 artifact as `benchmarks/int8.py` makes it."""
    folder, asked = making.folder, making.asked
    if files.name == "export":
        prepare_models(folder, asked.blocks, asked.layers, asked.threads)
    else:
        int8.prepare(folder, [files.name], asked.blocks, asked.layers, asked.threads)


def make_openvino(making: Making, files: Path) -> None:
    program = making.environments / "optimum" / "bin" / "optimum-cli"
    with _finished(making.folder / files) as place:
        words = ["export", "openvino", "--model", str(making.folder / "model"), "--task", "image-text-to-text"]
        _run([str(program), *words, "--weight-format", files.name.split("-")[1], str(place)])


def make_llama(making: Making, files: Path) -> None:
    """Written by our own script, since llama.cpp's converter is in no package, and quantised by its tool, two threads.

    The tower is in float16, the fastest of F16, Q8_0 and BF16 on a CPU without AVX-512 (4.7, 5.6 and 6.1 s for the same picture).
    """
    programs, place = making.environments / "llama" / "bin", making.folder / files.parent
    place.mkdir(exist_ok=True)
    if not (place / "mmproj.gguf").exists():
        parts = [place / f"part-{name}.gguf" for name in ("bf16", "mmproj")]
        _run([str(programs / "python"), str(HERE / "peer_gguf.py"), str(making.folder / "model"), *map(str, parts)])
        for part in parts:
            part.rename(place / part.name.removeprefix("part-"))
    part = place / f"part-{files.name}"
    _run([str(programs / "llama-quantize"), str(place / "bf16.gguf"), str(part), files.stem.upper(), "2"])
    part.rename(making.folder / files)


MAKERS: dict[str, Callable[[Making, Path], None]] = {
    "hf": lambda *_: None,
    "onnx": make_ours,
    "openvino": make_openvino,
    "llama": make_llama,
}


@contextmanager
def _finished(place: Path) -> Iterator[Path]:
    """A folder that gets its name when all of it is there."""
    with tempfile.TemporaryDirectory(dir=place.parent) as scratch:
        yield Path(scratch) / "made"
        shutil.move(Path(scratch) / "made", place)


def _run(words: Sequence[str]) -> None:
    subprocess.run(words, check=True, capture_output=True, text=True)


def files_bytes(folder: Path, peer: Peer) -> int:
    """Everything that an engine opens."""
    place = folder / peer.files
    if place.is_file():
        return place.stat().st_size + place.with_name("mmproj.gguf").stat().st_size
    return sum(path.stat().st_size for path in place.rglob("*") if path.is_file())
