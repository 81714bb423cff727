"""The torch engine: greedy answers of a checkpoint folder, plain or quantised, on the CPU or a GPU.

Greedy means argmax over the tokenizer's own ids, whatever generation_config says; every end-of-sequence id ends a row; no
penalties. Rows that are done leave the batch as soon as half of it is.
"""

from __future__ import annotations

import inspect
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import transformers
from transformers import DynamicCache
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextModel

from qvlopt.data.samples import Sample
from qvlopt.errors import ItemError, RunError
from qvlopt.model.load import LoadedModel, load_model
from qvlopt.model.preprocess import Picture, PictureProcessor
from qvlopt.model.prompt import Prompter
from qvlopt.model.source import Source
from qvlopt.recipe.schema import Attention, PixelLimits
from qvlopt.runtime.batch import Batch, Features, build_batch, encode_pictures
from qvlopt.runtime.engine import Answer, Encoded, OnStage, Prepared, Scored, Stage, stage
from qvlopt.runtime.preparer import Preparer
from qvlopt.runtime.row import Row, token_limit

CACHE = "cache" if "cache" in inspect.signature(Qwen3VLTextModel.forward).parameters else "past_key_values"
"""What the running transformers calls the key-value cache; it was renamed within 5.x, and the wrong name is swallowed."""

COMPILER = os.environ.get("CXX", "g++")
"""What torch.compile calls for the CPU."""


class TorchEngine:
    """A `LocalEngine` over a model in memory. Not thread-safe."""

    def __init__(self, model: LoadedModel, prompter: Prompter, processor: PictureProcessor, *, model_digest: str | None = None) -> None:
        if prompter.vocabulary_size > model.head.shape[0]:
            raise RunError(f"the tokenizer has {prompter.vocabulary_size} ids, the model only {model.head.shape[0]} rows (vocab_size)")
        self.model = model
        self.prompter = prompter
        self.processor = processor
        self.model_digest = model_digest
        self.on_stage: OnStage | None = None
        self.is_compiled = False
        # rows beyond the tokenizer's ids only pad the table: they must never be answered
        self._head = model.head[: prompter.vocabulary_size]
        self._preparer = Preparer(prompter, processor)

    @classmethod
    def open(
        cls, source: Source, *, dtype: torch.dtype, device: str, pixels: PixelLimits | None = None, attn_implementation: Attention = "sdpa"
    ) -> TorchEngine:
        """Loads a checkpoint. `attn_implementation` is the language model's; the tower always uses torch's scaled_dot_product_attention.

        Raises RunError for whatever is wrong with it or when the attention is not installed, UsageError for impossible
        pixel limits.
        """
        prompter = Prompter.from_folder(source.folder)
        processor = PictureProcessor.for_tower(source.folder, source.settings.vision, pixels)
        engine = cls(load_model(source, dtype=dtype, device=device), prompter, processor, model_digest=source.digest)
        try:
            engine.model.text.set_attn_implementation(attn_implementation)
        except (ImportError, ValueError) as error:
            raise RunError(f"attention {attn_implementation} cannot be used here: {str(error).splitlines()[0]}", hint="use sdpa") from error
        return engine

    def compile(self) -> None:
        """Lets torch.compile translate the language model, when it is first run; the tower stays as it is. Raises RunError without a compiler."""
        if self.model.device.type == "cpu" and shutil.which(COMPILER) is None:
            raise RunError(
                f"torch.compile needs a C++ compiler, there is no {COMPILER}", hint="install one, name it in CXX, or set bench.compile to false"
            )
        self.model.text.compile(dynamic=True)
        self.is_compiled = True

    @property
    def fingerprint(self) -> dict[str, Any]:
        """JSON values: engine, dtype, device, attention, threads, pixel limits, how tokens are chosen, versions."""
        device = self.model.device
        return {
            "engine": "torch",
            "model_digest": self.model_digest,
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
            "attention": self.model.text.config._attn_implementation + (", compiled" if self.is_compiled else ""),
            "threads": torch.get_num_threads(),
            "pixels": {"min": self.processor.min_pixels, "max": self.processor.max_pixels},
            "generation": {"sampling": "greedy", "penalties": None, "eos_ids": list(self.prompter.eos_ids)},
            "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        }

    def prepare(self, sample: Sample) -> Prepared:
        """Loads, resizes and patches the pictures and encodes the prompt. Raises ItemError."""
        with self._stage("preprocess"):
            return self._preparer.prepare(sample)

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

    def score(self, prepared: Prepared, answer_ids: Sequence[int]) -> Scored:
        """One forward over the prompt and the answer; the answer's last token is chosen but never read. Raises ItemError."""
        given, prompt = list(answer_ids[:-1]), len(prepared.token_ids)
        if prompt + len(given) > self.prompter.max_tokens:
            raise ItemError(f"{prompt} tokens of prompt and {len(given)} of answer, the model has {self.prompter.max_tokens} positions")
        with torch.inference_mode():
            batch = build_batch(self.model, [prepared], self._features([prepared]), given=given)
            hidden = self._run(batch, DynamicCache(config=self.model.text.config))[0, prompt - 1 :]
            logits = F.linear(hidden[: len(answer_ids)], self._head).float().cpu()
        return Scored(prepared.id, tuple(answer_ids), logits)

    def encode(self, picture: Picture) -> Encoded:
        """The tower's features of one picture, in float32 on the CPU."""
        with torch.inference_mode():
            features = encode_pictures(self.model.vision, [picture], device=self.model.device)[picture]
            merged = features.merged.float().cpu()
            taps = [tap.float().cpu() for tap in features.deepstack]
            return Encoded(merged, torch.stack(taps) if taps else merged.new_zeros((0, *merged.shape)))

    def close(self) -> None:
        """Drops the model; on a GPU its memory goes back to the driver."""
        device = self.model.device
        del self.model, self._head
        if device.type == "cuda":
            torch.cuda.empty_cache()

    def _answer(self, prepared: Sequence[Prepared], max_new_tokens: int) -> list[Answer]:
        rows = [Row(item, token_limit(item, max_new_tokens, self.prompter.max_tokens)) for item in prepared]
        features = self._features(prepared)
        cache = DynamicCache(config=self.model.text.config)
        with self._stage("prefill"):
            following = torch.tensor([len(item.token_ids) + item.delta for item in prepared], device=self.model.device)
            state = _State(rows, following, build_batch(self.model, prepared, features))
            del features
            self._take_next(state, cache)
        while going := [index for index, row in enumerate(state.live) if row.stop is None]:
            with self._stage("decode"):
                if 2 * len(going) <= len(state.live):
                    state = self._shrunk(state, going, cache)
                state = self._stepped(state)
                self._take_next(state, cache)
        with self._stage("detokenise"):
            return [row.answer(self.prompter) for row in rows]

    def _features(self, prepared: Sequence[Prepared]) -> dict[Picture, Features]:
        pictures = [picture for item in prepared for picture in item.pictures]
        if not pictures:
            return {}
        with self._stage("vision"):
            return encode_pictures(self.model.vision, pictures, device=self.model.device)

    def _run(self, batch: Batch, cache: DynamicCache) -> torch.Tensor:
        """The last hidden states [B, S, D] of the batch behind what the cache holds."""
        output = self.model.text(
            inputs_embeds=batch.embeds,
            attention_mask=batch.mask,
            position_ids=batch.positions,
            use_cache=True,
            visual_pos_masks=batch.visual,
            deepstack_visual_embeds=batch.deepstack,
            **{CACHE: cache},
        )
        hidden: torch.Tensor = output.last_hidden_state
        return hidden

    def _take_next(self, state: _State, cache: DynamicCache) -> None:
        """Gives each row the best token by its float32 logit."""
        scores, chosen = F.linear(self._run(state.batch, cache)[:, -1], self._head).float().max(dim=-1)
        for row, score, token in zip(state.live, scores.tolist(), chosen.tolist(), strict=True):
            row.take(token, score, self.prompter.eos_ids)

    def _stepped(self, state: _State) -> _State:
        """One new token a row; rows that are done but still in the batch go on with whatever they have."""
        ids = torch.tensor([row.token_ids[-1:] or [0] for row in state.live], device=self.model.device)
        mask = torch.cat((state.batch.mask, state.batch.mask.new_ones(len(state.live), 1)), dim=1)
        batch = Batch(self.model.text.embed_tokens(ids), mask, state.following.expand(3, -1)[..., None], None, None)
        return _State(state.live, state.following + 1, batch)

    def _shrunk(self, state: _State, going: list[int], cache: DynamicCache) -> _State:
        """The batch and the cache without the rows that are done."""
        index = torch.tensor(going, device=self.model.device)
        cache.batch_select_indices(index)
        return _State([state.live[i] for i in going], state.following[index], state.batch._replace(mask=state.batch.mask[index]))

    @contextmanager
    def _stage(self, name: Stage) -> Iterator[None]:
        """Tells the observer, who then sees the time of the device's work too."""
        with stage(self.on_stage, name):
            yield
            if self.on_stage is not None and self.model.device.type == "cuda":
                torch.cuda.synchronize(self.model.device)


class _State(NamedTuple):
    """The rows in the batch, the position of each one's next token int64 [B], and the input to run."""

    live: list[Row]
    following: torch.Tensor
    batch: Batch


def _is_out_of_memory(error: BaseException) -> bool:
    """CUDA has its own class; the CPU's allocator raises RuntimeError with these words."""
    text = str(error)
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "not enough memory" in text or "can't allocate memory" in text
