"""Does a twin, exported by optimum-intel to OpenVINO, answer as our own engine does? By hand, in the environment optimum.

    answer.py TWIN ANSWERS.json --questions calib/nano-eval --limit 120        (in qvlopt's environment)
    check_optimum.py TWIN ANSWERS.json --questions calib/nano-eval --limit 120

The export is optimum's own command in float32; the greedy answers come from optimum's model class on the CPU, computed in
float32 too, and once more from OpenVINO's GenAI pipeline, which prepares the pictures itself. The last line is one JSON
object: how many answers are ours and which are not. The exit status is 0 when all of optimum's are.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import openvino as ov
import openvino_genai
from checking import Question, compared_answers, finish, messages, read_arguments, read_questions
from optimum.intel import OVModelForVisualCausalLM
from transformers import AutoProcessor

FLOAT32 = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}


def main() -> None:
    asked = read_arguments(__doc__ or "", ["twin", "ours"])
    questions = read_questions(asked.questions, asked.limit)
    with tempfile.TemporaryDirectory() as scratch:
        export(asked.twin, scratch)
        found = optimum_answers(scratch, questions, asked.max_new_tokens)
        texts = genai_texts(scratch, questions, asked.max_new_tokens)
    ours = json.loads(Path(asked.ours).read_text(encoding="utf-8"))
    result = {
        "twin": asked.twin,
        "questions": len(questions),
        **compared_answers(found, asked.ours),
        "genai_not_as_ours": [name for name, text in texts.items() if text != ours["texts"][name]],
    }
    finish(result, passed=not result["not_as_ours"], packages=["optimum-intel", "openvino", "openvino-genai", "transformers", "torch"])


def export(twin: str, output: str) -> None:
    """As a user would; anything but float32 would compress or round the weights once more."""
    command = [str(Path(sys.executable).with_name("optimum-cli")), "export", "openvino", "--model", twin, "--task", "image-text-to-text"]
    done = subprocess.run([*command, "--weight-format", "fp32", output], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{twin}: the export failed\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}")


def optimum_answers(folder: str, questions: list[Question], limit: int) -> dict[str, list[int]]:
    """Greedy token ids by question through optimum's model class."""
    processor = AutoProcessor.from_pretrained(folder)
    model = OVModelForVisualCausalLM.from_pretrained(folder, device="CPU", ov_config=FLOAT32)
    answers = {}
    for question in questions:
        inputs = processor.apply_chat_template(messages(question), add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt")
        ids = model.generate(**inputs, do_sample=False, max_new_tokens=limit)
        answers[question.id] = ids[0, inputs["input_ids"].shape[1] :].tolist()
    return answers


def genai_texts(folder: str, questions: list[Question], limit: int) -> dict[str, str]:
    """Greedy texts by question through OpenVINO's own pipeline, with its own picture processing and tokenizer."""
    pipeline = openvino_genai.VLMPipeline(folder, "CPU", **FLOAT32)
    texts = {}
    for question in questions:
        picture = ov.Tensor(np.array(question.picture)[None])
        texts[question.id] = pipeline.generate(question.text, images=[picture], do_sample=False, max_new_tokens=limit).texts[0]
    return texts


if __name__ == "__main__":
    main()
