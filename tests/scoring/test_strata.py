"""Scores by kind add up to the score of the set."""

from __future__ import annotations

from dataclasses import replace

import pytest

from qvlopt.data.samples import Sample
from qvlopt.runtime.engine import Answer
from qvlopt.scoring.compare import Comparison, Rule, compare
from qvlopt.scoring.documents import comparison_json
from qvlopt.scoring.evaluate import Answered, EngineRun, EvalSet, Target
from qvlopt.scoring.strata import by_stratum
from qvlopt.scoring.summary import stratum_table, variant_table
from qvlopt.scoring.tasks import TASKS

SAMPLES = tuple(
    Sample(f"{i}", (), "q", (str(i),), "chart", f"{i}", f"x:{i}", stratum="human" if i < 4 else "augmented" if i < 10 else None) for i in range(12)
)


def compared(samples: tuple[Sample, ...]) -> Comparison:
    each = EvalSet("chart", "chart", samples, (), {sample.id: () for sample in samples}, TASKS["chart"], 8, "d")
    sides = []
    for wrong in ({"1"}, {"1", "2", "7"}):
        said = {sample.id: Answer(sample.id, (1,), "no" if sample.id in wrong else sample.id, "eos", 1) for sample in samples}
        sides.append(EngineRun({"chart": Answered(said, {}, {sample.id: () for sample in samples})}, {"generation": "greedy", "pixels": None}))
    return compare(Target("c", "c", "b"), (sides[0], sides[1]), [each], Rule(margin=0.02, alpha=0.05, max_failed=0, floors={}))


def test_every_kind_has_its_own_scores() -> None:
    comparison = compared(SAMPLES)
    augmented, human = by_stratum(comparison.sets[0])
    assert (augmented.kind, augmented.n, augmented.base, augmented.candidate) == ("augmented", 6, 1.0, pytest.approx(5 / 6))
    assert (human.kind, human.n, human.base, human.candidate, human.delta) == ("human", 4, 0.75, 0.5, -0.25)
    assert comparison_json(comparison)["by_stratum"] == [augmented._asdict(), human._asdict()]
    assert [row[1] for row in stratum_table(comparison).rows] == ["augmented", "human"]


def test_a_set_without_kinds_has_no_rows() -> None:
    plain = tuple(replace(sample, stratum=None) for sample in SAMPLES)
    assert by_stratum(compared(plain).sets[0]) == ()
    assert stratum_table(compared(plain)).rows == ()


def test_the_report_names_the_variant_of_every_metric() -> None:
    rows = dict(variant_table(compared(SAMPLES)).rows)
    assert rows == {metric.name: metric.variant for metric in TASKS["chart"].all}
    assert {metric["variant"] for metric in comparison_json(compared(SAMPLES))["metrics"]} == set(rows.values())
