"""export: a checkpoint becomes float32 ONNX graphs that keep DeepStack and M-RoPE, proven against torch stage by stage."""

from __future__ import annotations

import logging
import shutil
import sys
import time
from collections.abc import Callable, Collection, Iterator
from math import prod
from pathlib import Path

import onnx
import onnxruntime
import torch
import transformers

import qvlopt
from qvlopt.artifact.digest import digest_of
from qvlopt.artifact.folder import is_done, require_space, write_folder
from qvlopt.artifact.manifest import CheckRecord, Manifest, SourceRecord, read_manifest, write_manifest
from qvlopt.artifact.process import peak_rss_bytes, thread_count
from qvlopt.commands.forecast import forecast, takes
from qvlopt.commands.graph_modules import module_records
from qvlopt.commands.graphs_result import GraphsResult
from qvlopt.commands.hardware import prepare
from qvlopt.commands.output import output_folder
from qvlopt.commands.plan import Plan, PlanRow, planned
from qvlopt.errors import RunError
from qvlopt.graphs.check import TOLERANCE, StageError, check_decoder, check_vision
from qvlopt.graphs.decoder import build_decoder
from qvlopt.graphs.names import DECODER_GRAPH, VISION_GRAPH
from qvlopt.graphs.tables import write_tables
from qvlopt.graphs.vision import build_vision
from qvlopt.graphs.weights import FloatLinear, Weights, biased_layers, weights_of
from qvlopt.graphs.writer import GraphWriter, Written
from qvlopt.model.names import LANGUAGE, LM_HEAD, VISION, language_linears, vision_linears
from qvlopt.model.rewrite import other_files
from qvlopt.model.shapes import EMBEDDING, HEAD, text_shapes, vision_shapes
from qvlopt.model.source import Source, open_source
from qvlopt.recipe.command_line import command_line
from qvlopt.recipe.load import LoadedRecipe
from qvlopt.recipe.schema import ExportSection
from qvlopt.report.graphs_card import graphs_card
from qvlopt.report.progress import Progress, SilentProgress

log = logging.getLogger(__name__)

KIND = "export"
ALGORITHM = 1
"""Part of the digest: raised whenever the same inputs give other graphs."""


def export(
    loaded: LoadedRecipe, *, overwrite: bool = False, resume: bool = False, dry_run: bool = False, progress: Progress | None = None
) -> GraphsResult | Plan:
    """Writes `<output>/export`, self-checked. Does nothing when the same artifact is there; `resume` changes nothing.

    Raises UsageError for an output in place, RunError for a source that cannot be used and for a graph that is not exact.
    """
    del resume
    if dry_run:
        return planned(loaded, lambda: _plan_rows(loaded))
    began, progress = time.monotonic(), progress or SilentProgress()
    source, section, output = _opened(loaded), loaded.recipe.export, output_folder(loaded, KIND)
    digest = digest_of({"kind": KIND, "algorithm": ALGORITHM, "source": source.digest, "section": section.model_dump(mode="json")})
    if is_done(output, digest, overwrite=overwrite):
        return GraphsResult.of(output, read_manifest(output), existed=True)
    require_space(output, _bytes_written(source, section))
    prepare(loaded)
    with write_folder(output, digest=digest, overwrite=overwrite) as folder:
        written = _write(folder, source, section, progress)
        copy_files(folder, source)
        check = _check(folder, source, section, threads=thread_count(loaded.recipe.hardware.threads))
        manifest = graphs_manifest(loaded, source, kind=KIND, digest=digest).model_copy(
            update={"modules": module_records(source, folder, written, section.parts, labels={}), "check": check, "peak_rss_bytes": peak_rss_bytes()}
        )
        write_card(folder, manifest, command_line(loaded, "export", sections=("export",)))
        write_manifest(folder, manifest.model_copy(update={"seconds": time.monotonic() - began}))
    return GraphsResult.of(output, read_manifest(output), existed=False)


def _opened(loaded: LoadedRecipe, *, cached: bool = False) -> Source:
    """What cannot be copied is refused before the work."""
    source = open_source(loaded.recipe.model.path, revision=loaded.recipe.model.revision, folder=loaded.folder, cached=cached)
    other_files(source.folder)
    return source


def copy_files(folder: Path, source: Source) -> None:
    """config.json and the source's other files, byte for byte."""
    for path in (source.folder / "config.json", *other_files(source.folder)):
        shutil.copyfile(path, folder / path.name)


def write_card(folder: Path, manifest: Manifest, command: str) -> None:
    """README.md over the files that are in the folder; `command` makes them again."""
    files = [path.name for path in folder.iterdir()]
    (folder / "README.md").write_text(graphs_card(manifest.model_dump(mode="json"), files, command), encoding="utf-8")


def graphs_manifest(loaded: LoadedRecipe, source: Source, *, kind: str, digest: str) -> Manifest:
    """What every ONNX artifact says of itself."""
    return Manifest(
        kind=kind,
        digest=digest,
        recipe=loaded.recipe.model_dump(mode="json"),
        source=SourceRecord(path=source.id, revision=source.revision, digest=source.digest),
        changes={"README.md": "replaced by this artifact's model card"},
        versions={
            "python": sys.version.split()[0],
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "onnx": onnx.__version__,
            "onnxruntime": onnxruntime.__version__,
            "qvlopt": qvlopt.__version__,
        },
    )


def _write(folder: Path, source: Source, section: ExportSection, progress: Progress) -> list[Written]:
    """Builds the parts, weight by weight, and says what was written."""
    weights, settings = weights_of(source), source.settings
    written: list[Written] = []
    progress.start(len(graph_linears(source, section.parts)), "export")
    try:
        linear = FloatLinear(weights, biased_layers(source), seen=_told(progress))
        if "vision" in section.parts:
            with GraphWriter(folder / VISION_GRAPH) as graph:
                build_vision(graph, settings.vision, weights, linear)
            written += graph.weights
        if "decoder" in section.parts:
            with GraphWriter(folder / DECODER_GRAPH) as graph:
                build_decoder(graph, settings.text, len(settings.vision.deepstack_visual_indexes), weights, linear)
            written += graph.weights
        write_tables(folder, weights, section.parts)
    finally:
        progress.finish()
    return written


def _told(progress: Progress) -> Callable[[str], None]:
    return lambda name: progress.advance(1, f"export {name}")


def _check(folder: Path, source: Source, section: ExportSection, *, threads: int) -> CheckRecord:
    """Raises RunError where a stage is off by more than float32 rounding explains."""
    if not section.check:
        log.warning("export.check is false: the graphs are not compared with torch")
        return CheckRecord(passed=False, detail="not checked (export.check: false)")
    weights: Weights = weights_of(source)
    errors: list[StageError] = []
    if "vision" in section.parts:
        errors += check_vision(folder, source.settings.vision, weights, threads=threads)
    if "decoder" in section.parts:
        errors += check_decoder(folder, source.settings, weights, threads=threads)
    worst = max(errors, key=lambda stage: stage.error)
    if not worst.error <= TOLERANCE:
        fault = f"self-check failed: {worst.stage} is off by {worst.error:.2g} from torch, expected at most {TOLERANCE:g}"
        raise RunError(fault, f"onnxruntime {onnxruntime.__version__} computes something else here; try another version and report it")
    stages = ", ".join(f"{stage} {error:.1g}" for stage, error in errors)
    return CheckRecord(passed=True, worst=worst.error, detail=f"largest relative error of a row against torch float32: {stages}")


def graph_linears(source: Source, parts: Collection[str]) -> tuple[str, ...]:
    """Canonical names of the linears in the `parts` (vision, decoder)."""
    vision = vision_linears(source.settings.vision) if "vision" in parts else ()
    decoder = (*language_linears(source.settings.text), LM_HEAD) if "decoder" in parts else ()
    return (*vision, *decoder)


def _bytes_written(source: Source, section: ExportSection) -> int:
    """Bytes of the parts in float32, the head apart from the embedding table, which keeps its dtype."""
    settings = source.settings
    vision = [f"{VISION}.{name}" for name in vision_shapes(settings.vision)]
    decoder = [f"{LANGUAGE}.{name}" for name in text_shapes(settings.text)] + [HEAD]
    shapes = {f"{VISION}.{name}": shape for name, shape in vision_shapes(settings.vision).items()}
    shapes |= {f"{LANGUAGE}.{name}": shape for name, shape in text_shapes(settings.text).items()}
    shapes[HEAD] = shapes[EMBEDDING]
    wanted = (vision if "vision" in section.parts else []) + (decoder if "decoder" in section.parts else [])
    return sum(4 * prod(shapes[name]) for name in wanted)


def _plan_rows(loaded: LoadedRecipe) -> Iterator[PlanRow]:
    source, section, output = _opened(loaded, cached=True), loaded.recipe.export, output_folder(loaded, KIND)
    whole = sum(entry.nbytes for entry in source.tensors.entries.values())
    check = f"every stage against torch float32, at most {TOLERANCE:g} off" if section.check else "nothing (export.check: false)"
    yield PlanRow("source", f"{source.id}: {source.folder}, {whole:,} bytes of tensors")
    yield PlanRow("exports", f"{' and '.join(section.parts)}: {len(graph_linears(source, section.parts))} linears in {section.dtype}")
    yield PlanRow("writes", f"{output}: about {_bytes_written(source, section):,} bytes as {section.format}")
    yield PlanRow("checks", check)
    yield takes(forecast(loaded, "export", prepare(loaded)))
