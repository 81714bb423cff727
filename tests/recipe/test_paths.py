"""Where a path in a recipe points."""

from __future__ import annotations

from pathlib import Path

import pytest

from qvlopt.errors import UsageError
from qvlopt.recipe.paths import resolve_path, user_path
from qvlopt.recipe.shipped import shipped_root


def test_a_builtin_name_is_a_set_or_a_checkpoint_by_kind(tmp_path: Path) -> None:
    assert resolve_path("builtin:nano", tmp_path) == shipped_root("calib") / "nano"
    assert resolve_path("builtin:nano", tmp_path, kind="assets") == shipped_root("assets") / "nano"
    with pytest.raises(UsageError, match="there is no checkpoint builtin:nano-eval"):
        resolve_path("builtin:nano-eval", tmp_path, kind="assets")


def test_a_path_is_looked_up_beside_the_recipe_then_in_the_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipes, work = tmp_path / "recipes", tmp_path / "work"
    for folder in (recipes / "both", work / "both", work / "one"):
        folder.mkdir(parents=True)
    monkeypatch.chdir(work)
    assert resolve_path("both", recipes) == recipes / "both"
    assert resolve_path("one", recipes) == Path("one")
    assert resolve_path("none", recipes) is None
    assert resolve_path(str(work / "one"), recipes) == work / "one"


@pytest.mark.parametrize("name", ["~nobody-of-that-name/x", "y" * 300, "a\0b", ""])
def test_a_name_that_no_file_can_have_is_simply_not_there(tmp_path: Path, name: str) -> None:
    assert resolve_path(name, tmp_path) is None


def test_a_tilde_is_the_users_folder_and_stays_where_there_is_no_such_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert user_path("~/out") == tmp_path / "out"
    assert user_path("~nobody-of-that-name/out") == Path("~nobody-of-that-name/out")
