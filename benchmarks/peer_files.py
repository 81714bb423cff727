"""The files that each engine of `peers.py` opens, made from one checkpoint by the engine's own tools."""

from __future__ import annotations

import argparse
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from benchmarks.peer_engines import HERE, PEERS, Peer
from benchmarks.runtime import prepare_models
from qvlopt import api
from qvlopt.errors import QvloptError


def prepare(folder: Path, environments: Path, wanted: Sequence[str], asked: argparse.Namespace) -> dict[str, str]:
    """Makes every engine's files that are not there yet. Returns why an engine cannot be run, by its name."""
    prepare_models(folder, asked.blocks, asked.layers, asked.threads)
    missing: dict[str, str] = {}
    for name in wanted:
        peer = PEERS[name]
        if peer.environment and not (environments / peer.environment / "finished").exists():
            missing[name] = f"environment {peer.environment} is not made (benchmarks/peer_envs.sh)"
            continue
        try:
            if not (folder / peer.files).exists():
                MAKERS[peer.kind](folder, environments, Path(peer.files))
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


def make_ours(folder: Path, _environments: Path, files: Path) -> None:
    """The INT8 artifacts; layers' errors say nothing on random weights, so none is refused for its own."""
    section = {"layout": files.name, "smooth": False, "max_layer_error": 100.0}
    api.quantize_int8({"name": "peers", "model": {"path": str(folder / "model")}, "quantize_int8": section}, output=str(folder / files))


def make_openvino(folder: Path, environments: Path, files: Path) -> None:
    program = environments / "optimum" / "bin" / "optimum-cli"
    with _finished(folder / files) as place:
        words = ["export", "openvino", "--model", str(folder / "model"), "--task", "image-text-to-text", "--weight-format", files.name.split("-")[1]]
        _run([str(program), *words, str(place)])


def make_llama(folder: Path, environments: Path, files: Path) -> None:
    """llama.cpp's own converter and quantiser; the projector in bfloat16, which has the fastest kernels where the CPU has them."""
    home, place = environments / "llama", folder / files.parent
    place.mkdir(exist_ok=True)
    convert = [str(home / "bin" / "python"), str(HERE / "peer_llama_convert.py"), str(home / "source"), str(folder / "model"), "--outtype", "bf16"]
    for name, more in (("bf16.gguf", []), ("mmproj.gguf", ["--mmproj"])):
        if not (place / name).exists():
            _run([*convert, "--outfile", str(place / f"part-{name}"), *more])
            made = next(place.glob(f"*part-{name}"))  # the converter may put its own word before the name
            made.rename(place / name)
    _run([str(home / "build" / "bin" / "llama-quantize"), str(place / "bf16.gguf"), str(folder / files), files.stem.upper(), "2"])


MAKERS: dict[str, Callable[[Path, Path, Path], None]] = {
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
