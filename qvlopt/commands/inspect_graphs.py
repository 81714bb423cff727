"""The modules of an ONNX artifact as `inspect` lists them: bytes and digests of what its graphs and tables store.

What a module is called (INT8 channel, INT4 g128, F32) stands in the manifest, its shape follows from config.json: a graph's own
tensors are laid out for its operators. A module of two graphs is one row, with the bytes of both; a head whose bytes are
the embedding's, or the other graph's, has none of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import onnx
from onnx import TensorProto
from onnx.external_data_helper import uses_external_data

from qvlopt.artifact.containment import contained_file
from qvlopt.artifact.header import TensorEntry
from qvlopt.artifact.manifest import Manifest
from qvlopt.artifact.modules import ModuleRow, module_rows, natural_order
from qvlopt.artifact.tensors import TensorFiles
from qvlopt.commands.graph_modules import TABLE_MODULES
from qvlopt.errors import RunError
from qvlopt.graphs.names import TABLES
from qvlopt.graphs.weights import whole_layer
from qvlopt.model.config import read_config
from qvlopt.model.shapes import parameter_shapes

_DTYPES = {TensorProto.FLOAT: "F32", TensorProto.UINT8: "U8", TensorProto.INT8: "I8"}
_AGAIN = "copy the artifact again from where it came, or make it again"


def graph_files(folder: Path, manifest: Manifest) -> TensorFiles:
    """Every stored tensor of the tables and graphs once, named `MODULE.PLACE`. Raises RunError for a graph that is broken or leaves the folder."""
    entries: dict[str, TensorEntry] = {}
    places: set[tuple[Path, int]] = set()
    for name, entry in TensorFiles.open(folder, weights=TABLES).entries.items():
        module, _, leaf = name.rpartition(".")
        entries[f"{TABLE_MODULES.get(module, module)}.{leaf}"] = entry
        places.add((entry.file, entry.start))
    for graph in sorted(name for name in manifest.files if name.endswith(".onnx")):
        for entry in _stored(contained_file(folder, graph, named_by=str(folder))):
            if (entry.file, entry.start) not in places:
                part, _, leaf = entry.name.rpartition(".")
                module = whole_layer(part)
                entries[f"{module}.{graph.replace('.', '-')}-{part.removeprefix(module).strip('.')}-{leaf}"] = entry
                places.add((entry.file, entry.start))
    return TensorFiles(folder, entries)


def graph_rows(folder: Path, files: TensorFiles, manifest: Manifest, *, digests: bool) -> tuple[ModuleRow, ...]:
    """A row for every module that the manifest lists or the files hold."""
    settings = read_config(folder)
    shapes = parameter_shapes(settings.vision, settings.text, tied=False)
    labels = {record.name: record.dtype_after for record in manifest.modules}
    rows = {row.name: row for row in module_rows(files, digests=digests)}
    rows |= {name: ModuleRow(name, labels[name], (), 0) for name in labels.keys() - rows.keys()}
    return tuple(
        rows[name]._replace(dtype=labels.get(name, rows[name].dtype), shape=shapes.get(f"{name}.weight", rows[name].shape))
        for name in sorted(rows, key=natural_order)
    )


def _stored(path: Path) -> Iterator[TensorEntry]:
    """The graph's weights, which lie in files beside it; numbers that shape the graph stay inside it and are no module's."""
    try:
        tensors = onnx.load(str(path), load_external_data=False).graph.initializer
    except Exception as error:  # protobuf raises its own DecodeError, which has no public base
        raise RunError(f"{path} is not an ONNX graph", _AGAIN) from error
    for tensor in tensors:
        if not uses_external_data(tensor):
            continue
        place = {item.key: item.value for item in tensor.external_data}
        start, length = int(place.get("offset", 0)), int(place.get("length", 0))
        file = contained_file(path.parent, place["location"], named_by=str(path))
        yield TensorEntry(tensor.name, _DTYPES.get(tensor.data_type, "U8"), tuple(tensor.dims), file, start, start + length)
