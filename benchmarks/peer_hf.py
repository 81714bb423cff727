"""Hugging Face transformers as its users call it, for `peers.py`: AutoProcessor, generate, static weights in one dtype."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import torch
import transformers
from peer_protocol import serve, times
from PIL import Image
from transformers import AutoProcessor, Qwen3VLForConditionalGeneration
from transformers.generation.streamers import BaseStreamer


class Moments(BaseStreamer):  # type: ignore[misc]
    """When each new token came; the first `put` is the prompt."""

    def __init__(self) -> None:
        self.at: list[float] = []
        self._prompt_seen = False

    def put(self, _value: torch.Tensor) -> None:
        if self._prompt_seen:
            self.at.append(time.perf_counter())
        self._prompt_seen = True

    def end(self) -> None:
        pass


def open_engine(spec: Mapping[str, Any]) -> Callable[[str, str, int], dict[str, Any]]:
    torch.set_num_threads(spec["threads"])
    processor = AutoProcessor.from_pretrained(spec["path"])
    model = Qwen3VLForConditionalGeneration.from_pretrained(spec["path"], dtype=getattr(torch, spec["dtype"]), attn_implementation="sdpa").eval()
    vision: list[float] = []
    model.model.visual.register_forward_pre_hook(lambda *_: vision.append(-time.perf_counter()))
    model.model.visual.register_forward_hook(lambda *_: vision.append(vision.pop() + time.perf_counter()))

    def answer(picture: str, text: str, new_tokens: int) -> dict[str, Any]:
        vision.clear()
        moments = Moments()
        began = time.perf_counter()
        content = [{"type": "image", "image": Image.open(picture).convert("RGB")}, {"type": "text", "text": text}]
        messages = [{"role": "user", "content": content}]
        inputs = processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt")
        prepared = time.perf_counter()
        with torch.inference_mode():
            output = model.generate(
                **inputs,
                max_new_tokens=new_tokens,
                min_new_tokens=new_tokens,
                do_sample=False,
                temperature=None,
                top_p=None,
                top_k=None,
                streamer=moments,
            )
        generated = time.perf_counter()
        prompt = inputs["input_ids"].shape[1]
        processor.batch_decode(output[:, prompt:], skip_special_tokens=True)
        ended = time.perf_counter()
        stages = {
            "preprocess": [prepared - began],
            "vision": [sum(vision)],
            "prefill": [moments.at[0] - prepared - sum(vision)],
            "decode": [later - earlier for earlier, later in pairwise(moments.at)],
            "detokenise": [ended - generated],
        }
        return times(ended - began, len(moments.at), moments.at[0] - began, stages, prompt)

    return answer


if __name__ == "__main__":
    serve(open_engine, {"transformers": transformers.__version__, "torch": torch.__version__})
