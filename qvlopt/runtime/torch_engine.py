"""The torch engine: greedy answers of a checkpoint folder, plain or quantised, on the CPU or a GPU.

Greedy means argmax over the tokenizer's own ids, whatever generation_config says; every end-of-sequence id ends a row; no
penalties. Rows that are done leave the batch as soon as half of it is.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from transformers import DynamicCache
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextModel

from qvlopt.data.samples import ImageRef, Sample
from qvlopt.errors import RunError
from qvlopt.model.load import LoadedModel, load_model
from qvlopt.model.positions import rope_positions
from qvlopt.model.preprocess import Picture, PictureProcessor
from qvlopt.model.prompt import Prompter
from qvlopt.model.source import Source
from qvlopt.recipe.schema import PixelLimits
from qvlopt.runtime.batch import Batch, build_batch
from qvlopt.runtime.engine import Answer, Prepared, Stop

CACHE = "cache" if "cache" in inspect.signature(Qwen3VLTextModel.forward).parameters else "past_key_values"
"""What the running transformers calls the key-value cache; it was renamed within 5.x, and the wrong name is swallowed."""


class TorchEngine:
    """An `Engine` over a model in memory. Not thread-safe."""

    def __init__(self, model: LoadedModel, prompter: Prompter, processor: PictureProcessor, *, model_digest: str | None = None) -> None:
        if prompter.vocabulary_size > model.head.shape[0]:
            raise RunError(f"the tokenizer has {prompter.vocabulary_size} ids, the model only {model.head.shape[0]} rows (vocab_size)")
        self.model = model
        self.prompter = prompter
        self.processor = processor
        self.model_digest = model_digest
        # rows beyond the tokenizer's ids only pad the table: they must never be answered
        self._head = model.head[: prompter.vocabulary_size]
        # a picture is shared while any prepared sample holds it, so that a batch encodes it once
        self._pictures: weakref.WeakValueDictionary[str, Picture] = weakref.WeakValueDictionary()

    @classmethod
    def open(cls, source: Source, *, dtype: torch.dtype, device: str, pixels: PixelLimits | None = None) -> TorchEngine:
        """Loads a checkpoint. Raises RunError for whatever is wrong with it, UsageError for impossible pixel limits."""
        prompter = Prompter.from_folder(source.folder)
        processor = PictureProcessor.for_tower(source.folder, source.settings.vision, pixels)
        return cls(load_model(source, dtype=dtype, device=device), prompter, processor, model_digest=source.digest)

    @property
    def fingerprint(self) -> dict[str, Any]:
        """JSON values: engine, dtype, device, threads, pixel limits, how tokens are chosen, versions."""
        device = self.model.device
        return {
            "engine": "torch",
            "model_digest": self.model_digest,
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
            "threads": torch.get_num_threads(),
            "pixels": {"min": self.processor.min_pixels, "max": self.processor.max_pixels},
            "generation": {"sampling": "greedy", "penalties": None, "eos_ids": list(self.prompter.eos_ids)},
            "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        }

    def prepare(self, sample: Sample) -> Prepared:
        """Loads, resizes and patches the pictures and encodes the prompt. Raises ItemError."""
        pictures = tuple(self._picture(image) for image in sample.images)
        grids = [picture.grid for picture in pictures]
        ids = self.prompter.encode(sample.question, grids)
        positions, delta = rope_positions(ids, grids, image_token_id=self.model.image_token_id, merge=self.processor.merge_size)
        return Prepared(sample.id, tuple(ids), pictures, positions, delta)

    def generate(self, prepared: Sequence[Prepared], *, max_new_tokens: int) -> list[Answer]:
        """Answers in the order of `prepared`. A batch that memory cannot hold is halved until it fits."""
        if not prepared:
            return []
        try:
            with torch.inference_mode():
                return self._answer(prepared, max_new_tokens)
        except (RuntimeError, MemoryError) as error:
            if not _is_out_of_memory(error):
                raise
            reason = f"out of memory on {self.model.device}: {str(error).splitlines()[0] if str(error) else 'MemoryError'}"
        if len(prepared) == 1:
            return [Answer(prepared[0].id, (), "", "error", len(prepared[0].token_ids), reason)]
        half = len(prepared) // 2
        return [answer for part in (prepared[:half], prepared[half:]) for answer in self.generate(part, max_new_tokens=max_new_tokens)]

    def close(self) -> None:
        """Drops the model; on a GPU its memory goes back to the driver."""
        device = self.model.device
        del self.model, self._head
        if device.type == "cuda":
            torch.cuda.empty_cache()

    def _picture(self, image: ImageRef) -> Picture:
        shared = self._pictures.get(image.digest) if image.digest else None
        if shared is not None:
            return shared
        picture = self.processor.process(image.load())
        if image.digest:
            self._pictures[image.digest] = picture
        return picture

    def _answer(self, prepared: Sequence[Prepared], max_new_tokens: int) -> list[Answer]:
        rows = [_Row(item, self._limit(item, max_new_tokens)) for item in prepared]
        batch = build_batch(self.model, prepared)
        following = torch.tensor([len(item.token_ids) + item.delta for item in prepared], device=self.model.device)
        cache = DynamicCache(config=self.model.text.config)
        live = rows
        while True:
            scores, chosen = self._choose(batch, cache)
            for row, score, token in zip(live, scores, chosen, strict=True):
                row.take(token, score, self.prompter.eos_ids)
            going = [index for index, row in enumerate(live) if row.stop is None]
            if not going:
                return [self._finished(row) for row in rows]
            if 2 * len(going) <= len(live):
                live, following, batch = self._shrunk(going, live, following, batch, cache)
            batch = self._next_batch(live, following, batch)
            following = following + 1

    def _choose(self, batch: Batch, cache: DynamicCache) -> tuple[list[float], list[int]]:
        """Runs the language model on the batch and takes the best token of each row by its float32 logit."""
        output = self.model.text(
            inputs_embeds=batch.embeds,
            attention_mask=batch.mask,
            position_ids=batch.positions,
            use_cache=True,
            visual_pos_masks=batch.visual,
            deepstack_visual_embeds=batch.deepstack,
            **{CACHE: cache},
        )
        scores, chosen = F.linear(output.last_hidden_state[:, -1], self._head).float().max(dim=-1)
        return scores.tolist(), chosen.tolist()

    def _next_batch(self, live: Sequence[_Row], following: torch.Tensor, batch: Batch) -> Batch:
        """One new token a row; rows that are done but still in the batch go on with whatever they have."""
        ids = torch.tensor([row.token_ids[-1:] or [0] for row in live], device=self.model.device)
        mask = torch.cat((batch.mask, batch.mask.new_ones(len(live), 1)), dim=1)
        return Batch(self.model.text.embed_tokens(ids), mask, following.expand(3, -1)[..., None], None, None)

    def _shrunk(
        self, going: list[int], live: Sequence[_Row], following: torch.Tensor, batch: Batch, cache: DynamicCache
    ) -> tuple[list[_Row], torch.Tensor, Batch]:
        """The batch and the cache without the rows that are done."""
        index = torch.tensor(going, device=self.model.device)
        cache.batch_select_indices(index)
        return [live[i] for i in going], following[index], batch._replace(mask=batch.mask[index])

    def _limit(self, item: Prepared, max_new_tokens: int) -> int:
        """New tokens until the limit or the end of the model's positions; the last one needs none."""
        return max(1, min(max_new_tokens, self.prompter.max_tokens - len(item.token_ids) + 1))

    def _finished(self, row: _Row) -> Answer:
        item = row.item
        if row.stop == "error" or row.stop is None:
            return Answer(item.id, (), "", "error", len(item.token_ids), "the model's logits are not finite (NaN or infinity)")
        return Answer(item.id, tuple(row.token_ids), self.prompter.decode(row.token_ids), row.stop, len(item.token_ids))


@dataclass
class _Row:
    """One answer in the making."""

    item: Prepared
    limit: int
    token_ids: list[int] = field(default_factory=list)
    stop: Stop | None = None

    def take(self, token: int, score: float, eos_ids: Sequence[int]) -> None:
        """Adds a token unless the row is done."""
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


def _is_out_of_memory(error: BaseException) -> bool:
    """CUDA has its own class; the CPU's allocator raises RuntimeError with these words."""
    text = str(error)
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "not enough memory" in text or "can't allocate memory" in text
