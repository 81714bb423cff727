"""What most commands are tried on: a tiny checkpoint with random weights, and a small set of pictures; anew for every file of tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tiny import build_tiny
from tests.tiny_run import SMALL, build_set


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny(tmp_path_factory.mktemp("model") / "tiny", **SMALL)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_set(tmp_path_factory.mktemp("data") / "set")
