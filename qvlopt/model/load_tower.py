"""A checkpoint's vision tower, read one tensor at a time; nothing of the language model, nor of transformers, is touched."""

from __future__ import annotations

import torch

from qvlopt.model.parameters import place_parameter
from qvlopt.model.shapes import VISION, vision_shapes
from qvlopt.model.source import Source
from qvlopt.model.vision import VisionTower


def load_vision(source: Source, *, dtype: torch.dtype, device: torch.device | str) -> VisionTower:
    """The tower alone."""
    return VisionTower(source.settings.vision, load_vision_part(source, ("",), dtype=dtype, device=device))


def load_vision_part(source: Source, prefixes: tuple[str, ...], *, dtype: torch.dtype, device: torch.device | str) -> dict[str, torch.Tensor]:
    """The tower's parameters whose names, relative to it, start with one of `prefixes` (such as `blocks.0.`)."""
    names = [name for name in vision_shapes(source.settings.vision) if name.startswith(prefixes)]
    return {name: place_parameter(source, VISION + name, dtype, torch.device(device)) for name in names}
