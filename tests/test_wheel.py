"""A wheel holds all that ships, and finds it when it is installed somewhere else than the checkout."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).parents[1]
PROBE = """
import json, qvlopt
from qvlopt.data.sets import open_set
from qvlopt.recipe.load import load_recipe
from qvlopt.recipe.shipped import PACKAGE, builtin, shipped_names
recipe = load_recipe("demo").recipe
print(json.dumps({
    "package": qvlopt.__file__,
    "recipes": shipped_names("recipes"),
    "calib": shipped_names("calib"),
    "assets": shipped_names("assets"),
    "checkpoint": sorted(path.name for path in builtin(recipe.model.path, "assets").iterdir()),
    "pictures": [len(list(builtin(path, "calib").rglob("*.png"))) for path in (recipe.calibrate.data, recipe.evaluate.data[0].path)],
    "general": len([path for path in builtin("builtin:general", "calib").rglob("*") if path.suffix in (".png", ".jpg", ".webp")]),
    "general_locked": sum(file.kind == "picture" for file in open_set(builtin("builtin:general", "calib")).files.values()),
    "schemas": sorted(path.name for path in (PACKAGE / "schemas").iterdir()),
}))
"""


def pip(*words: str) -> None:
    done = subprocess.run([sys.executable, "-m", "pip", "--quiet", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), str(CHECKOUT))
    (path,) = folder.glob("qvlopt-*.whl")
    return path


@pytest.mark.slow
def test_an_installed_wheel_finds_recipes_sets_and_checkpoint(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    pip("install", "--no-deps", "--no-index", "--target", str(site), str(wheel))
    environment = os.environ | {"PYTHONPATH": str(site)}
    done = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, cwd=elsewhere, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert Path(found["package"]).is_relative_to(site)
    assert {"demo", "4090d"} <= set(found["recipes"])
    assert {"nano", "nano-eval", "general"} <= set(found["calib"])
    assert found["general"] == found["general_locked"] >= 192
    assert found["assets"] == ["nano"]
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(found["checkpoint"])
    assert min(found["pictures"]) >= 128
    assert "common.json" in found["schemas"]


@pytest.mark.slow
def test_a_wheel_holds_licences_the_command_and_no_tests(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        entry = next(name for name in names if name.endswith("entry_points.txt"))
        assert "qvlopt = qvlopt.__main__:main" in archive.read(entry).decode()
    assert {"qvlopt/report/page.css", "qvlopt/report/page.js", "qvlopt/schemas/evaluate-report.json"} <= set(names)
    assert {name.rsplit("/", 1)[-1] for name in names if "/licenses/" in name} == {"LICENSE", "NOTICE"}
    assert [name for name in names if name.startswith(("tests/", "tools/")) or "__pycache__" in name] == []
    assert "qvlopt/py.typed" in names
