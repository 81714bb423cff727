"""Float32 graphs of tiny checkpoints, without the command around them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from qvlopt.graphs.decoder import build_decoder
from qvlopt.graphs.names import DECODER_GRAPH, VISION_GRAPH
from qvlopt.graphs.tables import write_tables
from qvlopt.graphs.vision import build_vision
from qvlopt.graphs.weights import FloatLinear, biased_layers, weights_of
from qvlopt.graphs.writer import GraphWriter
from qvlopt.model.source import Source, open_source
from tests.tiny import build_tiny


def tiny_source(folder: Path, **shape: Any) -> Source:
    """A tiny checkpoint, opened."""
    return open_source(str(build_tiny(folder, **shape)), folder=folder)


def write_graphs(folder: Path, source: Source) -> Path:
    """Writes both graphs and the tables into `folder`, which is made, and returns it."""
    folder.mkdir()
    weights, settings = weights_of(source), source.settings
    linear = FloatLinear(weights, biased_layers(source))
    with GraphWriter(folder / VISION_GRAPH) as graph:
        build_vision(graph, settings.vision, weights, linear)
    with GraphWriter(folder / DECODER_GRAPH) as graph:
        build_decoder(graph, settings.text, len(settings.vision.deepstack_visual_indexes), weights, linear)
    write_tables(folder, weights, ("vision", "decoder"))
    return folder
