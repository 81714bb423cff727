"""Every key of a recipe with its type, limits and default (docs/contract.md, section 3).

Sections exist with their defaults even where a file leaves them out; which ones a file has is `LoadedRecipe.sections`.
Rules over several keys are in `rules.py`, so that they are reported together with everything else.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from qvlopt.recipe.values import read_as

Count = Annotated[int, Field(ge=1)]
NotNegative = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
OpenShare = Annotated[float, Field(gt=0, lt=1)]
Share = Annotated[float, Field(ge=0, le=1)]
Words = Annotated[str, Field(min_length=1)]
FileName = Annotated[str, Field(min_length=1, pattern=r"^[^./\\\x00-\x1f][^/\\\x00-\x1f]*$")]
PictureSize = Annotated[str, Field(pattern=r"^[1-9][0-9]*x[1-9][0-9]*$")]
Task = Literal["ocr", "vqa", "doc", "chart", "ocrbench", "grounding", "choice", "text"]
Dtype = Literal["float32", "float16", "bfloat16"]
Attention = Literal["sdpa", "eager", "flash_attention_2"]
"""How torch's language model attends, in transformers' words."""

PIPELINE = ("calibrate", "quantize_awq", "export", "quantize_int8", "evaluate", "bench")
"""The sections that `run` works through, in this order."""


class Section(BaseModel):
    """Frozen, refuses unknown keys, and reads scalars by the type of their field."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, protected_namespaces=())

    @field_validator("*", mode="before")
    @classmethod
    def _by_field_type(cls, value: object, info: ValidationInfo) -> object:
        return read_as(value, cls.model_fields[info.field_name or ""].annotation)


class ModelSection(Section):
    """The source checkpoint: a hub id, a folder, or `builtin:nano`."""

    path: Words
    revision: Words | None = "main"
    dtype: Dtype = "bfloat16"


class HardwareSection(Section):
    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads: Count | None = None


class PixelLimits(Section):
    """Smallest and largest area of a picture after resizing, in pixels."""

    min: Count
    max: Count


class CalibrateSection(Section):
    data: Words = "builtin:general"
    split: Words | None = "calibrate"
    samples: Count = 128
    batch: Count = 1
    scope: Literal["vision", "vision+language"] = "vision"


class SearchSection(Section):
    scale: bool = True
    clip: bool = True
    grid: Count = 20
    bias: bool = True
    compensate: bool = False


class QuantizeAwqSection(Section):
    engine: Literal["native", "autoawq"] = "native"
    scope: Literal["vision", "vision.blocks", "vision+language"] = "vision"
    bits: Count = 4
    group_size: Count = 128
    zero_point: bool = True
    format: Literal["awq", "compressed-tensors", "bf16"] = "awq"
    dtype: Literal["source", "float16", "bfloat16"] = "source"
    keep: tuple[Words, ...] = ("lm_head",)
    search: SearchSection = SearchSection()
    on_indivisible: Literal["error", "skip", "pad"] = "error"
    statistics: Words | None = None


class ExportSection(Section):
    format: Literal["onnx"] = "onnx"
    parts: Annotated[tuple[Literal["vision", "decoder"], ...], Field(min_length=1)] = ("vision", "decoder")
    dtype: Literal["float32"] = "float32"
    check: bool = True


class QuantizeInt8Section(Section):
    layout: Literal["int8", "fast", "small"] = "int8"
    smooth: bool = True
    statistics: Words | None = None
    keep: tuple[Words, ...] = ()
    max_layer_error: Positive = 0.05


class DataEntry(Section):
    """One evaluation set: `task` filters its rows and chooses the metrics."""

    name: FileName
    path: Words
    task: Task
    split: Words | None = None
    limit: Count | None = None
    columns: dict[str, Words] = Field(default_factory=dict)
    prompt: Words | None = None
    max_new_tokens: Count | None = None


class GateSection(Section):
    margin: OpenShare = 0.02
    alpha: OpenShare = 0.05
    on_inconclusive: Literal["fail", "warn", "pass"] = "fail"
    max_failed: NotNegative = 0
    floors: dict[str, Share] = Field(default_factory=dict)
    self_check: bool = False


class DamageSection(Section):
    """Items of every set whose next-token distributions are compared, and items that are followed stage by stage; 0 is none."""

    items: NotNegative = 16
    stages: NotNegative = 4


class ServerSection(Section):
    url: Words | None = None
    model: Words | None = None
    concurrency: Count = 8
    timeout_s: Positive = 120.0
    retries: NotNegative = 3


def _nano_eval(task: Task) -> DataEntry:
    return DataEntry(name=task, path="builtin:nano-eval", task=task)


class EvaluateSection(Section):
    data: Annotated[tuple[DataEntry, ...], Field(min_length=1)] = (_nano_eval("ocr"), _nano_eval("vqa"), _nano_eval("doc"))
    engine: Literal["auto", "torch", "onnx", "openai"] = "auto"
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto"
    batch: Count = 8
    limit: Count | None = None
    baseline: Words = "source"
    save_baseline: Words | None = None
    cache: bool = True
    gate: GateSection = GateSection()
    damage: DamageSection = DamageSection()
    reports: tuple[Literal["json", "md", "html", "junit", "predictions"], ...] = ("json", "md", "html", "junit")
    server: ServerSection = ServerSection()


class BenchSection(Section):
    images: Annotated[tuple[PictureSize, ...], Field(min_length=1)] = ("640x480",)
    prompt_tokens: int | tuple[int, ...] = 128
    new_tokens: Count = 32
    repeats: Count = 10
    warmup: NotNegative = 2
    concurrency: Annotated[tuple[Count, ...], Field(min_length=1)] = (1,)
    attention: Annotated[tuple[Attention, ...], Field(min_length=1)] = ("sdpa",)
    compile: bool = False
    compare: Words | None = None
    gate: Positive | None = None

    @field_validator("prompt_tokens")
    @classmethod
    def _counts(cls, value: int | tuple[int, ...]) -> int | tuple[int, ...]:
        """Limits here and not in the types: a union that fails has no key to blame."""
        if value == () or min(value if isinstance(value, tuple) else (value,)) < 1:
            raise ValueError("expected a whole number of at least 1, or a list of some")
        return value


class Recipe(Section):
    """What to do to which checkpoint. `load_recipe` fills `name` and `output` where a file leaves them out."""

    version: Literal[1] = 1
    name: FileName = "recipe"
    model: ModelSection
    output: Words = "out/recipe"
    seed: NotNegative = 0
    hardware: HardwareSection = HardwareSection()
    pixels: PixelLimits | None = None
    calibrate: CalibrateSection = CalibrateSection()
    quantize_awq: QuantizeAwqSection = QuantizeAwqSection()
    export: ExportSection = ExportSection()
    quantize_int8: QuantizeInt8Section = QuantizeInt8Section()
    evaluate: EvaluateSection = EvaluateSection()
    bench: BenchSection = BenchSection()
