"""Scores one engine's answers to one set, item by item."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from qvlopt.data.samples import Sample
from qvlopt.runtime.engine import Answer
from qvlopt.scoring.tasks import Metric, Part, corpus_value
from qvlopt.scoring.text import normalised


@dataclass(frozen=True)
class ScoreTable:
    """`parts[metric][id]` of every answered item, and counts of what to look at beside the scores.

    `failed` are items that the engine gave no answer to: they score 0 and count in n. `n_truncated` answers hit the limit
    of new tokens, `n_empty` hold nothing but white space, `n_empty_ref` items have no text in any right answer, and in
    `unparsed` are those whose answer states no choice or point: they score 0 and count in n. `metrics` by name say how
    items make a corpus value; one that is not there is a mean.
    """

    parts: Mapping[str, Mapping[str, Part]]
    failed: Mapping[str, str]
    n: int
    n_empty: int
    n_truncated: int
    n_empty_ref: int
    unparsed: frozenset[str] = frozenset()
    metrics: Mapping[str, Metric] = field(default_factory=dict)

    @property
    def n_unparsed(self) -> int:
        return len(self.unparsed)

    def values(self, metric: str, ids: Collection[str]) -> dict[str, float]:
        """The values of those items that have one."""
        found = {id: self.parts[metric][id].value for id in ids}
        return {id: value for id, value in found.items() if value is not None}

    def mean(self, metric: str, ids: Collection[str]) -> float | None:
        """The corpus value over these items."""
        parts = (self.parts[metric][id] for id in ids)
        return self.metrics[metric].corpus(parts) if metric in self.metrics else corpus_value(parts)


def score_answers(samples: Sequence[Sample], answers: Sequence[Answer], metrics: Sequence[Metric]) -> ScoreTable:
    """Scores the answers, which are joined with the samples by id. Raises ValueError unless each sample has exactly one."""
    by_id = {answer.id: answer for answer in answers}
    if len(by_id) != len(answers) or by_id.keys() != {sample.id for sample in samples} or len(samples) != len(answers):
        raise ValueError(f"expected one answer to each of {len(samples)} samples, got {len(answers)} with {len(by_id)} ids")
    given = [answer for answer in answers if answer.error is None]
    parts = {metric.name: {sample.id: _part(metric, by_id[sample.id], sample) for sample in samples} for metric in metrics}
    return ScoreTable(
        parts=parts,
        failed={answer.id: answer.error for answer in answers if answer.error is not None},
        n=len(samples),
        n_empty=sum(not answer.text.strip() for answer in given),
        n_truncated=sum(answer.stop == "length" for answer in given),
        n_empty_ref=sum(not any(map(normalised, sample.answers)) for sample in samples),
        unparsed=frozenset(id for of_metric in parts.values() for id, part in of_metric.items() if not part.is_parsed),
        metrics={metric.name: metric for metric in metrics},
    )


def _part(metric: Metric, answer: Answer, sample: Sample) -> Part:
    return metric.failed(sample) if answer.error is not None else metric.measure(answer.text, sample)
