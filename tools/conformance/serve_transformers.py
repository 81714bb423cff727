"""Starts `transformers serve` where torchvision has no compiled library: pictures are decoded by Pillow instead.

    envs/serve/bin/python tools/conformance/serve_transformers.py --port 8000 --device cpu --dtype float32

Only decoding is replaced; resizing and all that follows are the server's own.
"""

from __future__ import annotations

import io
import sys

import numpy
import torch
import torchvision.io
from PIL import Image, ImageOps


def decode_image(data: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
    """uint8 [3, height, width] of a file's bytes, upright."""
    image = ImageOps.exif_transpose(Image.open(io.BytesIO(data.numpy().tobytes())))
    return torch.from_numpy(numpy.array(image.convert("RGB"))).permute(2, 0, 1).contiguous()


if __name__ == "__main__":
    torchvision.io.decode_image = decode_image
    from transformers.cli.transformers import main

    sys.argv[1:1] = ["serve"]
    main()
