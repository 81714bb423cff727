"""OpenVINO GenAI's pipeline on the CPU, for `peers.py`. Its prefix cache is off, since no two requests share anything."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import openvino
import openvino_genai
from peer_protocol import serve, times
from PIL import Image


def open_engine(spec: Mapping[str, Any]) -> Callable[[str, str, int], dict[str, Any]]:
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.enable_prefix_caching = False
    pipeline = openvino_genai.VLMPipeline(spec["path"], "CPU", scheduler_config=scheduler, INFERENCE_NUM_THREADS=spec["threads"])

    def answer(picture: str, text: str, new_tokens: int) -> dict[str, Any]:
        settings = openvino_genai.GenerationConfig(max_new_tokens=new_tokens, min_new_tokens=new_tokens, ignore_eos=True, do_sample=False)
        began = time.perf_counter()
        image = openvino.Tensor(np.asarray(Image.open(picture).convert("RGB"))[None])
        loaded = time.perf_counter()
        result = pipeline.generate(text, images=[image], generation_config=settings)
        ended = time.perf_counter()
        metrics = result.perf_metrics
        first, embedding = metrics.get_ttft().mean / 1000, metrics.get_prepare_embeddings_duration().mean / 1000
        tokens = metrics.get_num_generated_tokens()
        stages = {
            "preprocess": [loaded - began],  # resizing and patching are part of its embeddings
            "vision": [embedding],
            "prefill": [first - embedding],
            "decode": [metrics.get_tpot().mean / 1000] * (tokens - 1),  # it tells the mean only
            "detokenise": [metrics.get_detokenization_duration().mean / 1000],
        }
        return times(ended - began, tokens, loaded - began + first, stages, metrics.get_num_input_tokens())

    return answer


if __name__ == "__main__":
    serve(open_engine, {"openvino": openvino.__version__, "openvino-genai": openvino_genai.__version__})
