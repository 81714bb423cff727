"""Trains `builtin:nano`: a small Qwen3-VL of the true architecture that reads drawn texts, shapes and documents.

    python tools/train_nano.py dense  --out DIR [--steps N]                     the tower on a dense target
    python tools/train_nano.py answer --out DIR --start DIR/dense [--steps N]   the whole model on answers
    python tools/train_nano.py export --out DIR --start DIR/answer --to qvlopt/assets/nano

Trained end to end from scratch the language loss never finds the glyphs, so stage one teaches the tower: a linear head on
each merged token (and on each DeepStack tap) names the glyph or shape in each of its 8 x 16 pixel slots. Stage two trains
everything on answers. Both are seeded by step: batch k is a pure function of (seed, k), so a run goes on from its last
state, and from the exported bf16 checkpoint alone too (with `--start`, fresh optimizer moments and a warm-up).
"""

from __future__ import annotations

import argparse
import math
import pathlib
import random
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping

import numpy as np
import torch
import torch.nn.functional as F
from nano_checkpoint import write_checkpoint
from nano_forward import NanoForward
from nano_scenes import CLASSES, OCR_QUESTIONS, SIZES, TAGS, TRAINING_SEED_LIMIT, Scene, draw
from nano_tokenizer import build_tokenizer, chat_ids
from safetensors.torch import load_file, save_file
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

from qvlopt.model.vision import VisionConfig, VisionTower

PATCH, MERGE = 16, 2
SLOTS = (2, 4)
"""Slots in a merged token's 32 x 32 pixels: 2 rows of 16, 4 columns of 8."""
BACKGROUND_WEIGHT = 0.1


CONFIG = {
    "architectures": ["Qwen3VLForConditionalGeneration"],
    "model_type": "qwen3_vl",
    "dtype": "bfloat16",
    "tie_word_embeddings": True,
    "vision_config": {
        "model_type": "qwen3_vl_vision", "depth": 6, "hidden_size": 128, "num_heads": 2, "intermediate_size": 512,
        "hidden_act": "gelu_pytorch_tanh", "in_channels": 3, "patch_size": PATCH, "temporal_patch_size": 2, "spatial_merge_size": MERGE,
        "out_hidden_size": 256, "num_position_embeddings": 256, "deepstack_visual_indexes": [1, 3, 4], "initializer_range": 0.02,
    },
    "text_config": {
        "model_type": "qwen3_vl_text", "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "hidden_act": "silu", "rms_norm_eps": 1e-6,
        "max_position_embeddings": 4096, "attention_bias": False, "attention_dropout": 0.0, "initializer_range": 0.02,
        "rope_scaling": {"rope_type": "default", "mrope_interleaved": True, "mrope_section": [12, 10, 10]}, "rope_theta": 10000.0,
        "tie_word_embeddings": True, "use_cache": True,
    },
}  # fmt: skip


def pixels(images: list[np.ndarray]) -> torch.Tensor:
    """uint8 [H, W, 3] pictures of one size, multiples of 32, to [B, N, patch_dim] in (-1, 1): mean = std = 0.5."""
    x = np.stack(images).astype(np.float32) / 127.5 - 1.0
    b, h, w, _ = x.shape
    x = x.reshape(b, h // 32, 2, PATCH, w // 32, 2, PATCH, 3).transpose(0, 1, 4, 2, 5, 7, 3, 6)
    x = np.broadcast_to(x[:, :, :, :, :, :, None], (*x.shape[:6], 2, PATCH, PATCH))
    return torch.from_numpy(x.reshape(b, h * w // PATCH**2, -1).copy())


def slot_targets(scene: Scene, marks: list[tuple[int, float, float]]) -> np.ndarray:
    """Class of the mark (or tag) in each slot, int64 [M, slots]; the leftmost of several wins."""
    width, height = scene.image.size
    columns, rows = width // 32, height // 32
    target = np.zeros((rows * columns, SLOTS[0] * SLOTS[1]), dtype=np.int64)
    for kind, x, y in reversed(marks):
        if not (0 <= x < width and 0 <= y < height):
            continue
        cell = int(y // 32) * columns + int(x // 32)
        slot = int(y % 32 // 16) * SLOTS[1] + int(x % 32 // 8)
        target[cell, slot] = kind
    return target


def batch_scenes(seed: int, step: int, patches: int, mix: tuple[float, float, float], longest: int) -> list[Scene]:
    """The scenes of a batch: one size, about `patches` patches in all."""
    rng = random.Random((seed * 1_000_003 + step) % TRAINING_SEED_LIMIT)
    size = rng.choice(SIZES)
    count = max(8, round(patches / (size[0] * size[1] / PATCH**2)))
    tasks = rng.choices(("ocr", "vqa", "doc"), weights=mix, k=count)
    return [draw(task, rng, size, longest) for task in tasks]


class Prefetch(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Batches by step number, made in a worker process."""

    def __init__(self, make, start: int, stop: int) -> None:  # type: ignore[no-untyped-def]
        self.make, self.start, self.stop = make, start, stop

    def __len__(self) -> int:
        return self.stop - self.start

    def __getitem__(self, index: int):  # type: ignore[no-untyped-def]
        return self.make(self.start + index)


def batches(make, start: int, stop: int) -> Iterator:  # type: ignore[no-untyped-def, type-arg]
    return iter(torch.utils.data.DataLoader(Prefetch(make, start, stop), batch_size=None, num_workers=1, prefetch_factor=4))


def grid_of(scenes: list[Scene]) -> tuple[int, int]:
    width, height = scenes[0].image.size
    return height // PATCH, width // PATCH


def optimizers(named: dict[str, torch.nn.Parameter], kind: str, tower_lr: float, rest_lr: float) -> list[torch.optim.Optimizer]:
    """AdamW over everything, or Muon over the matrices of blocks, mergers and layers and AdamW over the rest."""

    def is_matrix(name: str, p: torch.nn.Parameter) -> bool:
        # the mergers' square matrices would cost half of the orthogonalisation's time
        return (
            kind == "muon"
            and p.ndim == 2
            and not any(
                k in name
                for k in ("embed", "heads.", "merger.linear_fc1", "merger_list.0.linear_fc1", "merger_list.1.linear_fc1", "merger_list.2.linear_fc1")
            )
        )

    def lr(name: str) -> float:
        return tower_lr if name.startswith("model.visual") else rest_lr

    groups = [{"params": [p], "lr": lr(n), "weight_decay": 0.02 if p.ndim > 1 else 0.0} for n, p in named.items() if not is_matrix(n, p)]
    out: list[torch.optim.Optimizer] = [torch.optim.AdamW(groups, betas=(0.9, 0.98), eps=1e-8, foreach=True)]
    matrices = [{"params": [p], "lr": lr(n) * 2.0, "weight_decay": 0.02} for n, p in named.items() if is_matrix(n, p)]
    if matrices:
        out.append(torch.optim.Muon(matrices, momentum=0.95, ns_steps=4, adjust_lr_fn="match_rms_adamw"))
    for optimizer in out:
        for group in optimizer.param_groups:
            group["peak"] = group["lr"]
    return out


def schedule(step: int, steps: int, warmup: int, hold: float) -> float:
    """Linear warm-up, then flat until `hold` of the steps, then a cosine down to 2 %."""
    if step < warmup:
        return (step + 1) / warmup
    if step < hold * steps:
        return 1.0
    at = (step - hold * steps) / max(1.0, steps - hold * steps)
    return 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * min(1.0, at)))


def update(opts: list[torch.optim.Optimizer], named: dict[str, torch.nn.Parameter], factor: float) -> None:
    torch.nn.utils.clip_grad_norm_(list(named.values()), 1.0)
    for optimizer in opts:
        for group in optimizer.param_groups:
            group["lr"] = group["peak"] * factor
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def stored_weights(folder: pathlib.Path) -> dict[str, torch.Tensor]:
    """The tensors of a training state, or of an exported checkpoint (then without the heads of the dense targets)."""
    state = folder / "weights.safetensors"
    return load_file(state if state.exists() else folder / "model.safetensors")


def new_model(start: pathlib.Path | None) -> Qwen3VLForConditionalGeneration:
    torch.manual_seed(0)
    config = {**CONFIG, **special_ids()}
    config["text_config"] = {**CONFIG["text_config"], "vocab_size": VOCAB}  # type: ignore[dict-item]
    model = Qwen3VLForConditionalGeneration(Qwen3VLConfig(**config)).float()
    if start:
        weights = stored_weights(start)
        missing = model.load_state_dict({k: v.float() for k, v in weights.items() if not k.startswith("heads.")}, strict=False)
        print("started from", start, "without", [k for k in missing.missing_keys if k != "lm_head.weight"][:3])
    return model


TOKENIZER = build_tokenizer()
VOCAB = 128 * math.ceil(TOKENIZER.get_vocab_size() / 128)


def special_ids() -> dict[str, int]:
    return {
        "image_token_id": TOKENIZER.token_to_id("<|image_pad|>"), "video_token_id": TOKENIZER.token_to_id("<|video_pad|>"),
        "vision_start_token_id": TOKENIZER.token_to_id("<|vision_start|>"), "vision_end_token_id": TOKENIZER.token_to_id("<|vision_end|>"),
    }  # fmt: skip


def visual_parts(model: Qwen3VLForConditionalGeneration) -> tuple[VisionTower, dict[str, torch.nn.Parameter]]:
    weights = dict(model.model.visual.named_parameters())
    return VisionTower(VisionConfig.from_dict(CONFIG["vision_config"]), weights), weights  # type: ignore[arg-type]


def save(model: Qwen3VLForConditionalGeneration, folder: pathlib.Path, **more: torch.Tensor) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    weights = {k: v.detach().contiguous() for k, v in model.state_dict().items() if k != "lm_head.weight"}
    save_file({**weights, **more}, folder / "weights.tmp")
    (folder / "weights.tmp").rename(folder / "weights.safetensors")


def dense_batch(args: argparse.Namespace):  # type: ignore[no-untyped-def]
    def make(step: int):  # type: ignore[no-untyped-def]
        scenes = batch_scenes(args.seed + 17, step, args.patches, (0.45, 0.2, 0.35), 8)
        return pixels([np.asarray(s.image) for s in scenes]), np.stack([slot_targets(s, s.marks) for s in scenes]), grid_of(scenes)

    return make


def train_dense(args: argparse.Namespace) -> None:
    """The tower under linear heads; prints the share of marked slots named rightly."""
    model = new_model(args.start)
    tower, weights = visual_parts(model)
    classes, slots = len(CLASSES) + 1, SLOTS[0] * SLOTS[1]
    heads = torch.nn.ModuleList(torch.nn.Linear(256, classes * slots) for _ in range(4))
    named = {f"model.visual.{k}": v for k, v in weights.items()} | {f"heads.{k}": v for k, v in heads.named_parameters()}
    opts = optimizers(named, args.optimizer, args.lr, args.lr)
    penalty = torch.ones(classes)
    penalty[0] = BACKGROUND_WEIGHT
    began, hits, marks, losses = time.monotonic(), 0, 0, 0.0
    for step, (x, target, grid) in enumerate(batches(dense_batch(args), 0, args.steps)):
        target = torch.as_tensor(target)
        with torch.autocast("cpu", torch.bfloat16):
            out = tower(x, grid)
            logits = [head(t).view(-1, classes).float() for head, t in zip(heads, (out.merged, *out.deepstack), strict=True)]
        loss_each = [F.cross_entropy(v, target.reshape(-1), weight=penalty) for v in logits]
        loss = loss_each[0] + args.tap_weight * sum(loss_each[1:])
        loss.backward()
        update(opts, named, schedule(step, args.steps, 60, args.hold))
        marked = target.reshape(-1) > 0
        hits += int((logits[0].argmax(-1)[marked] == target.reshape(-1)[marked]).sum())
        marks += int(marked.sum())
        losses += loss_each[0].item()
        if (step + 1) % 50 == 0:
            print(f"dense {step + 1} loss {losses / 50:.4f} slots {hits / marks:.3f} {time.monotonic() - began:.0f} s", flush=True)
            hits, marks, losses = 0, 0, 0.0
        if (step + 1) % 500 == 0 or step + 1 == args.steps:
            save(model, args.out / "dense", **{f"heads.{k}": v.detach() for k, v in heads.state_dict().items()})


def answer_batch(args: argparse.Namespace):  # type: ignore[no-untyped-def]
    image_id = TOKENIZER.token_to_id("<|image_pad|>")

    def make(step: int):  # type: ignore[no-untyped-def]
        longest = min(8, 3 + int(6 * step / max(1, args.grow)))
        scenes = batch_scenes(args.seed + 91, step, args.patches, args.mix, longest)
        rng = random.Random(step)
        grid = grid_of(scenes)
        tokens = grid[0] * grid[1] // MERGE**2
        rows = []
        listing = args.list_first + (args.list_last - args.list_first) * min(1.0, step / args.list_steps)
        kinds = []
        for scene in scenes:
            turns = scene.turns[: rng.choice(args.turns)]
            if scene.listing and rng.random() < listing:
                turns = [scene.listing]
            kinds.append("list" if turns[0] is scene.listing else task_of(scene))
            rows.append(chat_ids(TOKENIZER, turns, tokens))
        length = max(len(ids) for ids, _ in rows)
        ids = np.zeros((len(rows), length), dtype=np.int64)
        labels = np.full((len(rows), length), -100, dtype=np.int64)
        for i, (row, learn) in enumerate(rows):
            ids[i, : len(row)] = row
            labels[i, : len(row)] = np.where(learn, row, -100)
        assert (ids == image_id).sum() == tokens * len(rows)
        dense = np.stack([np.stack((slot_targets(s, s.marks), slot_targets(s, s.tags))) for s in scenes], axis=1)
        return pixels([np.asarray(s.image) for s in scenes]), ids, labels, grid, dense, kinds

    return make


def task_of(scene: Scene) -> str:
    question = scene.turns[0][0]
    return "ocr" if question in OCR_QUESTIONS else "doc" if question.startswith("What is the value") else "vqa"


def answer_positions(ids: torch.Tensor, image_id: int, grid: tuple[int, int]) -> torch.Tensor:
    """M-RoPE positions [3, 1, T] of a prompt with one picture, all rows of a batch alike."""
    first = int((ids[0] == image_id).nonzero()[0])
    rows, cols = grid[0] // MERGE, grid[1] // MERGE
    before = torch.arange(first).expand(3, -1)
    picture = torch.stack((torch.zeros(rows * cols), torch.arange(rows).repeat_interleave(cols), torch.arange(cols).repeat(rows))).long() + first
    rest = torch.arange(ids.shape[1] - first - rows * cols) + first + max(rows, cols)
    return torch.cat((before, picture, rest.expand(3, -1)), dim=1)[:, None]


def answer_heads(stored: Mapping[str, torch.Tensor]) -> torch.nn.ModuleList:
    """Heads that name the marks and the tags of every slot, with `stored` weights where they fit."""
    slots = SLOTS[0] * SLOTS[1]
    heads = torch.nn.ModuleList([torch.nn.Linear(256, kinds * slots) for kinds in (len(CLASSES) + 1, len(TAGS) + 1)])
    own = heads.state_dict()
    fitting = {k.removeprefix("heads."): v.float() for k, v in stored.items() if k.startswith("heads.")}
    heads.load_state_dict({k: v for k, v in fitting.items() if k in own and v.shape == own[k].shape}, strict=False)
    return heads


def resume(folder: pathlib.Path, model: torch.nn.Module, heads: torch.nn.Module, opts: list[torch.optim.Optimizer]) -> int:
    """Loads what an earlier run left; peak rates stay those of this run. Returns the step to go on with."""
    state = torch.load(folder / "optimizer.pt", weights_only=True)
    for optimizer, kept in zip(opts, state["optimizers"], strict=True):
        peaks = [group["peak"] for group in optimizer.param_groups]
        optimizer.load_state_dict(kept)
        for group, peak in zip(optimizer.param_groups, peaks, strict=True):
            group["peak"] = peak
    model.load_state_dict(load_file(folder / "weights.safetensors"), strict=False)
    heads.load_state_dict(state["heads"])
    return int(state["step"])


def answer_loss(logits: torch.Tensor, target: torch.Tensor, learn: torch.Tensor) -> torch.Tensor:
    """Of logits [n, vocabulary] at the n positions of `learn` [B, T]: a long answer counts more than a short one, but not by its length."""
    weight = learn.sum(1)[learn.nonzero()[:, 0]].float().rsqrt()
    return (F.cross_entropy(logits, target[learn], reduction="none") * weight).sum() / weight.sum()


def dense_losses(heads: torch.nn.ModuleList, features: torch.Tensor, dense: torch.Tensor) -> list[torch.Tensor]:
    """Of every head on the picture's features; slots without anything count BACKGROUND_WEIGHT."""
    losses = []
    for head, target, kinds in zip(heads, dense, (len(CLASSES) + 1, len(TAGS) + 1), strict=True):
        penalty = torch.ones(kinds)
        penalty[0] = BACKGROUND_WEIGHT
        losses.append(F.cross_entropy(head(features.float()).view(-1, kinds), target, weight=penalty))
    return losses


def right_answers(logits: torch.Tensor, target: torch.Tensor, learn: torch.Tensor) -> list[float]:
    """For each row whether all of its answer is right: 1 or 0."""
    wrong = torch.zeros(len(target), dtype=torch.bool)
    wrong[learn.nonzero()[:, 0][logits.argmax(-1) != target[learn]]] = True
    return (~wrong).float().tolist()


def train_answer(args: argparse.Namespace) -> None:
    """The whole model on answers, with a little of the dense target kept so that the tower does not forget."""
    model, folder = new_model(args.start), args.out / "answer"
    heads = answer_heads(stored_weights(args.start) if args.start else {})
    weights = {k: v for k, v in model.named_parameters() if k != "lm_head.weight"}
    named = weights | {f"heads.{k}": v for k, v in heads.named_parameters()}
    opts = optimizers(named, args.optimizer, args.lr * args.tower_factor, args.lr)
    begin = resume(folder, model, heads, opts) if args.resume and (folder / "optimizer.pt").exists() else args.begin
    forward = NanoForward(VisionConfig.from_dict(CONFIG["vision_config"]), CONFIG["text_config"]["num_hidden_layers"], weights)  # type: ignore[arg-type, index]
    image_id = TOKENIZER.token_to_id("<|image_pad|>")
    began, seen = time.monotonic(), defaultdict(list)  # type: ignore[var-annotated]
    for step, (x, ids, labels, grid, dense, kinds) in enumerate(batches(answer_batch(args), begin, args.steps), begin):
        ids, labels, dense = torch.as_tensor(ids), torch.as_tensor(labels), torch.as_tensor(dense).flatten(1)
        forward.cast()
        picture = forward.vision(x, grid)
        cos, sin = model.model.language_model.rotary_emb(torch.zeros(1), answer_positions(ids, image_id, grid))
        hidden = forward.text(ids, picture, int((ids[0] == image_id).nonzero()[0]), (cos[0], sin[0]))
        target, learn = labels[:, 1:], labels[:, 1:] != -100
        logits = F.linear(hidden[:, :-1][learn], forward.w["model.language_model.embed_tokens.weight"]).float()
        token_loss, aside = answer_loss(logits, target, learn), dense_losses(heads, picture[0], dense)
        (token_loss + args.dense_weight * sum(aside)).backward()
        update(opts, named, schedule(step - args.begin, args.steps - args.begin, args.warmup, args.hold))
        for kind, share in (*zip(kinds, right_answers(logits, target, learn), strict=True), ("loss", token_loss.item()), ("tags", aside[1].item())):
            seen[kind].append(share)
        if (step + 1) % 50 == 0:
            shares = " ".join(f"{k} {sum(v) / len(v):.3f}" for k, v in sorted(seen.items()))
            print(f"answer {step + 1} {shares} {time.monotonic() - began:.0f} s", flush=True)
            seen.clear()
        if (step + 1) % args.save_every == 0 or step + 1 == args.steps:
            save(model, folder, **{f"heads.{k}": v.detach() for k, v in heads.state_dict().items()})
            torch.save({"step": step + 1, "optimizers": [o.state_dict() for o in opts], "heads": heads.state_dict()}, folder / "optimizer.pt")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=("dense", "answer", "export"))
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--start", type=pathlib.Path)
    parser.add_argument("--to", type=pathlib.Path)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--patches", type=int, default=3840, help="patches a batch")
    parser.add_argument("--lr", type=float, default=1.2e-3)
    parser.add_argument("--tower-factor", type=float, default=0.5)
    parser.add_argument("--optimizer", choices=("adamw", "muon"), default="adamw")
    parser.add_argument("--tap-weight", type=float, default=0.3)
    parser.add_argument("--dense-weight", type=float, default=0.2)
    parser.add_argument("--mix", type=float, nargs=3, default=(0.5, 0.2, 0.3), help="shares of ocr, vqa, doc")
    parser.add_argument("--list-first", type=float, default=0.6, help="share of documents and shapes that are listed whole, at the start")
    parser.add_argument("--list-last", type=float, default=0.1, help="the same at the end")
    parser.add_argument("--list-steps", type=int, default=4000, help="steps from the one share to the other")
    parser.add_argument("--turns", type=int, nargs="+", default=(1, 1, 3), help="questions asked about a picture, drawn from these")
    parser.add_argument("--grow", type=int, default=1500, help="steps over which texts reach 8 characters")
    parser.add_argument("--begin", type=int, default=0, help="step at which this schedule starts")
    parser.add_argument("--warmup", type=int, default=60)
    parser.add_argument("--hold", type=float, default=0.6)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--save-every", type=int, default=250)
    parser.add_argument("--resume", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    {"dense": train_dense, "answer": train_answer, "export": export}[args.stage](args)


def export(args: argparse.Namespace) -> None:
    """The trained weights as a bf16 Hugging Face folder."""
    weights = {k: v for k, v in load_file(args.start / "weights.safetensors").items() if not k.startswith("heads.")}
    ids = {name: TOKENIZER.token_to_id(token) for name, token in (("bos_token_id", "<|endoftext|>"), ("eos_token_id", "<|im_end|>"))}
    text = {**CONFIG["text_config"], **ids, "vocab_size": VOCAB, "dtype": "bfloat16"}  # type: ignore[dict-item]
    write_checkpoint(args.to, {**CONFIG, **special_ids(), "text_config": text, "transformers_version": "4.57.0"}, weights)


if __name__ == "__main__":
    main()
