"""The model card of an artifact: what was done, what it cost, how to run it and where it must not be run."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

CARD = "README.md"
SCORES_BEGIN, SCORES_END = "<!-- scores -->", "<!-- end of scores -->"
"""What stands between these lines is replaced by each evaluation."""
WORST = 10

_SERVE = "vllm serve <this folder>"
_ENGINES = {
    "awq": (
        "vLLM loads this folder as it is. transformers needs `gptqmodel` and `accelerate`; on a CPU load it with "
        '`AwqConfig(backend="torch_awq")`.\n\n'
        "**Not SGLang**: it skips tensors it does not know without a word, and the vision tower would be noise. "
        "llama.cpp and SGLang users need `format: bf16`."
    ),
    "compressed-tensors": (
        "vLLM loads this folder as it is (8 bits on a GPU only). transformers needs `compressed-tensors` and, with zero points, "
        "`CompressedTensorsConfig(dequantize=True)`.\n\n"
        "**Not SGLang**: it skips tensors it does not know without a word, and the vision tower would be noise. "
        "llama.cpp and SGLang users need `format: bf16`."
    ),
    "bf16": "An ordinary 16-bit checkpoint with the quantised values: for SGLang, llama.cpp's converter, and comparisons. It is no smaller.",
}


class Score(NamedTuple):
    """One gated metric of an evaluation; scores in [0, 1], `low` and `high` bound the change."""

    task: str
    metric: str
    n: int
    base: float
    candidate: float
    low: float
    high: float
    verdict: str


def awq_card(manifest: Mapping[str, Any], command: str) -> str:
    """README.md of a quantize-awq artifact from its manifest's plain values and the command that makes it."""
    section = manifest["recipe"]["quantize_awq"]
    layers: Sequence[Mapping[str, Any]] = manifest["layers"]
    source = manifest["source"]
    form = section["format"]
    parts = [
        _front_matter(source["path"], section["bits"], form),
        f"# {manifest['recipe']['name']}: {_scope(section)} in INT{section['bits']}\n",
        f"{len(layers)} linear layers of the {_scope(section)} of `{source['path']}` are rounded to {section['bits']} bits in groups of "
        f"{section['group_size']} ({'with zero points' if section['zero_point'] else 'symmetric'}). {_kept(section)} "
        f"{'byte for byte those of the source' if section['dtype'] == 'source' else 'cast to ' + section['dtype']}; "
        "`qvlopt.json` lists every module with its digest before and after.\n",
        _sizes(manifest["modules"]),
        f"## Scores\n\n{SCORES_BEGIN}\nNot evaluated yet: run `qvlopt evaluate` on this folder.\n{SCORES_END}\n",
        _losses(layers, manifest["coverage"]),
        _compensation(layers) if section["search"]["compensate"] else "",
        f"## Running it\n\n    {_SERVE}\n\n{_ENGINES[form]}\n",
        f"## Made by\n\nqvlopt {manifest['version']}, recipe `{manifest['recipe']['name']}` (in full under `recipe` in `qvlopt.json`):\n\n"
        f"    {command}\n\n"
        f"Source digest `{source['digest']}`{', revision `' + source['revision'] + '`' if source['revision'] else ''}.\n",
    ]
    return "\n".join(part for part in parts if part)


def _scope(section: Mapping[str, Any]) -> str:
    return "vision tower and decoder layers" if section["scope"] == "vision+language" else "vision tower"


def _kept(section: Mapping[str, Any]) -> str:
    return "Embeddings and lm_head are" if section["scope"] == "vision+language" else "The language model and lm_head are"


def with_scores(card: str, scores: Sequence[Score]) -> str:
    """The card with its scores replaced; unchanged where it has no place for them."""
    before, begin, rest = card.partition(SCORES_BEGIN)
    _, end, after = rest.partition(SCORES_END)
    if not begin or not end:
        return card
    rows = [f"| {s.task} | {s.metric} | {s.n} | {s.base:.2%} | {s.candidate:.2%} | {s.low:+.2%} to {s.high:+.2%} | {s.verdict} |" for s in scores]
    table = ["| task | metric | n | source | this | change, interval | verdict |", "|---|---|---|---|---|---|---|", *rows]
    return before + begin + "\n" + "\n".join(table) + "\n" + end + after


def _front_matter(base: str, bits: int, form: str) -> str:
    """YAML; a JSON string is one too, whatever a path holds."""
    lines = [
        "---",
        "library_name: transformers",
        "pipeline_tag: image-text-to-text",
        f"base_model: {json.dumps(base)}",
        "base_model_relation: quantized",
    ]
    return "\n".join([*lines, f"tags: [qwen3_vl, vision-tower-int{bits}, {form}]", "---", ""])


def _sizes(modules: Sequence[Mapping[str, Any]]) -> str:
    vision = [module for module in modules if module["name"].startswith("model.visual.")]
    rows = [
        f"| {name} | {sum(m['bytes_before'] for m in part):,} | {sum(m['bytes_after'] for m in part):,} |"
        for name, part in (("vision tower", vision), ("whole", modules))
    ]
    return "\n".join(["| bytes of tensors | source | this |", "|---|---|---|", *rows, ""])


def _losses(layers: Sequence[Mapping[str, Any]], coverage: Mapping[str, Any]) -> str:
    worst = sorted(layers, key=lambda layer: -float(layer["loss"]))[:WORST]
    rows = [f"| `{layer['name']}` | {layer['rounding_loss']:.5f} | {layer['loss']:.5f} | {layer['method']} |" for layer in worst]
    rounding, chosen = (sum(float(layer[key]) for layer in layers) for key in ("rounding_loss", "loss"))
    lead = (
        f"## Loss per layer\n\nSquared output error as a share of the layer's squared output, over {coverage['images']} pictures "
        f"({coverage['tokens']:,} patches) of the calibration set. Sum over layers: {rounding:.4f} by plain rounding, {chosen:.4f} as chosen. "
        f"The {len(worst)} worst:\n"
    )
    return "\n".join([lead, "| layer | rounding | chosen | by |", "|---|---|---|---|", *rows, ""])


def _compensation(layers: Sequence[Mapping[str, Any]]) -> str:
    """Every layer with its loss on held-out pictures, without compensation and as chosen."""
    judged = [layer for layer in layers if layer["held_out_loss"] is not None and layer["held_out_uncompensated"] is not None]
    chosen = [layer for layer in judged if "compensate" in layer["method"]]
    rows = []
    for layer in judged:
        old, new = float(layer["held_out_uncompensated"]), float(layer["held_out_loss"])
        done, change = "yes" if layer in chosen else "no", new / old - 1 if old else 0.0
        rows.append(f"| `{layer['name']}` | {done} | {old:.5f} | {new:.5f} | {change:+.0%} |")
    before, after = (sum(float(layer[key]) for layer in judged) for key in ("held_out_uncompensated", "held_out_loss"))
    lead = (
        f"## Compensation\n\n{len(chosen)} of {len(judged)} layers are rounded so that each column makes up for the errors of those before it. "
        f"Chosen by the loss on pictures that were held out: {before:.4f} without, {after:.4f} as chosen. Then all pictures were fitted to.\n"
    )
    return "\n".join([lead, "| layer | compensated | held out, without | as chosen | change |", "|---|---|---|---|---|", *rows, ""])
