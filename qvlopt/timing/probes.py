"""How fast this machine multiplies matrices and reads memory, measured for a second each.

The products are those that linear layers make: rows of activations with rows of weights. The other way round torch's kernels
for 16 bits can be ten times slower on a CPU. Integers are multiplied by ONNX Runtime there, as the engine that has integers does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from qvlopt.graphs.saturation import product_session
from qvlopt.timing.roofline import Limits
from qvlopt.timing.stages import Clock

SECONDS = 1.0
SIDE = {"cpu": 1024, "cuda": 4096}
"""Of the square matrices that are multiplied: in cache on a CPU, enough to fill a GPU."""
READ_SIDE = 8192
"""A float32 matrix of this side is 256 MiB, more than most caches; a product with a vector reads it once."""
MINIMAL_CALLS = 3


def measure_limits(dtypes: Sequence[str], *, device: str, clock: Clock) -> Limits:
    """The best rate of all tries, since this is a limit. A dtype that cannot be multiplied here is left out."""
    generator = torch.Generator().manual_seed(0)
    side = SIDE[device]
    rates: dict[str, float] = {}
    for dtype in dtypes:
        product = _product(dtype, side, device, generator)
        try:
            seconds = fastest(product, clock, settle=_settle(device))
        except RuntimeError:  # no kernel for this dtype on this machine
            continue
        rates[dtype] = 2 * side**3 / seconds
    matrix = torch.ones((READ_SIDE, READ_SIDE), device=device)
    vector = torch.ones(READ_SIDE, device=device)
    seconds = fastest(lambda: torch.mv(matrix, vector), clock, settle=_settle(device))
    return Limits(rates, matrix.nbytes / seconds)


def fastest(call: Callable[[], object], clock: Clock, *, settle: Callable[[], None], budget: float = SECONDS) -> float:
    """The shortest time of `call` over about `budget` seconds after one call that is not counted, MINIMAL_CALLS at least."""
    call()
    settle()
    first, best, calls = clock(), float("inf"), 0
    while calls < MINIMAL_CALLS or clock() - first < budget:
        began = clock()
        call()
        settle()
        best, calls = min(best, clock() - began), calls + 1
    return best


def _product(dtype: str, side: int, device: str, generator: torch.Generator) -> Callable[[], object]:
    if dtype == "int8":
        rows = torch.randint(0, 256, (side, side), generator=generator, dtype=torch.uint8).numpy()
        weight = torch.randint(-63, 64, (side, side), generator=generator, dtype=torch.int8).numpy()
        session = product_session(weight, rows=side, threads=torch.get_num_threads())
        return lambda: session.run(None, {"x": rows})
    kind = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}[dtype]
    left, right = (torch.randn((side, side), generator=generator).to(device=device, dtype=kind) for _ in range(2))
    return lambda: torch.nn.functional.linear(left, right)


def _settle(device: str) -> Callable[[], None]:
    """Waits until the device has done what it was given."""
    return torch.cuda.synchronize if device == "cuda" else lambda: None
