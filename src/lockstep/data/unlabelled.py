"""Images without targets, read as the test images of a run are: for predictions."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from lockstep.data.batches import EvalBatches
from lockstep.data.decoding import CorruptImage, open_image
from lockstep.data.framing import Framing
from lockstep.data.image_datamodule import ImageDataModule
from lockstep.data.listing import TEST
from lockstep.data.loading import LoadedBatch
from lockstep.data.source import Source
from lockstep.data.split import Splits


class ImageFiles(Source):
    """Files of images, of which a damaged one is blank.

    Attributes:
        is_damaged: (n,) uint8, set by the process that has opened the image, whichever it is.
    """

    def __init__(self, files: Sequence[Path], framing: Framing) -> None:
        self.files = list(files)
        self.framing = framing
        self.class_names = []
        self.targets = {}
        self.left_out = {}
        self.warnings = []
        self.splits = np.full(len(self.files), TEST, np.int8)
        self.size = np.zeros(len(self.files), np.int64)
        self.is_damaged = torch.zeros(len(self.files), dtype=torch.uint8).share_memory_()

    def name(self, position: int) -> str:
        return str(self.files[position])

    def open(self, position: int) -> tuple[Image.Image]:
        try:
            return (open_image(self.files[position], self.framing.channels),)
        except CorruptImage:
            self.is_damaged[position] = 1
            mode = "L" if self.framing.channels == 1 else "RGB"
            return (Image.new(mode, (self.framing.resize, self.framing.resize)),)

    def error_of(self, position: int) -> str:
        """Return why a damaged image cannot be decoded."""
        try:
            open_image(self.files[position], self.framing.channels)
        except CorruptImage as error:
            return str(error.args[0])
        return f"{self.files[position]} could not be read a moment ago"


class UnlabelledImages(ImageDataModule):
    """Files of images in batches that do not depend on the number of ranks.

    A batch is (n, channels, image_size, image_size).

    Args:
        files: any images.
        framing: of the run's evaluation.
        std: of the channels.
        options: as of ImageOptions.
    """

    stage = "test"
    source: ImageFiles

    def __init__(
        self, files: Sequence[Path], framing: Framing, std: Sequence[float], **options: Any
    ) -> None:
        self.files = files
        self.channels = framing.channels
        self.fit = framing.fit
        super().__init__(
            name="predictions",
            image_size=framing.image_size,
            resize=framing.resize,
            interpolation=framing.interpolation,
            mean=list(framing.mean),
            std=list(std),
            path="loader",
            **options,
        )

    def prepare(self) -> None:
        if not hasattr(self, "splits"):
            self.source = ImageFiles(self.files, self.framing)
            self._set_splits(Splits(self.source.splits))

    def predict_dataloader(self) -> EvalBatches:
        self.setup()
        return self._eval_batches(self.splits.test).of_rank(**self._ranks)

    def on_after_batch_transfer(  # type: ignore[override]
        self, batch: LoadedBatch, dataloader_idx: int
    ) -> Tensor:
        """Return the images alone, as a predict_step without targets takes them."""
        return super().on_after_batch_transfer(batch, dataloader_idx)[0]
