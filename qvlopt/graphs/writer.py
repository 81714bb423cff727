"""An ONNX graph that grows node by node while its weights go straight into the data file beside it: none stays in memory.

Weights of a page or more begin on a page, so that a runtime can map them; numbers that shape the graph stay inside it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper

import qvlopt
from qvlopt.artifact.tensors import dtype_code
from qvlopt.graphs.names import data_file

OPSET, IR_VERSION = 21, 10
"""What onnxruntime 1.24 and later read; the operators of com.microsoft are all of its version 1."""
CONTRIB = "com.microsoft"
_CONTRIB_OPS = frozenset(
    {
        "FastGelu",
        "Gelu",
        "GroupQueryAttention",
        "MatMulIntegerToFloat",
        "MatMulNBits",
        "MultiHeadAttention",
        "QuickGelu",
        "RotaryEmbedding",
    }
)
_PAGE, _WORD = 4096, 64
_CHUNK = 2**24
"""Elements that are converted and written at once."""
_TYPES = {torch.float32: TensorProto.FLOAT, torch.uint8: TensorProto.UINT8, torch.int8: TensorProto.INT8}

FLOAT, INT64, INT32 = TensorProto.FLOAT, TensorProto.INT64, TensorProto.INT32


class Written(NamedTuple):
    """A weight in the data file: its dtype by safetensors code, and its bytes."""

    name: str
    dtype: str
    nbytes: int


class GraphWriter:
    """Writes `path` and its data file. `weights` lists what the data file holds, in its order; `places` where each begins."""

    def __init__(self, path: Path) -> None:
        """Creates the data file; raises FileExistsError when it is there."""
        self.path = path
        self.weights: list[Written] = []
        self.places: dict[str, int] = {}
        self._nodes: list[onnx.NodeProto] = []
        self._initializers: dict[str, onnx.TensorProto] = {}
        self._inputs: list[onnx.ValueInfoProto] = []
        self._outputs: list[onnx.ValueInfoProto] = []
        self._data = open(path.with_name(data_file(path.name)), "xb")  # noqa: SIM115, closed by close and __exit__

    def input(self, name: str, kind: int, shape: Sequence[int | str]) -> str:
        """Declares an input of the graph; text dimensions are free."""
        self._inputs.append(helper.make_tensor_value_info(name, kind, list(shape)))
        return name

    def output(self, name: str, kind: int, shape: Sequence[int | str]) -> None:
        """Declares an output of the graph, which a node must have given."""
        self._outputs.append(helper.make_tensor_value_info(name, kind, list(shape)))

    def one(self, op: str, *inputs: str, name: str = "", **attributes: Any) -> str:
        """Adds a node with one output, called `name` if that is given, and returns the output's name."""
        return self.many(op, inputs, [name or self._fresh(op)], **attributes)[0]

    def many(self, op: str, inputs: Sequence[str], outputs: int | Sequence[str], **attributes: Any) -> tuple[str, ...]:
        """Adds a node with so many outputs, or with those named; an empty name leaves an optional one out."""
        names = [f"{self._fresh(op)}_{i}" for i in range(outputs)] if isinstance(outputs, int) else list(outputs)
        domain = CONTRIB if op in _CONTRIB_OPS else ""
        self._nodes.append(helper.make_node(op, list(inputs), names, name=self._fresh(op), domain=domain, **attributes))
        return tuple(names)

    def constant(self, value: np.ndarray) -> str:
        """A small array inside the graph, stored once however often it is asked for."""
        name = f"constant_{value.dtype}_{'x'.join(map(str, value.shape))}_{hashlib.sha256(value.tobytes()).hexdigest()[:12]}"
        if name not in self._initializers:
            self._initializers[name] = numpy_helper.from_array(value, name)
        return name

    def scalar(self, value: float) -> str:
        """A float32 constant of rank 0."""
        return self.constant(np.array(value, dtype=np.float32))

    def shape(self, *dims: int) -> str:
        """An int64 constant [n]: a shape, or a list of axes."""
        return self.constant(np.array(dims, dtype=np.int64))

    def weight(self, name: str, tensor: torch.Tensor) -> str:
        """Writes a tensor into the data file and returns its name. uint8 and int8 stay; every other dtype becomes float32.

        Raises ValueError for a name that is taken.
        """
        if name in self._initializers:
            raise ValueError(f"{self.path}: the weight {name!r} is written already")
        dtype = tensor.dtype if tensor.dtype in (torch.uint8, torch.int8) else torch.float32
        nbytes = tensor.numel() * dtype.itemsize
        position = self._aligned(nbytes)
        for part in torch.split(tensor.detach().reshape(-1), _CHUNK):
            self._data.write(part.to(dtype).contiguous().numpy().data)
        self.weights.append(Written(name, dtype_code(dtype), nbytes))
        self.places[name] = position
        self.refer(name, dtype, tuple(tensor.shape), file=data_file(self.path.name), offset=position)
        return name

    def refer(self, name: str, dtype: torch.dtype, shape: tuple[int, ...], *, file: str, offset: int) -> str:
        """Declares a weight whose bytes lie in `file`, in the graph's folder, at `offset`; returns its name."""
        proto = TensorProto(name=name, data_type=_TYPES[dtype], dims=shape, data_location=TensorProto.EXTERNAL)
        length = dtype.itemsize * int(np.prod(shape, dtype=np.int64))
        for key, value in (("location", file), ("offset", offset), ("length", length)):
            proto.external_data.add(key=key, value=str(value))
        self._initializers[name] = proto
        return name

    def close(self) -> None:
        """Writes the graph."""
        self._data.close()
        graph = helper.make_graph(self._nodes, self.path.stem, self._inputs, self._outputs, list(self._initializers.values()))
        opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(CONTRIB, 1)]
        model = helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION, producer_name="qvlopt", producer_version=qvlopt.__version__)
        self.path.write_bytes(model.SerializeToString(deterministic=True))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is None:
            self.close()
        else:
            self._data.close()

    def _fresh(self, op: str) -> str:
        return f"{op}_{len(self._nodes)}"

    def _aligned(self, nbytes: int) -> int:
        """Fills up to where a weight of that size may begin, and returns the place."""
        step = _PAGE if nbytes >= _PAGE else _WORD
        position = self._data.tell()
        self._data.write(bytes(-position % step))
        return position + -position % step
