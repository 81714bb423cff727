"""What a server decides is neither like nor unlike what we know of an engine here; everything else must still be equal."""

from __future__ import annotations

from typing import Any

import pytest

from qvlopt.runtime.engine import SERVERS_OWN
from qvlopt.scoring.conditions import differences

HERE: dict[str, Any] = {
    "pixels": {"min": 1024, "max": 65536},
    "generation": {"sampling": "greedy", "penalties": None, "eos_ids": [1]},
    "batch": 8,
    "data": {},
}
SERVER = HERE | {"pixels": SERVERS_OWN, "generation": {"sampling": "greedy", "penalties": None, "eos_ids": SERVERS_OWN}}


def test_a_server_is_comparable_with_its_source_and_with_another_server() -> None:
    assert list(differences(HERE, SERVER)) == []
    assert list(differences(SERVER, HERE)) == []
    assert list(differences(SERVER, SERVER)) == []


@pytest.mark.parametrize("generation", [{"sampling": "top_p"}, {"penalties": 1.1}])
def test_what_is_known_of_a_server_must_be_equal(generation: dict[str, Any]) -> None:
    other = SERVER | {"generation": SERVER["generation"] | generation}
    assert [text.split()[0] for text in differences(HERE, other)] == ["generation"]


def test_engines_here_are_compared_as_before() -> None:
    assert list(differences(HERE, HERE | {"pixels": {"min": 1024, "max": 2048}}))
    assert list(differences(HERE, HERE | {"generation": HERE["generation"] | {"eos_ids": [1, 2]}}))
