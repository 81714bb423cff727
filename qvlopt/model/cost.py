"""What calibrating and quantising takes, from config, headers and the pictures' sizes alone: operations, bytes, memory.

Operations are counted as the code does them, term by term; how fast they go is measured where it matters (`Rates`). Letters:
T tokens, N outputs, K inputs, g weights a group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

from qvlopt.model.names import LANGUAGE, VISION, Stage, language_stages, unclipped_rows, vision_stages
from qvlopt.model.shapes import text_shapes, vision_shapes
from qvlopt.model.token_draw import MOST_TOKENS
from qvlopt.model.vision import VisionConfig
from qvlopt.recipe.schema import QuantizeAwqSection

FLOAT32 = 4
EVERYWHERE, NEARBY = 12, 5
"""Shrinks that the clip search tries for each of its moves: eleven steps and what is there, or two to either side."""
MOVES, SWEEPS, FINALISTS = 3, 2, 4
SHARING = ("self_attn.k_proj", "self_attn.v_proj", "mlp.up_proj")
"""Linears whose statistics are those of the linear before them."""
RANKED, LARGE = 2**19, 2**20
"""Weights that rank the candidate scales, and from which on shortcuts are taken (quant/awq.py, model/quantize.py)."""
SAMPLED = 1 / 8
"""Rows of a large layer that decide whether a scale is worth it: of both variants, before one is searched in full."""
CANDIDATE_PASSES = 11
"""Reads and writes of an element while one candidate is judged."""
IMPORTED_BYTES = 520_000_000
"""Resident memory of the process before any weight: Python, torch, transformers. Measured with torch 2.13 for CPUs."""
CHUNK_BYTES = 150_000_000
"""Temporaries of a step of the searches, and what the allocator keeps."""
SEARCHED_WEIGHTS, SEARCHED_STATISTICS, COMPENSATED_STATISTICS = 7, 6, 10
"""Float32 copies of a layer's weight and of its [K, K] statistics that a search holds at its peak, and how many more of these
compensating takes (its factors are float64). Measured on blocks and mergers of the 2B tower."""
KEPT = 0.5
"""Share of the gathered inputs that counts on top of a search, because the allocator still holds it: on the 2B tower nothing was seen with
bfloat16 inputs, three quarters and once more than all with float32."""
GATHERED_BYTES = 400_000_000
"""Inputs that wait for a product X^T X (input_sums.py: 64 MiB a linear), and their copies while it is made."""
SQUARE = 256
"""Columns of the blocks in which one triangle of a symmetric matrix is multiplied."""
OVERHEAD = 1.1
"""Processor time of a run over that of the operations which are counted. Measured on the 2B tower and on nano."""
CALL_SECONDS = 0.001
"""Processor time of a stage's calls for one picture, whatever its size, and of its way to a file and back. Measured on nano."""
START_SECONDS = 5.0
"""Imports and reading headers."""


def _triangle(k: int) -> float:
    """The share of a product with a symmetric [K, K] that is computed (quant/objective.py: its other triangle is not)."""
    return 0.5 * (1 + min(1.0, SQUARE / k))


class Rates(NamedTuple):
    """How fast this machine is with the threads that will be used; products in 1e9 operations a second.

    linear: the tower's linears in the dtype that calibration multiplies in. float32: other products. passes: 1e9 float32
    elements a second that an elementwise step handles. bytes: 1e9 bytes a second that are read and hashed.
    """

    linear: float
    float32: float
    passes: float
    bytes: float


class Cost(NamedTuple):
    """`rss_bytes` at the peak, `disk_bytes` at the most, `seconds` of wall time with the threads of the rates."""

    rss_bytes: int
    disk_bytes: int
    seconds: float


@dataclass(frozen=True)
class TowerCost:
    """`tokens` are patches of every picture that will be used; `checkpoint_bytes` those of all stored tensors.

    With `text`, a ModelConfig's, the decoder layers are calibrated and quantised as well, over `prompts` of so many tokens.
    """

    config: VisionConfig
    tokens: Sequence[int]
    checkpoint_bytes: int
    rates: Rates
    text: Mapping[str, Any] | None = None
    prompts: Sequence[int] = ()

    def calibrate(self, *, held_out: bool = False) -> Cost:
        """Of `calibrate` with statistics in a folder; those of some pictures apart if they are `held_out`."""
        widths = [k for stage in self._stages for _, k in self._linears(stage)]
        statistics = (1 + held_out) * sum(FLOAT32 * k * k + 20 * k for k in widths)
        seconds = self._forwards() + self._statistics() + self._reading(self.checkpoint_bytes + 3 * statistics)
        return Cost(self._rss(), statistics + self.hidden_bytes, START_SECONDS + OVERHEAD * seconds)

    def quantize(self, section: QuantizeAwqSection, *, packed_bytes: int, written_bytes: int, has_statistics: bool = False) -> Cost:
        """Of `quantize-awq`. packed_bytes: what the quantised stages take; written_bytes: the artifact's."""
        seconds = self._search(section) + self._check()
        seconds += self._reading(5 * self.checkpoint_bytes + 4 * written_bytes)
        if not has_statistics:
            seconds += self._forwards() + self._statistics()
        disk = written_bytes + packed_bytes + (0 if has_statistics else self.hidden_bytes)
        return Cost(self._rss(section), disk, START_SECONDS + OVERHEAD * seconds)

    def running_bytes(self, tokens: int) -> int:
        """Activations of so many patches in a block."""
        return FLOAT32 * tokens * (8 * self.config.hidden_size + 3 * self.config.intermediate_size)

    @property
    def _tower(self) -> tuple[Stage, ...]:
        return vision_stages(self.config)

    @property
    def _decoder(self) -> tuple[Stage, ...]:
        return () if self.text is None else language_stages(self.text)

    @property
    def _stages(self) -> tuple[Stage, ...]:
        return (*self._tower, *self._decoder)

    @property
    def hidden_bytes(self) -> int:
        """Hidden states before and after a stage, on disk; of the language model DeepStack's features as well."""
        tower = 2 * FLOAT32 * self.config.hidden_size * sum(self.tokens)
        if self.text is None:
            return tower
        taps = len(self.config.deepstack_visual_indexes) * sum(self.tokens) // self.config.spatial_merge_size**2
        return tower // 2 + FLOAT32 * int(self.text["hidden_size"]) * (2 * sum(self.prompts) + taps)

    def _linears(self, stage: Stage) -> list[tuple[int, int]]:
        """(N, K) of a stage's linears."""
        shapes = self._shapes[stage.root]
        return [(shapes[f"{name}.weight"][0], shapes[f"{name}.weight"][1]) for name in stage.linears]

    @cached_property
    def _shapes(self) -> dict[str, dict[str, tuple[int, ...]]]:
        text = {} if self.text is None else {LANGUAGE: text_shapes(self.text)}
        return {VISION: vision_shapes(self.config), **text}

    def _merged(self, stage: Stage) -> int:
        return 1 if stage.name.startswith("blocks.") else self.config.spatial_merge_size**2

    def _read(self, stage: Stage) -> int:
        """Tokens that a stage's linears read."""
        return sum(self.prompts) if stage.root == LANGUAGE else sum(self.tokens) // self._merged(stage)

    def _forwards(self) -> float:
        """Seconds of running everything that is calibrated; for the decoder's prompts the tower runs a second time, in float32."""
        calls = CALL_SECONDS * len(self.tokens) * len(self._tower)
        if self.text is None:
            return self.forward() + calls
        calls += CALL_SECONDS * len(self.prompts) * (len(self._tower) + len(self._decoder))
        linear = sum(2 * n * k * sum(self.prompts) for stage in self._decoder for n, k in self._linears(stage))
        elements = sum(self.prompts) * len(self._decoder) * int(20 * self.text["hidden_size"] + 14 * self.text["intermediate_size"])
        decoder = linear / (1e9 * self.rates.float32) + elements / (1e9 * self.rates.passes)
        return self.forward() + self._replaced(linear=self.rates.float32).forward() + decoder + calls

    def over(self, tokens: Sequence[int]) -> TowerCost:
        """The same tower over other pictures."""
        return replace(self, tokens=tokens)

    def forward(self) -> float:
        """Seconds of the tower's forward over all pictures."""
        return self._forward(self.tokens)

    def _forward(self, tokens: Sequence[int]) -> float:
        linear = sum(2 * n * k * sum(tokens) / self._merged(stage) for stage in self._tower for n, k in self._linears(stage))
        attention = sum(4 * count * count * self.config.hidden_size for count in tokens) * self.config.depth
        elements = sum(tokens) * self.config.depth * (20 * self.config.hidden_size + 14 * self.config.intermediate_size)
        return linear / (1e9 * self.rates.linear) + attention / (1e9 * self.rates.float32) + elements / (1e9 * self.rates.passes)

    def _statistics(self) -> float:
        """Seconds of the products X^T X, of which one triangle is computed."""
        flop, elements = 0.0, 0.0
        for stage in self._stages:
            used = min(MOST_TOKENS, self._read(stage))
            for name, (_, k) in zip(stage.linears, self._linears(stage), strict=True):
                if name.endswith(SHARING):
                    continue
                flop += 2.0 * used * k * k * _triangle(k)
                elements += 12 * used * k + 10 * k * k
        return flop / (1e9 * self.rates.float32) + elements / (1e9 * self.rates.passes)

    def _search(self, section: QuantizeAwqSection) -> float:
        """Seconds of all layers' searches: what one layer costs is `_layer`, and `_compensated` where errors are made up for."""
        work = [self._layer(stage, index, section) for stage in self._stages for index in range(len(stage.linears))]
        if section.search.compensate:
            work += work  # with and without; each is done again with all tokens where it won
            work += [self._compensated(n, k) for stage in self._stages for n, k in self._linears(stage)]
        flop, elements = sum(each[0] for each in work), sum(each[1] for each in work)
        return flop / (1e9 * self.rates.float32) + elements / (1e9 * self.rates.passes)

    @staticmethod
    def _compensated(n: int, k: int) -> tuple[float, float]:
        """Operations in products, and element passes, of compensating a layer twice: a factor in float64, a first pass and a sweep.

        Columns come one at a time, with a dozen steps over the rows each, and a share of a block's other columns.
        """
        return 2 * (k**3 + 6.0 * n * k * k), 2 * (30.0 * n * k + n * k * 64 * 3)

    def _layer(self, stage: Stage, index: int, section: QuantizeAwqSection) -> tuple[float, float]:
        """Operations in products, and element passes, of one layer."""
        name, (n, k) = stage.linears[index], self._linears(stage)[index]
        weights, clipped = n * k, (n - unclipped_rows(name, n)) * k
        folds = section.search.scale and any(name in fold.consumers for fold in stage.folds)
        is_large = weights >= LARGE
        rounds = 1 + folds * (2 * SAMPLED if is_large else 1)
        judged = 2.0 * weights * k * _triangle(k)
        flop, elements = judged * (1 + 2 * rounds), 30.0 * weights * rounds
        if section.search.clip:
            moves = MOVES if section.zero_point else 1
            tried = moves * (EVERYWHERE + (SWEEPS - 1) * (NEARBY if is_large else EVERYWHERE)) * rounds
            flop += clipped * (tried * 2 * section.group_size + 2 * (1 + SWEEPS) * k * rounds)
            elements += clipped * tried * CANDIDATE_PASSES
        if folds:
            ranked = min(weights, RANKED) * (2 * section.search.grid + 1) + weights * (FINALISTS + 1)
            flop, elements = flop + 2.0 * k * _triangle(k) * ranked, elements + 12 * ranked
        return flop, elements

    def _check(self) -> float:
        """Seconds of two towers over two pictures in float32."""
        tokens = list(self.tokens[:2])
        slow = self._replaced(linear=self.rates.float32)
        return 2 * slow._forward(tokens) + 4 * self._parameters / (1e9 * self.rates.passes)

    def _replaced(self, *, linear: float) -> TowerCost:
        return replace(self, rates=self.rates._replace(linear=linear))

    @property
    def _parameters(self) -> int:
        return sum(n * k for stage in self._stages for n, k in self._linears(stage))

    def _reading(self, count: float) -> float:
        return count / (1e9 * self.rates.bytes)

    def _rss(self, searched: QuantizeAwqSection | None = None) -> int:
        """Bytes at the peak: the costliest stage or the embedding table, and the largest picture's activations."""
        running = self.running_bytes(max(self.tokens, default=0))
        weight, square = (SEARCHED_WEIGHTS, SEARCHED_STATISTICS) if searched else (0, 2)
        if searched is not None and searched.search.compensate:
            square += COMPENSATED_STATISTICS
        stage = 0
        for each in self._stages:
            linears = self._linears(each)
            held = FLOAT32 * (sum(n * k for n, k in linears) + sum(k * k for _, k in linears))
            widest = max(FLOAT32 * (weight * n * k + square * k * k) for n, k in linears)
            stage = max(stage, held + widest)
        gathered = min(GATHERED_BYTES, 8 * FLOAT32 * sum(self.tokens) * self.config.hidden_size)
        table = 0 if self.text is None else 2 * int(self.text["vocab_size"] * self.text["hidden_size"])
        return IMPORTED_BYTES + max(stage, table) + running + (CHUNK_BYTES + int(KEPT * gathered) if searched else gathered)
