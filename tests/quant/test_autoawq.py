"""AutoAWQ's own code as the oracle of the layout: it packs our integers to our tensors and dequantises them to our weights.

Runs only where the archived package `autoawq` is installed (extra `autoawq`).
"""

from __future__ import annotations

import warnings

import pytest
import torch

from qvlopt.quant.pack_awq import pack
from qvlopt.quant.rounding import QuantSpec, dequantize, qparams, quantize

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # it announces its own end of life
    pytest.importorskip("awq", reason="autoawq is not installed", exc_type=ImportError)
    from awq.modules.linear.gemm import WQLinear_GEMM
    from awq.utils.packing_utils import dequantize_gemm

pytestmark = [pytest.mark.conformance, pytest.mark.filterwarnings("ignore")]

SPEC = QuantSpec(4, 128)


def weight(seed: int) -> torch.Tensor:
    w = torch.randn(64, 384, generator=torch.Generator().manual_seed(seed)) * 0.02
    w[3] = 0.0
    w[5, 128:256] = 0.0
    w[7] += 0.5
    return w


@pytest.mark.parametrize("seed", range(3))
def test_autoawq_packs_our_integers_to_our_tensors(seed: int) -> None:
    w = weight(seed)
    qp = qparams(w, SPEC)
    q = quantize(w, qp, SPEC)
    linear = torch.nn.Linear(384, 64, bias=False)
    linear.weight.data = dequantize(q, qp, SPEC)
    theirs = WQLinear_GEMM.from_linear(linear, 4, 128, scales=qp.scale.T.contiguous(), zeros=qp.zero_point.T.contiguous())
    for name, tensor in pack(q, qp.zero_point, qp.scale)._asdict().items():
        assert getattr(theirs, name).dtype == tensor.dtype
        assert torch.equal(getattr(theirs, name), tensor)


@pytest.mark.parametrize("seed", range(3))
def test_autoawq_dequantises_our_tensors_to_our_weights_in_float16(seed: int) -> None:
    w = weight(seed)
    qp = qparams(w, SPEC)
    q = quantize(w, qp, SPEC)
    packed = pack(q, qp.zero_point, qp.scale)
    expected = dequantize(q, qp, SPEC).to(torch.float16)
    assert torch.equal(dequantize_gemm(*packed, 4, 128).T, expected)
    layer = WQLinear_GEMM(4, 128, 384, 64, bias=False, dev="cpu")
    layer.load_state_dict(packed._asdict(), strict=True)
    with torch.no_grad():
        assert torch.equal(layer(torch.eye(384, dtype=torch.float16)).view(384, 64).T, expected)
