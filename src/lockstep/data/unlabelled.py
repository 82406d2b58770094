"""Images without targets for predictions. They are read like the test images of a run."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torchvision.tv_tensors import Image as TensorImage

from lockstep.data.batches import EvalBatches
from lockstep.data.decoding import CorruptImage
from lockstep.data.framing import Framing
from lockstep.data.image_datamodule import ImageDataModule
from lockstep.data.listing import TEST
from lockstep.data.making import LoadedBatch
from lockstep.data.reading import Reading
from lockstep.data.source import Source
from lockstep.data.split import Splits


class FilesOrBlanks(Source):
    """Files of images. A damaged one is read as a blank image.

    Args:
        blank_side: width and height of a blank image.

    Attributes:
        is_damaged: (n,) uint8, in memory that is shared with the workers, which open the images.
    """

    def __init__(self, files: Sequence[Path], reading: Reading, blank_side: int) -> None:
        self.files = list(files)
        self.reading = reading
        self.blank_side = blank_side
        self.class_names = []
        self.targets = {}
        self.left_out = {}
        self.warnings = []
        self.split_ids = np.full(len(self.files), TEST, np.int8)
        self.num_bytes = np.zeros(len(self.files), np.int64)
        self.is_damaged = torch.zeros(len(self.files), dtype=torch.uint8).share_memory_()

    def name(self, position: int) -> str:
        return str(self.files[position])

    def open(self, position: int) -> tuple[Any]:
        try:
            return (self.reading.open(self.files[position]),)
        except CorruptImage:
            self.is_damaged[position] = 1
            return (self._make_blank(),)

    def _make_blank(self) -> Any:
        channels = self.reading.channels
        size = (self.blank_side, self.blank_side)
        if self.reading.has_float_pixels:
            # A script may have set another default dtype, which NumPy may lack.
            return TensorImage(torch.zeros(channels, *size, dtype=torch.float32))
        return Image.new("L" if channels == 1 else "RGB", size)

    def explain_damage(self, position: int) -> str:
        """Return why a damaged image cannot be decoded."""
        try:
            self.reading.open(self.files[position])
        except CorruptImage as error:
            return str(error.args[0])
        return f"{self.files[position]} could not be read a moment ago"


class UnlabelledImages(ImageDataModule):
    """Files of images in batches that do not depend on the number of ranks.

    A batch is (n, channels, image_size, image_size). With numbers it is a pair of these images and
    of standardised numbers, (n,) float32 by name.

    Args:
        files: the files of the images.
        reading: how the run's files become pixels.
        framing: the framing of the run's evaluation.
        std: the deviation of each channel.
        scales: mean and deviation by the name of a number that the task takes beside an image.
        numbers: the numbers beside each file by name, not standardised.
        options: see ImageOptions.
    """

    stage = "test"
    source: FilesOrBlanks

    def __init__(
        self,
        files: Sequence[Path],
        reading: Reading,
        framing: Framing,
        std: Sequence[float],
        *,
        scales: Mapping[str, list[float]] | None = None,
        numbers: Sequence[Mapping[str, float]] = (),
        **options: Any,
    ) -> None:
        self.files = files
        self.reading = reading
        self.has_float_pixels = reading.has_float_pixels
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
        self.inputs = dict(scales or {})
        self.columns: dict[str, np.ndarray] = {}
        for name in self.inputs:
            self.columns[name] = np.array([row[name] for row in numbers], np.float64)

    def prepare(self) -> None:
        if not hasattr(self, "splits"):
            self.source = FilesOrBlanks(self.files, self.reading, self.framing.resize)
            self.source.columns = self.columns
            self._set_splits(Splits(self.source.split_ids))

    def predict_dataloader(self) -> EvalBatches:
        self.setup()
        return self._make_eval_batches(self.splits.test).shard(**self._ranks)

    def on_after_batch_transfer(  # type: ignore[override]
        self, batch: LoadedBatch, dataloader_idx: int
    ) -> Any:
        """Return a batch without targets for a predict_step."""
        return super().on_after_batch_transfer(batch, dataloader_idx)[0]
