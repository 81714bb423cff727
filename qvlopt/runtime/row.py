"""One answer in the making: the tokens so far and what ends it. The rules that every local engine shares."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from qvlopt.model.prompt import Prompter
from qvlopt.runtime.engine import Answer, Prepared, Stop

NOT_FINITE = "the model's logits are not finite (NaN or infinity)"


@dataclass
class Row:
    """One sample's answer. `limit` is the most tokens it may have."""

    item: Prepared
    limit: int
    token_ids: list[int] = field(default_factory=list)
    stop: Stop | None = None

    def take(self, token: int, score: float, eos_ids: Sequence[int]) -> None:
        """Adds a token with its logit unless the row is done; every end-of-sequence id ends it."""
        if self.stop is not None:
            return
        if not -float("inf") < score < float("inf"):
            self.stop = "error"
            return
        self.token_ids.append(token)
        if token in eos_ids:
            self.stop = "eos"
        elif len(self.token_ids) == self.limit:
            self.stop = "length"

    def answer(self, prompter: Prompter) -> Answer:
        """What came out of it. A row that is not done yet is an error."""
        prompt = len(self.item.token_ids)
        if self.stop == "error" or self.stop is None:
            return Answer(self.item.id, (), "", "error", prompt, NOT_FINITE)
        return Answer(self.item.id, tuple(self.token_ids), prompter.decode(self.token_ids), self.stop, prompt)


def token_limit(item: Prepared, max_new_tokens: int, max_tokens: int) -> int:
    """New tokens until the limit or the end of the model's positions `max_tokens`; the last one needs none."""
    return max(1, min(max_new_tokens, max_tokens - len(item.token_ids) + 1))
