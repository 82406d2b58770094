"""Turn selections of images into batches on the device, from an array or by worker processes."""

import os
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.data.augmentation import Operation
from lockstep.data.batch_transforms import BatchTransforms
from lockstep.data.batches import Selection
from lockstep.data.framing import Framing
from lockstep.data.streaming import MakeImage, OpenImage, augmented, square, stream

LoadedBatch = dict[str, Any]
"""labels; `images` (n, side, side, channels) uint8, or `index` into the array on the device; `draws` (3, n) unless the
images are augmented already; `mixing` where images are mixed."""


class BatchLoader:
    """
    Args:
        labels: (n,) int64, of all images.
        array: (n, side, side, channels) uint8; None: workers open each image.
        device_array_gib: the largest array that is kept on a GPU; batches of a larger one are cut in CPU memory.
        num_workers: at most; never more than there are cores.
    """

    def __init__(
        self, transforms: BatchTransforms, framing: Framing, labels: np.ndarray, device: torch.device, *,
        array: np.ndarray | None, open_image: OpenImage, device_array_gib: float, num_workers: int,
    ) -> None:  # fmt: skip
        self.transforms, self.framing, self.device = transforms.to(device), framing, device
        self.labels, self.open_image = labels, open_image
        self.num_workers = min(num_workers, len(os.sched_getaffinity(0)))
        self.array = None if array is None else torch.from_numpy(array)
        self.is_resident = array is not None and (device.type == "cpu" or array.nbytes <= device_array_gib * 2**30)
        if self.array is not None and self.is_resident:
            self.array = self.array.to(device)

    def whole(self, selections: Iterable[Selection]) -> Iterator[LoadedBatch]:
        """Yield images that the device crops: for evaluation, and for an augmentation of whole batches."""
        if self.array is None:
            for selection, images in self._stream(selections, partial(square, self.open_image, self.framing)):
                yield {"images": images, "draws": torch.from_numpy(selection.draws), **self._labels_of(selection)}
            return
        for selection in selections:
            index = torch.from_numpy(selection.positions)
            source: LoadedBatch = {"index": index} if self.is_resident else {"images": self.array[index].pin_memory()}
            yield {**source, "draws": torch.from_numpy(selection.draws), **self._labels_of(selection)}

    def augmented(self, pipeline: Operation, selections: Iterable[Selection]) -> Iterator[LoadedBatch]:
        """Yield images that workers have augmented one by one."""
        for selection, images in self._stream(selections, partial(augmented, self.open_image, pipeline)):
            yield {"images": images, **self._labels_of(selection)}

    def _stream(self, selections: Iterable[Selection], make: MakeImage) -> Iterator[tuple[Selection, Tensor]]:
        return stream(selections, make, num_workers=self.num_workers, pin_memory=self.device.type == "cuda")

    def _labels_of(self, selection: Selection) -> LoadedBatch:
        labels = self.labels[selection.positions]
        mixing = {} if selection.mixing is None else {"mixing": torch.from_numpy(selection.mixing)}
        return {"labels": torch.from_numpy(labels), **mixing}

    def pixels(self, batch: LoadedBatch) -> Tensor:
        """Return (n, channels, image_size, image_size) float32, normalised, of a batch that is on the device."""
        if "draws" not in batch:
            return self.transforms.normalise(batch["images"])
        if self.array is None or "images" in batch:
            return self.transforms(batch["images"], batch["draws"])
        if self.device.type == "cpu":  # in one thread, as in BatchTransforms
            return self.transforms(torch.from_numpy(self.array.numpy()[batch["index"].numpy()]), batch["draws"])
        return self.transforms(self.array[batch["index"]], batch["draws"])
