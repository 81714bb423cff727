"""Does transformers load an artifact as it was meant? Run in the environment hf-awq of make_envs.sh.

    check_transformers.py ARTIFACT TWIN --questions calib/nano-eval

Holds when nothing is missing or left over, exactly the linears stored as integers are quantised ones, the weights that they
apply and all other parameters are the twin's bit for bit, the tower's outputs equal the twin's to the last bit, and so do
the greedy answers.

AWQ is loaded with the kernel that dequantises and multiplies (`torch_awq`): the faster ones add in another order. It holds
biases in float16 and rounds the product before it adds them, which an ordinary linear does not, so the twin's linears are
made to do the same. Zero points of compressed-tensors only load with `dequantize=True`: transformers 5.24 expects another shape otherwise.
The last line is one JSON object; the exit status is 0 when all holds.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import torch
from checking import (
    GRIDS,
    Question,
    compared_answers,
    finish,
    messages,
    packed_linears,
    read_arguments,
    read_questions,
    relative_error,
)
from transformers import AutoProcessor, AwqConfig, CompressedTensorsConfig, Qwen3VLForConditionalGeneration


def main() -> None:
    asked = read_arguments(__doc__ or "", ["artifact", "twin"])
    packed = packed_linears(asked.artifact)
    method, options = loading(asked.artifact)
    model, problems = load(asked.artifact, **options)
    twin, twin_problems = load(asked.twin)
    treated = packed
    if method == "awq":
        treated = quantised_linears(model)
        add_biases_as_awq(twin, packed)
    towers = [max(map(relative_error, tower(model, grid), tower(twin, grid))) for grid in GRIDS]
    questions = read_questions(asked.questions, asked.limit)
    answers, expected = (answer(m, folder, questions, asked.max_new_tokens) for m, folder in ((model, asked.artifact), (twin, asked.twin)))
    result = {
        "artifact": asked.artifact,
        "method": method,
        "loading_problems": {**problems, **twin_problems},
        "quantised": len(treated),
        "wrongly_treated": sorted(treated ^ packed),
        "other_weights": [name for name in sorted(packed) if not torch.equal(applied(model, name), applied(twin, name))],
        "other_parameters": differing(model, twin, packed),
        "tower_error": max(towers),
        "questions": len(questions),
        "other_answers": [name for name in answers if answers[name] != expected[name]],
        **compared_answers(answers, asked.answers),
    }
    wrong = ("loading_problems", "wrongly_treated", "other_weights", "other_parameters", "tower_error", "other_answers")
    passed = bool(packed) and not any(result[key] for key in wrong)
    finish(result, passed=passed, packages=["transformers", "gptqmodel", "compressed-tensors", "torch"])


def loading(folder: str) -> tuple[str, dict[str, Any]]:
    """The artifact's quantisation method and the options that its exact loading needs."""
    method = json.loads(Path(folder, "config.json").read_text(encoding="utf-8"))["quantization_config"]["quant_method"]
    config = AwqConfig(backend="torch_awq") if method == "awq" else CompressedTensorsConfig(dequantize=True)
    return method, {"quantization_config": config}


def load(folder: str, **options: Any) -> tuple[Qwen3VLForConditionalGeneration, dict[str, list[str]]]:
    """The model in its own dtype on the CPU, and keys that were missing, left over or of another shape."""
    model, info = Qwen3VLForConditionalGeneration.from_pretrained(folder, device_map={"": "cpu"}, dtype="auto", output_loading_info=True, **options)
    return model.eval(), {kind: sorted(map(str, keys))[:5] for kind, keys in info.items() if keys}


def quantised_linears(model: torch.nn.Module) -> set[str]:
    """Modules with packed integers; an ordinary linear has none."""
    return {name for name, module in model.named_modules() if hasattr(module, "qweight")}


def add_biases_as_awq(twin: torch.nn.Module, names: set[str]) -> None:
    """Makes linears hold a bias that fits float16 and add it after x @ W is rounded to their dtype."""
    for name in names:
        linear = twin.get_submodule(name)
        if linear.bias is not None:
            linear.bias.data = linear.bias.data.to(torch.float16).to(linear.weight.dtype)
        linear.forward = partial(multiply_then_add, linear)


def multiply_then_add(linear: torch.nn.Linear, x: torch.Tensor) -> torch.Tensor:
    product = torch.matmul(x.reshape(-1, x.shape[-1]), linear.weight.t().contiguous())
    return (product if linear.bias is None else product + linear.bias).reshape(*x.shape[:-1], -1)


def applied(model: torch.nn.Module, name: str) -> torch.Tensor:
    """The weights [K, N] that a linear multiplies by: what it makes of the identity, which no order of adding changes."""
    linear = model.get_submodule(name)
    bias, linear.bias = linear.bias, None
    with torch.inference_mode():
        weights = linear(torch.eye(linear.in_features, dtype=model.dtype))
    linear.bias = bias
    return weights


def differing(model: torch.nn.Module, twin: torch.nn.Module, packed: set[str]) -> list[str]:
    """Parameters beside the quantised weights that are not the twin's; biases are buffers in a quantised linear."""
    found = dict(model.named_parameters()) | dict(model.named_buffers())
    expected = {name: value for name, value in twin.named_parameters() if not (name.endswith(".weight") and name.removesuffix(".weight") in packed)}
    return [name for name, value in expected.items() if name not in found or not torch.equal(found[name].to(value.dtype), value)][:5]


def tower(model: Qwen3VLForConditionalGeneration, grid: tuple[int, int]) -> list[torch.Tensor]:
    """The tower's output and its DeepStack outputs on seeded noise of that many patches."""
    width = model.model.visual.patch_embed.proj.weight[0].numel()
    noise = torch.randn(grid[0] * grid[1], width, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        output = model.model.visual(noise.to(model.dtype), grid_thw=torch.tensor([[1, *grid]]))
    return [output.pooler_output, *output.deepstack_features]


def answer(model: Qwen3VLForConditionalGeneration, folder: str, questions: list[Question], limit: int) -> dict[str, list[int]]:
    """Greedy token ids by question, each asked alone, through the folder's own processor and chat template."""
    processor = AutoProcessor.from_pretrained(folder)
    answers = {}
    for question in questions:
        inputs = processor.apply_chat_template(messages(question), add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt")
        with torch.inference_mode():
            ids = model.generate(**inputs.to(model.dtype), do_sample=False, temperature=None, top_p=None, top_k=None, max_new_tokens=limit)
        answers[question.id] = ids[0, inputs["input_ids"].shape[1] :].tolist()
    return answers


if __name__ == "__main__":
    main()
