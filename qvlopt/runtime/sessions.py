"""ONNX Runtime sessions on the CPU: threads, memory, and graphs that are what this version runs.

Each session has its own pool of threads, all of one size, and lets them sleep when its run is over, so that the pools cost
nothing while another session works. ONNX Runtime's one pool for all sessions would be the process's: it cannot be changed
once made, and every other user of ONNX Runtime in the process would have to take it (docs/decisions/0007).
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import onnx
import onnxruntime as ort
from onnx.external_data_helper import uses_external_data
from onnxruntime.capi import onnxruntime_pybind11_state as states

from qvlopt.artifact.containment import contained_file
from qvlopt.errors import RunError

ORT_ERRORS: tuple[type[Exception], ...] = tuple(
    getattr(states, name)
    for name in ("Fail", "InvalidArgument", "InvalidGraph", "InvalidProtobuf", "NoSuchFile", "NotImplemented", "RuntimeException")
)
"""What ONNX Runtime raises; none of them is a RuntimeError."""
FAILURES: tuple[type[Exception], ...] = (*ORT_ERRORS, MemoryError)
"""What ends one request and leaves the sessions usable."""
_UNUSABLE: tuple[type[Exception], ...] = (*ORT_ERRORS, RuntimeError, ValueError)

SPIN_US = "1000"
"""How long threads wait awake for the next run. Between two decode steps lie tens of microseconds; a whole second, the
library's default order, would burn every core after each answer."""

AGAIN = "copy the artifact again from where it came, or export it again"


def open_session(path: Path, *, threads: int, spins: bool, prepack: bool) -> ort.InferenceSession:
    """Opens a graph whose weights are mapped from the files beside it.

    `spins` keeps the threads awake between runs, for graphs that run many times in a row. `prepack` copies weights into the
    layout that the kernels like best: integer kernels need it; float ones are 3 to 10 % faster with it, which is not worth a
    second copy of the weights in memory and a slow start (docs/decisions/0007). Raises RunError when a file is missing,
    leaves the folder, or is no graph that this ONNX Runtime can run.
    """
    _check_files(path)
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.execution_mode = ort.ExecutionMode.ORT_SEQUENTIAL
    options.log_severity_level = 3
    # A pattern is kept for every shape that was ever seen, and pictures have many.
    options.enable_mem_pattern = False
    options.add_session_config_entry("session.set_denormal_as_zero", "1")
    options.add_session_config_entry("session.disable_prepacking", "0" if prepack else "1")
    if spins:
        options.add_session_config_entry("session.intra_op.spin_duration_us", SPIN_US)
    else:
        options.add_session_config_entry("session.force_spinning_stop", "1")
    try:
        # the fallback to other providers writes to stdout, and there is none
        return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"], enable_fallback=0)
    except _UNUSABLE as error:
        raise RunError(f"{path} cannot be run by onnxruntime {ort.__version__}: {first_line(error)}", hint=AGAIN) from error


def shrinking() -> ort.RunOptions:
    """For runs of one-off sizes: what they used is given back when they end, so that the largest ever does not stay."""
    options = ort.RunOptions()
    options.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")
    return options


def check_interface(session: ort.InferenceSession, path: Path, *, inputs: Iterable[str], outputs: Iterable[str]) -> None:
    """Raises RunError unless the graph takes and gives exactly these."""
    for what, wanted, found in (("inputs", inputs, session.get_inputs()), ("outputs", outputs, session.get_outputs())):
        names = {value.name for value in found}
        wrong = sorted(names.symmetric_difference(wanted))
        if wrong:
            raise RunError(f"{path}: {what} are not those of this version, such as {wrong[0]}", hint="export it again with this version")


def first_line(error: BaseException) -> str:
    """What an error says, on one line."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _check_files(path: Path) -> None:
    """External data may only be files beside the graph."""
    if not path.is_file():
        raise RunError(f"{path} is missing", hint=AGAIN)
    try:
        model = onnx.load(str(path), load_external_data=False)
    except Exception as error:  # protobuf raises its own DecodeError, which has no public base
        raise RunError(f"{path} is not an ONNX graph: {first_line(error)}", hint=AGAIN) from error
    for location in sorted({_location(tensor) for tensor in model.graph.initializer if uses_external_data(tensor)}):
        if not contained_file(path.parent, location, named_by=str(path)).is_file():
            raise RunError(f"{path} needs {location}, which is missing", hint=AGAIN)


def _location(tensor: Any) -> str:
    return next((entry.value for entry in tensor.external_data if entry.key == "location"), "")
