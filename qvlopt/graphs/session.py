"""Opens a graph in onnxruntime, as every part of qvlopt that runs one for a short while does."""

from __future__ import annotations

from pathlib import Path

import onnxruntime

from qvlopt.errors import RunError


def open_session(path: Path, *, threads: int, prepack: bool = True) -> onnxruntime.InferenceSession:
    """A session on the CPU. Without `prepack` weights stay where they are mapped: slower, but without a copy in memory.

    Raises RunError when onnxruntime cannot load the graph.
    """
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    options.add_session_config_entry("session.disable_prepacking", "0" if prepack else "1")
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    try:
        return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's own classes have no common base but this
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise RunError(f"{path.name}: onnxruntime {onnxruntime.__version__} cannot load it: {reason}") from error
