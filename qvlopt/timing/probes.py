"""How fast this machine multiplies matrices and reads memory, measured for a second each.

A limit is the best that was seen in a second. A pace is what is usual at the moment, in a fraction of one: taken again and
again, it shows whether a shared machine changed. The products are those that linear layers make: rows of activations with
rows of weights. The other way round torch's kernels for 16 bits can be ten times slower on a CPU. Integers are multiplied by
ONNX Runtime there, as the engine that has integers does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median

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
PACE_SECONDS = 0.15
PACE_READ_SIDE = 4096
"""64 MiB: it need not be more than the caches hold, only the same every time."""
PACE_STEPS = 50_000
"""Turns of an empty loop, some milliseconds: what a program that waits for Python itself is bound by."""


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


def measure_pace(*, clock: Clock) -> dict[str, float]:
    """The processors' usual rates at this moment: float32 operations/s, bytes/s of reading, and turns/s of a loop in Python."""
    product = _product("float32", SIDE["cpu"], "cpu", torch.Generator().manual_seed(0))
    matrix, vector = torch.ones((PACE_READ_SIDE, PACE_READ_SIDE)), torch.ones(PACE_READ_SIDE)
    work: dict[str, tuple[float, Callable[[], object]]] = {
        "float32": (2.0 * SIDE["cpu"] ** 3, product),
        "bytes": (float(matrix.nbytes), lambda: torch.mv(matrix, vector)),
        "python": (float(PACE_STEPS), _loop),
    }
    return {name: amount / median(_times(call, clock, settle=_settle("cpu"), budget=PACE_SECONDS)) for name, (amount, call) in work.items()}


def _loop() -> None:
    for _ in range(PACE_STEPS):
        pass


def fastest(call: Callable[[], object], clock: Clock, *, settle: Callable[[], None], budget: float = SECONDS) -> float:
    """The shortest time of `call` over about `budget` seconds after one call that is not counted, MINIMAL_CALLS at least."""
    return min(_times(call, clock, settle=settle, budget=budget))


def _times(call: Callable[[], object], clock: Clock, *, settle: Callable[[], None], budget: float) -> list[float]:
    call()
    settle()
    first, times = clock(), list[float]()
    while len(times) < MINIMAL_CALLS or clock() - first < budget:
        began = clock()
        call()
        settle()
        times.append(clock() - began)
    return times


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
