"""A/A check: the base against itself in other batches. What differs there is noise, not a candidate's doing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from qvlopt.scoring.evaluate import EngineRun, EvalSet
from qvlopt.scoring.gate import MetricVerdict, Verdict, judge, worst
from qvlopt.scoring.score import score_answers


@dataclass(frozen=True)
class Noise:
    """Items that changed between two runs of one model in batches of `batches`, and the gate's verdict on them."""

    batches: tuple[int | None, int | None]
    n: int
    flips: int
    texts: int
    verdict: Verdict

    @property
    def reason(self) -> str:
        return (
            f"the base against itself in batches of {self.batches[0]} and {self.batches[1]} is {self.verdict}: "
            f"{self.flips} of {self.n} items flip, so a candidate's flips cannot be told from noise"
        )


def measure_noise(runs: tuple[EngineRun, EngineRun], sets: Sequence[EvalSet], *, margin: float, alpha: float) -> Noise:
    """Compares two runs of one model by the gate's own rule, set by set."""
    figures: list[MetricVerdict] = []
    texts = 0
    for each in sets:
        first, second = (run.answered[each.name].answers for run in runs)
        samples = [sample for sample in each.samples if sample.id in first and sample.id in second]
        ids, metric = [sample.id for sample in samples], each.metrics.primary
        before, after = (score_answers(samples, [side[id] for id in ids], [metric]).values(metric.name, ids) for side in (first, second))
        clusters = {sample.id: sample.cluster for sample in samples}
        figures.append(judge(before, after, clusters, margin=margin, alpha=alpha, binary=metric.is_binary))
        texts += sum(first[id].text != second[id].text for id in ids)
    flips = sum(found.lost + found.gained for found in figures)
    # few items are inconclusive even when nothing differs; that is for the candidate's own verdict to say
    verdict = worst(found.verdict for found in figures) if flips else "pass"
    return Noise((runs[0].batch, runs[1].batch), sum(found.n for found in figures), flips, texts, verdict)
