"""From selections to batches on the device: by their places in an array, or by workers that make each image."""

import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.data.augmentation import Operation
from lockstep.data.batch_transforms import BatchTransforms
from lockstep.data.batches import Selection
from lockstep.data.framing import Framing
from lockstep.data.image_array import ImageArray
from lockstep.data.image_source import Source, as_stored, augmented
from lockstep.data.streaming import Ahead, MakeImage, stream

# labels, draws, mixing, and one of: index (into the array on the device), windows (cut from it), squares (as an array
# would hold them), crops (finished)
Loaded = dict[str, Any]


class Delivery:
    """
    Args:
        labels: (n,) int64 of all images.
        array: all images, where they take this path.
        resident: the array lies on the device; else windows are cut from it before the transfer.
        open_source: finds images for the workers.
        pipeline: the operations on one image, where there are such.
        num_workers: at most; never more than there are cores.
    """

    def __init__(
        self,
        transforms: BatchTransforms,
        framing: Framing,
        labels: np.ndarray,
        device: torch.device,
        *,
        array: ImageArray | None,
        resident: bool,
        open_source: Callable[[], Source],
        pipeline: Operation | None,
        num_workers: int,
    ) -> None:
        self.transforms, self.framing, self.labels, self.device = transforms, framing, labels, device
        self.array, self.resident, self.open_source, self.pipeline = array, resident, open_source, pipeline
        self.num_workers = min(num_workers, len(os.sched_getaffinity(0)))

    def whole(self, selections: Iterable[Selection]) -> Iterator[Loaded]:
        """For evaluation, and for an augmentation of whole batches."""
        if self.array is None:
            source = self.open_source()
            make = as_stored(source, self.framing, self.transforms.stored_size)
            yield from self._made("squares", selections, make, source.ahead)
            return
        on_cpu = self.device.type == "cpu"  # where arrays stay arrays: see image_array.Places
        for selection in selections:
            batch = self._common(selection)
            if self.resident:
                batch["index"] = selection.positions if on_cpu else torch.from_numpy(selection.positions)
            else:
                windows = self.transforms.cut(self.array, selection.positions, selection.draws)
                batch["windows"] = windows.pin_memory()
            yield batch

    def one_by_one(self, selections: Iterable[Selection]) -> Iterator[Loaded]:
        """For an augmentation of single images."""
        assert self.pipeline is not None
        source = self.open_source()
        yield from self._made("crops", selections, augmented(source, self.pipeline), source.ahead)

    def _made(self, name: str, selections: Iterable[Selection], make: MakeImage, ahead: Ahead) -> Iterator[Loaded]:
        pin_memory, workers = self.device.type == "cuda", self.num_workers
        for selection, images in stream(selections, make, ahead, num_workers=workers, pin_memory=pin_memory):
            yield {name: images, **self._common(selection)}

    def _common(self, selection: Selection) -> Loaded:
        """What every batch holds, however its images come."""
        labels = self.labels[selection.positions]
        if selection.counted is not None:
            labels = np.where(selection.counted, labels, -1)
        draws = selection.draws if self.device.type == "cpu" else torch.from_numpy(selection.draws)
        mixing = {} if selection.mixing is None else {"mixing": torch.from_numpy(selection.mixing)}
        return {"draws": draws, "labels": torch.from_numpy(labels), **mixing}

    def images(self, batch: Loaded) -> Tensor:
        """(n, channels, image_size, image_size) float32, normalised, of a batch that is on the device."""
        if "crops" in batch:
            return self.transforms.normalised(batch["crops"])
        if "squares" in batch:
            draws = torch.as_tensor(batch["draws"])
            return self.transforms(self.transforms.cut_batch(batch["squares"], draws), draws)
        if "windows" in batch:
            return self.transforms(batch["windows"], batch["draws"])
        assert self.array is not None
        return self.transforms.images(self.array, batch["index"], batch["draws"])
