"""What a source's modules become in an ONNX artifact: dtype and bytes before and after, by canonical name."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from qvlopt.artifact.manifest import ModuleRecord
from qvlopt.artifact.modules import module_rows
from qvlopt.artifact.tensors import TensorFiles
from qvlopt.graphs.names import TABLES
from qvlopt.graphs.weights import whole_layer
from qvlopt.graphs.writer import Written
from qvlopt.model.names import EMBEDDING, LM_HEAD, VISION
from qvlopt.model.shapes import canonical_name
from qvlopt.model.source import Source

TABLE_MODULES = {"embed_tokens": EMBEDDING, "pos_embed": f"{VISION}.pos_embed"}
"""Modules by the name that they have in the tables."""


def module_records(
    source: Source, folder: Path, written: Iterable[Written], parts: Collection[str], *, labels: Mapping[str, str]
) -> tuple[ModuleRecord, ...]:
    """A record for every module of the `parts` (vision, decoder), in the source's order; a tied head has no bytes before.

    `labels` says what quantised modules are called; the others are called by the dtype of their weight.
    """
    dtypes, sizes = _after(folder, written)
    before = {canonical_name(f"{row.name}.").removesuffix("."): (row.dtype, row.bytes) for row in module_rows(source.tensors)}
    if source.tied:
        before[LM_HEAD] = (before[EMBEDDING][0], 0)
    wanted = [name for name in before if ("vision" if name.startswith(f"{VISION}.") else "decoder") in parts]
    return tuple(
        ModuleRecord(
            name=name,
            dtype_before=before[name][0],
            dtype_after=labels.get(name) or dtypes[name],
            bytes_before=before[name][1],
            bytes_after=sizes.get(name, 0),  # a head that is the embedding has no bytes of its own
        )
        for name in wanted
    )


def _after(folder: Path, written: Iterable[Written]) -> tuple[dict[str, str], dict[str, int]]:
    """Dtype of the weight and bytes of all tensors of every module in the graphs' data and in the tables."""
    dtypes: dict[str, str] = {}
    sizes: dict[str, int] = {}
    for row in module_rows(TensorFiles.open(folder, weights=TABLES)):
        module = TABLE_MODULES[row.name]
        dtypes[module], sizes[module] = row.dtype, row.bytes
    for weight in written:
        part, _, parameter = weight.name.rpartition(".")
        module = whole_layer(part)
        sizes[module] = sizes.get(module, 0) + weight.nbytes
        if parameter == "weight" or module not in dtypes:
            dtypes[module] = weight.dtype
    return dtypes, sizes
