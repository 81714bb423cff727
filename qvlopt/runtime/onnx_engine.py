"""The ONNX engine: answers of an exported or INT8 artifact on the CPU, one request at a time, nothing computed twice.

A picture that was seen before is not encoded again, and a prompt that begins like an earlier one, up to a picture, goes on
from there. Neither changes a bit of an answer (`prompt_cache`). Greedy means what it means for `TorchEngine`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import torch

from qvlopt.data.samples import Sample
from qvlopt.errors import ItemError, RunError
from qvlopt.model.positions import merged_tokens
from qvlopt.model.preprocess import Picture, PictureProcessor
from qvlopt.model.prompt import Prompter
from qvlopt.recipe.schema import PixelLimits
from qvlopt.runtime.chunk import Placed, chunk_of
from qvlopt.runtime.engine import Answer, Encoded, OnStage, Prepared, Scored, stage
from qvlopt.runtime.onnx_model import OnnxModel, load_onnx_model
from qvlopt.runtime.picture_cache import PictureCache, picture_key
from qvlopt.runtime.preparer import Preparer
from qvlopt.runtime.prompt_cache import Prefix, PromptCache, picture_spans, plan_chunks, prefixes
from qvlopt.runtime.row import Row, token_limit
from qvlopt.runtime.sampling import Sampling, best, draw
from qvlopt.runtime.sessions import FAILURES, first_line
from qvlopt.runtime.vision_encoder import PictureFeatures


class OnnxEngine:
    """A `LocalEngine` over the graphs of an artifact. Not thread-safe.

    `pictures` and `prompts` may be shared with other engines. `time_limit_s` is that of one request, from the start of its
    first stage in `generate`; it is looked at between runs. `clock` gives seconds.
    """

    def __init__(
        self,
        model: OnnxModel,
        prompter: Prompter,
        processor: PictureProcessor,
        *,
        pictures: PictureCache | None = None,
        prompts: PromptCache | None = None,
        time_limit_s: float | None = None,
    ) -> None:
        if prompter.vocabulary_size > model.language.shape.vocabulary:
            raise RunError(f"the tokenizer has {prompter.vocabulary_size} ids, the model only {model.language.shape.vocabulary} rows (vocab_size)")
        self.model = model
        self.prompter = prompter
        self.processor = processor
        self.pictures = PictureCache() if pictures is None else pictures
        self.prompts = PromptCache() if prompts is None else prompts
        self.time_limit_s = time_limit_s
        self.clock: Callable[[], float] = time.monotonic
        self.on_stage: OnStage | None = None
        self._preparer = Preparer(prompter, processor)

    @classmethod
    def open(
        cls,
        folder: Path,
        *,
        threads: int,
        pixels: PixelLimits | None = None,
        pictures: PictureCache | None = None,
        prompts: PromptCache | None = None,
        time_limit_s: float | None = None,
    ) -> OnnxEngine:
        """Opens an artifact. Raises RunError for whatever is wrong with it, UsageError for impossible pixel limits."""
        prompter = Prompter.from_folder(folder)
        model = load_onnx_model(folder, threads=threads)
        processor = PictureProcessor.for_tower(folder, model.settings.vision, pixels)
        return cls(model, prompter, processor, pictures=pictures, prompts=prompts, time_limit_s=time_limit_s)

    @property
    def fingerprint(self) -> dict[str, Any]:
        """JSON values: engine, artifact, threads, pixel limits, how tokens are chosen, versions."""
        limit = {} if self.time_limit_s is None else {"time_limit_s": self.time_limit_s}
        return {
            "engine": "onnx",
            "model_digest": self.model.artifact_digest,
            "kind": self.model.kind,
            "dtype": "float32",
            "device": "cpu",
            "threads": self.model.threads,
            "pixels": {"min": self.processor.min_pixels, "max": self.processor.max_pixels},
            "generation": {"sampling": "greedy", "penalties": None, "eos_ids": list(self.prompter.eos_ids), **limit},
            "versions": {"onnxruntime": ort.__version__, "torch": torch.__version__},
        }

    def prepare(self, sample: Sample) -> Prepared:
        """Loads, resizes and patches the pictures and encodes the prompt. Raises ItemError."""
        with stage(self.on_stage, "preprocess"):
            return self._preparer.prepare(sample)

    def generate(self, prepared: Sequence[Prepared], *, max_new_tokens: int, sampling: Sampling | None = None) -> list[Answer]:
        """Answers in the order of `prepared`. Samples that share pictures run one after another.

        A sample that ONNX Runtime fails on, or that memory cannot hold, has `error` set.
        """
        keys = self._keys(picture for item in prepared for picture in item.pictures)
        answers: dict[int, Answer] = {}
        for index in sorted(range(len(prepared)), key=lambda index: [keys[picture] for picture in prepared[index].pictures]):
            item = prepared[index]
            try:
                answers[index] = self._answer(item, [keys[picture] for picture in item.pictures], max_new_tokens, sampling)
            except FAILURES as error:
                answers[index] = Answer(item.id, (), "", "error", len(item.token_ids), f"onnxruntime: {first_line(error)}")
        return [answers[index] for index in range(len(prepared))]

    def score(self, prepared: Prepared, answer_ids: Sequence[int]) -> Scored:
        """Runs the prompt, then the answer's tokens as generation would: in steps where steps have a graph of their own."""
        given, prompt = list(answer_ids[:-1]), len(prepared.token_ids)
        if prompt + len(given) > self.prompter.max_tokens:
            raise ItemError(f"{prompt} tokens of prompt and {len(given)} of answer, the model has {self.prompter.max_tokens} positions")
        keys = self._keys(prepared.pictures)
        rows = [self._begin(prepared, [keys[picture] for picture in prepared.pictures], None)]
        language, position = self.model.language, prompt + prepared.delta
        embeds = self.model.embeddings.rows(given)
        if language.has_twin:
            rows += [language.step(embed, position + number).copy()[None] for number, embed in enumerate(embeds)]
        else:
            for start, end in plan_chunks(0, len(given), ()):
                positions = np.broadcast_to(np.arange(position + start, position + end), (3, end - start))
                rows.append(language.run(embeds[start:end], positions, None, range(end - start)))
        logits = np.concatenate(rows)[: len(answer_ids), : self.prompter.vocabulary_size]
        return Scored(prepared.id, tuple(answer_ids), torch.from_numpy(np.ascontiguousarray(logits)))

    def encode(self, picture: Picture) -> Encoded:
        """The tower's features of one picture, from the cache where they are there."""
        features = self._features([picture], list(self._keys([picture]).values()), None)[0]
        return Encoded(*(torch.from_numpy(array.copy()) for array in features))

    def close(self) -> None:
        """Drops the graphs and what only this engine remembers of pictures and prompts."""
        del self.model, self.pictures, self.prompts

    def _keys(self, pictures: Iterable[Picture]) -> Mapping[Picture, str]:
        """What the caches know each picture by; made anew in every call, since pixels may be changed in place."""
        return {picture: picture_key(picture, self.model.vision_digest) for picture in dict.fromkeys(pictures)}

    def _answer(self, item: Prepared, keys: Sequence[str], max_new_tokens: int, sampling: Sampling | None) -> Answer:
        row = Row(item, token_limit(item, max_new_tokens, self.prompter.max_tokens))
        deadline = None if self.time_limit_s is None else self.clock() + self.time_limit_s
        random = sampling.generator(item.id) if sampling else None

        def take(logits: np.ndarray) -> None:
            known = logits[: self.prompter.vocabulary_size]  # rows beyond only pad the table
            row.take(*(draw(known, sampling, random) if sampling and random else best(known)), self.prompter.eos_ids)

        try:
            take(self._begin(item, keys, deadline)[0])
            position = len(item.token_ids) + item.delta
            while row.stop is None:
                self._check_time(deadline)
                with stage(self.on_stage, "decode"):
                    take(self.model.language.step(self.model.embeddings.rows(row.token_ids[-1:])[0], position))
                position += 1
        except _OutOfTime:
            row.stop = "time"
        with stage(self.on_stage, "detokenise"):
            return row.answer(self.prompter)

    def _begin(self, item: Prepared, keys: Sequence[str], deadline: float | None) -> np.ndarray:
        """Runs the prompt, or what no earlier one began with. Logits float32 [1, vocabulary] of its last token."""
        ids, language = item.token_ids, self.model.language
        spans = picture_spans(ids, self.prompter.image_token_id, [self._tokens(picture) for picture in item.pictures])
        begun = [prefix for prefix in prefixes(ids, spans, keys, self.model.digest) if prefix.length < len(ids)]
        known = self.prompts.longest(begun)
        seen = known[0].pictures if known else 0
        features = self._features(item.pictures[seen:], keys[seen:], deadline)
        placed = [Placed(*span, each) for span, each in zip(spans[seen:], features, strict=True)]
        with stage(self.on_stage, "prefill"):
            language.kv.start(len(ids) + 1)
            if known:
                language.kv.restore(known[1])
            logits = np.empty((0, 0), np.float32)
            for start, end in plan_chunks(language.kv.length, len(ids), [end for _, end in spans]):
                self._check_time(deadline)
                chunk = chunk_of(ids, (start, end), placed, self.model.embeddings)
                rows = [end - start - 1] if end == len(ids) else []
                logits = language.run(chunk.embeds, item.positions[:, start:end].numpy(), chunk.deepstack, rows)
            if begun and seen < begun[-1].pictures and np.isfinite(logits).all():
                self._remember(begun[-1])
        return logits

    def _remember(self, prefix: Prefix) -> None:
        kv = self.model.language.kv
        if self.prompts.would_keep(prefix.length * kv.token_bytes):
            self.prompts.put(prefix, kv.snapshot(prefix.length))

    def _features(self, pictures: Sequence[Picture], keys: Sequence[str], deadline: float | None) -> list[PictureFeatures]:
        if not pictures:
            return []
        shape, features = self.model.language.shape, []
        with stage(self.on_stage, "vision"):
            for picture, key in zip(pictures, keys, strict=True):
                each = self.pictures.get(key, tokens=self._tokens(picture), hidden=shape.hidden, taps=shape.taps)
                if each is None:
                    self._check_time(deadline)
                    each = self.model.vision.encode(picture)
                    self.pictures.put(key, each)
                features.append(each)
        return features

    def _tokens(self, picture: Picture) -> int:
        return merged_tokens(picture.grid, self.processor.merge_size)

    def _check_time(self, deadline: float | None) -> None:
        if deadline is not None and self.clock() > deadline:
            raise _OutOfTime


class _OutOfTime(Exception):
    """A request's time limit has passed."""
