"""Which files of the peers are made, by whom, and what is said when they cannot be."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import peer_files
from benchmarks.peer_engines import PEERS, SHORT
from benchmarks.peer_files import Making, files_bytes, make_llama, make_ours, prepare

ASKED = argparse.Namespace(blocks=2, layers=2, threads=1)
QUANTISE = '#!/bin/sh\nif [ "$3" = Q4_0 ]; then echo "main: error: no room" >&2; exit 1; fi\ncat "$1" > "$2"\n'


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What makers were asked for; nothing is really made."""
    asked: list[str] = []
    makers = {kind: lambda _making, files: asked.append(str(files)) for kind in peer_files.MAKERS}
    monkeypatch.setattr(peer_files, "MAKERS", makers)
    monkeypatch.setattr(peer_files, "prepare_checkpoint", lambda *_: None)
    return asked


def test_only_what_is_wanted_and_not_there_is_made(tmp_path: Path, made: list[str]) -> None:
    (tmp_path / "int8").mkdir()
    assert prepare(tmp_path, tmp_path / "environments", ["qvlopt int8", "qvlopt small"], ASKED) == {}
    assert made == ["small"]


def test_an_environment_that_is_not_made_is_named(tmp_path: Path, made: list[str]) -> None:
    (tmp_path / "optimum").mkdir()
    missing = prepare(tmp_path, tmp_path, ["openvino int8", "qvlopt int8"], ASKED)
    assert list(missing) == ["openvino int8"]
    assert "optimum" in missing["openvino int8"]
    assert made == ["int8"]


def test_ours_are_the_export_and_the_layouts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(peer_files, "prepare_models", lambda *values: calls.append(values))
    monkeypatch.setattr(peer_files.int8, "prepare", lambda *values: calls.append(values))
    for peer in PEERS.values():
        if peer.kind == "onnx":
            make_ours(Making(tmp_path, tmp_path, ASKED), Path(peer.files))
    assert calls == [(tmp_path, 2, 2, 1), *((tmp_path, [layout], 2, 2, 1) for layout in ("int8", "fast", "small"))]


def test_llama_cpps_files_get_their_names_when_they_are_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    programs = tmp_path / "environments" / "llama" / "bin"
    programs.mkdir(parents=True)
    (programs / "python").symlink_to(sys.executable)
    (programs / "llama-quantize").write_text(QUANTISE)
    (programs / "llama-quantize").chmod(0o755)
    (tmp_path / "peer_gguf.py").write_text("import sys, pathlib\nfor path in sys.argv[2:]:\n    pathlib.Path(path).write_text('x')\n")
    monkeypatch.setattr(peer_files, "HERE", tmp_path)
    making = Making(tmp_path, tmp_path / "environments", ASKED)
    make_llama(making, Path("llama/q8_0.gguf"))
    with pytest.raises(subprocess.CalledProcessError) as failure:
        make_llama(making, Path("llama/q4_0.gguf"))
    assert peer_files._reason(failure.value) == "llama-quantize: main: error: no room"
    assert sorted(path.name for path in (tmp_path / "llama").iterdir()) == ["bf16.gguf", "mmproj.gguf", "q8_0.gguf"]
    assert files_bytes(tmp_path, PEERS["llama.cpp Q8_0"]) == 2


def test_every_layout_of_ours_is_a_peer() -> None:
    assert {"ours-fp32", "ours-int8", "ours-fast", "ours-small"} <= set(SHORT.values())


def test_an_unknown_environment_is_refused(tmp_path: Path) -> None:
    script = Path(__file__).parents[2] / "benchmarks" / "peer_envs.sh"
    done = subprocess.run([str(script), str(tmp_path), "llamma"], capture_output=True, text=True, check=False)
    assert (done.returncode, "llamma" in done.stderr) == (2, True)
