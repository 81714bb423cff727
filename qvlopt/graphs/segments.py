"""Runs a decoder's graph a few layers at a time, so that a model larger than the memory can be checked.

Each part holds the graph's own nodes and reads the graph's own data file; together the parts are the whole graph. A small
model is one part: its graph as it is.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from qvlopt.graphs import names
from qvlopt.graphs.session import open_session
from qvlopt.graphs.torch_layers import TextInputs

MOST_BYTES = 10**9
"""Weights of a part, unless one layer, or the last layer with the head, has more."""


def logits_by_segment(
    path: Path, settings: Mapping[str, Any], prompt: TextInputs, cuts: Sequence[int], *, threads: int, most_bytes: int = MOST_BYTES
) -> np.ndarray:
    """Logits of every position [S, vocab]: chunk by chunk between the `cuts`, over key-value buffers that are handed on."""
    model = onnx.load(str(path), load_external_data=False)
    chunks = list(itertools.pairwise(cuts))
    hidden: list[np.ndarray | None] = [None] * len(chunks)
    for first, last in layer_runs(model, settings["num_hidden_layers"], most_bytes):
        output = names.LOGITS if last == settings["num_hidden_layers"] - 1 else _input_of(last + 1)
        layers = range(first, last + 1)
        pasts = [name for layer in layers for name in (names.past_key(layer), names.past_value(layer))]
        presents = [name for layer in layers for name in (names.present_key(layer), names.present_value(layer))]
        part = path.with_name(f"part.{first}.{path.name}")
        part.write_bytes(subgraph(model, {_input_of(first)}, [output, *presents]).SerializeToString())
        try:
            session = open_session(part, threads=threads, prepack=False)
        finally:
            part.unlink()
        wanted = {value.name for value in session.get_inputs()}
        shape = (1, settings["num_key_value_heads"], cuts[-1] + 5, settings["head_dim"])
        buffers = {name: np.zeros(shape, dtype=np.float32) for name in pasts}
        for index, (start, stop) in enumerate(chunks):
            inputs = chunk_inputs(prompt, start, stop) | buffers | {_input_of(first): hidden[index]}
            hidden[index], *after = session.run([output, *presents], {name: value for name, value in inputs.items() if name in wanted})
            buffers = dict(zip(pasts, after, strict=True))
    return np.concatenate([value[0] for value in hidden if value is not None])


def chunk_inputs(prompt: TextInputs, start: int, stop: int) -> dict[str, np.ndarray]:
    """What the decoder takes for the positions from `start` to `stop`, the buffers apart; logits of all of them are asked for."""
    inputs = {
        names.INPUTS_EMBEDS: prompt.embeds[None, start:stop].numpy(),
        names.POSITION_IDS: prompt.positions[:, None, start:stop].numpy(),
        names.LOGIT_INDICES: np.arange(stop - start),
        names.SEQLENS_K: np.array([stop - 1], dtype=np.int32),
        names.TOTAL_LENGTH: np.array(stop, dtype=np.int32),
    }
    if len(prompt.deepstack):
        inputs[names.DEEPSTACK_EMBEDS] = prompt.deepstack[:, None, start:stop].contiguous().numpy()
    return inputs


def layer_runs(model: onnx.ModelProto, layers: int, most_bytes: int) -> Iterator[tuple[int, int]]:
    """(first, last) of runs of layers whose weights in the data file are at most `most_bytes`; all in one run if they are."""
    sizes = [0] * layers
    for tensor in model.graph.initializer:
        length = sum(int(item.value) for item in tensor.external_data if item.key == "length")
        _, found, rest = tensor.name.partition("layers.")
        sizes[int(rest.split(".")[0]) if found else layers - 1] += length  # the head and the last norm go with the last layer
    first, size = 0, 0
    for layer in range(layers):
        if layer > first and size + sizes[layer] > most_bytes:
            yield first, layer - 1
            first, size = layer, 0
        size += sizes[layer]
    yield first, layers - 1


def subgraph(model: onnx.ModelProto, inputs: set[str], outputs: Sequence[str]) -> onnx.ModelProto:
    """The nodes that `outputs` need, up to `inputs` (float32 tensors inside the graph) and the graph's own inputs."""
    makers = {name: node for node in model.graph.node for name in node.output if name}
    needed, seen, waiting = set[int](), set[str](), list(outputs)
    while waiting:
        name = waiting.pop()
        if name in seen or name in inputs:
            continue
        seen.add(name)
        if name in makers:
            needed.add(id(makers[name]))
            waiting += [part for part in makers[name].input if part]
    nodes = [node for node in model.graph.node if id(node) in needed]
    read = {name for node in nodes for name in node.input}
    values = [value for value in model.graph.input if value.name in read]
    values += [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None) for name in sorted(inputs & read)]
    given = [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None) for name in outputs]
    weights = [tensor for tensor in model.graph.initializer if tensor.name in read]
    graph = onnx.helper.make_graph(nodes, model.graph.name, values, given, weights)
    return onnx.helper.make_model(graph, opset_imports=model.opset_import, ir_version=model.ir_version)


def _input_of(layer: int) -> str:
    """Name of a layer's residual input [S, hidden]; layer 0 has none, it reads the graph's inputs."""
    return f"layers.{layer}.input_layernorm.input"
