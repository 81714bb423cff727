"""Samples become prompt ids, `pixel_values` and positions: the same way for every engine in this process."""

from __future__ import annotations

import weakref

from qvlopt.data.samples import ImageRef, Sample
from qvlopt.model.positions import rope_positions
from qvlopt.model.preprocess import Picture, PictureProcessor
from qvlopt.model.prompt import Prompter
from qvlopt.runtime.engine import Prepared


class Preparer:
    """Prepares samples for one checkpoint. A picture is shared while any prepared sample holds it, so that it is loaded once."""

    def __init__(self, prompter: Prompter, processor: PictureProcessor) -> None:
        self.prompter = prompter
        self.processor = processor
        self._pictures: weakref.WeakValueDictionary[str, Picture] = weakref.WeakValueDictionary()

    def prepare(self, sample: Sample) -> Prepared:
        """Loads, resizes and patches the pictures and encodes the prompt. Raises ItemError."""
        pictures = tuple(self._picture(image) for image in sample.images)
        grids = [picture.grid for picture in pictures]
        ids = self.prompter.encode(sample.question, grids)
        positions, delta = rope_positions(ids, grids, image_token_id=self.prompter.image_token_id, merge=self.processor.merge_size)
        return Prepared(sample.id, tuple(ids), pictures, positions, delta)

    def _picture(self, image: ImageRef) -> Picture:
        shared = self._pictures.get(image.digest) if image.digest else None
        if shared is not None:
            return shared
        picture = self.processor.process(image.load())
        if image.digest:
            self._pictures[image.digest] = picture
        return picture
