"""Writes the graphs and tables of an INT8 layout: weights are rounded while they are written, the head is shared.

A tied head is the embedding: its bytes are in the tables once, as u8 rows with a scale for each block, and the graphs point there.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import NamedTuple

import torch

from qvlopt.artifact.tensors import TensorFiles, TensorWriter, dtype_code
from qvlopt.graphs.decoder import build_decoder
from qvlopt.graphs.layer_errors import Wanted
from qvlopt.graphs.measure import Variant
from qvlopt.graphs.names import DECODE_GRAPH, DECODER_GRAPH, EMBED_SCALE, EMBED_TABLE, POS_TABLE, TABLES, VISION_GRAPH, data_file
from qvlopt.graphs.quantised import BLOCK, BLOCK4, Place, QuantisedLinear, Scheme
from qvlopt.graphs.rounding import block_size, round_blocks
from qvlopt.graphs.tables import write_tables
from qvlopt.graphs.vision import build_vision
from qvlopt.graphs.weights import Weights
from qvlopt.graphs.writer import GraphWriter, Written
from qvlopt.model.config import ModelConfig
from qvlopt.model.names import EMBEDDING as EMBEDDING_MODULE
from qvlopt.model.names import LM_HEAD, VISION
from qvlopt.model.shapes import EMBEDDING, HEAD

LAYOUTS: dict[str, dict[str, Scheme]] = {
    "int8": {VISION_GRAPH: "w8a8", DECODER_GRAPH: "w8a8"},
    "fast": {VISION_GRAPH: "w8a8", DECODER_GRAPH: "w8a8", DECODE_GRAPH: "blocks4"},
    "small": {VISION_GRAPH: "w8a8", DECODER_GRAPH: "blocks4"},
}
"""What the linears of each graph become (docs/contract.md, section 6); the head is 8 bits in blocks everywhere."""


class Linears(NamedTuple):
    """Which layers have a bias, whether the head is the embedding, and who is told of each layer that is written."""

    biased: Collection[str]
    is_tied: bool
    seen: Callable[[str], None] = lambda _: None


class Made(NamedTuple):
    """What was written: weights of all graphs, and what each quantised module is called."""

    written: list[Written]
    labels: dict[str, str]


def variants_of(layout: str, weights: Weights, wanted: Wanted) -> dict[str, Variant]:
    """A Variant for each graph of the layout, with nothing decided yet; `wanted` but for the scheme."""
    return {graph: Variant(weights, wanted._replace(scheme=scheme)) for graph, scheme in LAYOUTS[layout].items()}


def write_graphs(
    folder: Path,
    settings: ModelConfig,
    weights: Weights,
    variants: dict[str, Variant],
    linears: Linears,
) -> Made:
    """Writes every graph of `variants` as decided, and the tables."""
    head = _write_shared_tables(folder, weights) if linears.is_tied and variants[DECODER_GRAPH].schemes.get(LM_HEAD) == "blocks8" else None
    if head is None:
        write_tables(folder, weights, ("vision", "decoder"))
    made = Made([], {EMBEDDING_MODULE: f"INT8 g{head.block}"} if head else {})
    for name, variant in variants.items():
        linear = QuantisedLinear(
            variant.weights,
            linears.biased,
            variant.schemes,
            largest=variant.wanted.largest,
            importance=variant.importance,
            seen=linears.seen,
        )
        if head is not None:
            linear.places[LM_HEAD] = head
        with GraphWriter(folder / name) as graph:
            if name == VISION_GRAPH:
                build_vision(graph, settings.vision, variant.weights, linear)
            else:
                build_decoder(graph, settings.text, len(settings.vision.deepstack_visual_indexes), variant.weights, linear)
        made.written.extend(graph.weights)
        if head is None and variant.schemes.get(LM_HEAD) == "blocks8":
            head = Place(data_file(name), graph.places[f"{LM_HEAD}.weight"], graph.places[f"{LM_HEAD}.scale"], _block(weights(HEAD)))
        _label(made.labels, variant, weights)
    return made


def _write_shared_tables(folder: Path, weights: Weights) -> Place:
    """The embedding as u8 rows, which are the head's integers too, and the position table; says where they lie."""
    embedding = weights(EMBEDDING)
    rounded = round_blocks(embedding, bits=8, block=_block(embedding))
    positions = weights(f"{VISION}.pos_embed.weight").float()
    tensors = {EMBED_SCALE: rounded.scale, POS_TABLE: positions, EMBED_TABLE: rounded.q}
    plan = [(name, dtype_code(tensor.dtype), tuple(tensor.shape)) for name, tensor in tensors.items()]
    with TensorWriter(folder / TABLES, plan) as writer:
        for name, tensor in tensors.items():
            writer.write(name, tensor)
    entries = TensorFiles.open(folder, weights=TABLES).entries
    return Place(TABLES, entries[EMBED_TABLE].start, entries[EMBED_SCALE].start, rounded.block)


def _block(head: torch.Tensor) -> int:
    block = block_size(head.shape[1], BLOCK)
    assert block is not None, "a head without a block size is float32"
    return block


def _label(labels: dict[str, str], variant: Variant, weights: Weights) -> None:
    """Adds what this graph makes of its layers; a module of two graphs is called by both."""
    for name, scheme in variant.schemes.items():
        if scheme == "float32":
            continue
        width = weights(f"{name}.weight").shape[1] if scheme != "w8a8" else 0
        label = "INT8 channel" if scheme == "w8a8" else f"INT{scheme[-1]} g{block_size(width, BLOCK if scheme == 'blocks8' else BLOCK4)}"
        labels[name] = label if labels.get(name, label) == label else f"{labels[name]} and {label}"
