"""Whether this processor's product of u8 and s8 is exact, or clips sums of two to 16 bits as those without VNNI do.

x86 before VNNI multiplies with `vpmaddubsw`: two products u8 * s8 are added in 16 bits with saturation. 255 * 127 * 2 does not
fit; with weights of 7 bits every pair does (255 * 64 * 2 = 32,640). Found by computing, not by reading flags: what counts is
what onnxruntime does here.
"""

from __future__ import annotations

import functools

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper

from qvlopt.artifact.manifest import Manifest
from qvlopt.errors import RunError
from qvlopt.graphs.rounding import LEVELS

EIGHT_BITS, SEVEN_BITS = "W8A8", "W8A8 of 7 bits"
"""What the manifest says of a layer."""
LARGEST_EXACT = 63
"""The largest weight whose pairs never saturate."""
_WIDTH = 64


def saturating_product(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """What `vpmaddubsw` makes of uint8 [T, K] times int8 [K, N] with K even: int64 [T, N]. The slow model of such a processor."""
    products = x.astype(np.int64)[:, :, None] * weight.astype(np.int64)
    pairs = products[:, 0::2] + products[:, 1::2]
    return pairs.clip(-(2**15), 2**15 - 1).sum(1)  # type: ignore[no-any-return]


@functools.cache
def saturates() -> bool:
    """Whether onnxruntime's integer product loses sums on this machine."""
    x = np.full((4, _WIDTH), 255, dtype=np.uint8)
    weight = np.full((_WIDTH, 16), LEVELS, dtype=np.int8)
    return not np.array_equal(_product(x, weight), x.astype(np.int64) @ weight.astype(np.int64))


def largest_weight() -> int:
    """The largest integer that a W8A8 weight may have here: 127, or 63 where larger ones would saturate."""
    return LARGEST_EXACT if saturates() else LEVELS


def require_exact(manifest: Manifest) -> None:
    """Raises RunError where an artifact's W8A8 weights have 8 bits and this machine's product of them saturates."""
    if saturates() and any(layer.method.startswith(EIGHT_BITS) and not layer.method.startswith(SEVEN_BITS) for layer in manifest.layers):
        fault = "this processor adds products of 8-bit integers with saturation (no VNNI), and the artifact's weights use all 8 bits"
        raise RunError(fault, "make the artifact on this machine, where qvlopt quantize-int8 keeps weights to 7 bits")


def product_session(weight: np.ndarray, *, rows: int, threads: int) -> onnxruntime.InferenceSession:
    """Multiplies its input `x` uint8 [rows, K] with int8 [K, N] by the kernel of the graphs."""
    node = helper.make_node("MatMulInteger", ["x", "w"], ["y"])
    inputs = [helper.make_tensor_value_info("x", TensorProto.UINT8, [rows, weight.shape[0]])]
    outputs = [helper.make_tensor_value_info("y", TensorProto.INT32, None)]
    graph = helper.make_graph([node], "product", inputs, outputs, [onnx.numpy_helper.from_array(weight, "w")])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def _product(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """One small product."""
    product: np.ndarray = product_session(weight, rows=len(x), threads=1).run(None, {"x": x})[0]
    return product
