"""Make the batches of one rank on its device, from arrays there or from worker processes."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.data.augmentation import Augmentation, Operation, mix
from lockstep.data.batches import AUGMENTATION_STREAM, MIXING_STREAM, Selection, random_stream
from lockstep.data.framing import BatchTransforms, Framing, index_rows
from lockstep.data.loading import LoadedBatch, Samples, prefetch, stream, workers_of
from lockstep.data.source import Source
from lockstep.data.targets import VOID


@dataclass
class BatchMaker:
    """
    Args:
        framing, std: of the images, for pixels from 0 to 1.
        pipeline: operations on single images, in training; None: the device crops whole batches.
        on_device: keep all pixels of the source on the device; else workers read each image.
        num_workers: as of `workers_of`.
        views: how often each training image is augmented.
        inputs: (n,) float32 by name, the numbers beside each image; {}: there are none.
    """

    source: Source
    framing: Framing
    std: Sequence[float]
    augmentation: Augmentation
    pipeline: Operation | None
    device: torch.device
    on_device: bool
    num_workers: int | str
    views: int
    inputs: Mapping[str, np.ndarray] = field(default_factory=dict)

    def __post_init__(self) -> None:
        flips = self.pipeline is None and self.augmentation.flips(self.framing)
        self._transforms = BatchTransforms(replace(self.framing, flip=flips), self.std, self.device)
        self._arrays: list[Tensor] = []
        if self.on_device:
            self._arrays = [torch.from_numpy(array).to(self.device) for array in self.source.pixels]

    @property
    def centre(self) -> np.ndarray:
        """Return the draws of evaluation: the centre crop, not flipped."""
        return self._transforms.centre_draw()

    def draw(self, seed: int, epoch: int, n: int) -> tuple[np.ndarray, np.ndarray | None]:
        """Draw what decides the pixels of an epoch.

        Returns:
            Crop starts and flips, or a seed for each image, as a Selection has them.
            The mixing; None: nothing is mixed.
        """
        generator = random_stream(seed, AUGMENTATION_STREAM, epoch)
        if self.pipeline is None:
            is_random = self.augmentation.random_crop
            views = [self._transforms.draw(generator, n, is_random) for _ in range(self.views)]
            draws = np.concatenate(views)
        else:
            draws = generator.integers(0, 2**63 - 1, (self.views, n))

        mixing = self.augmentation.mixing
        if mixing is None or (mixing.epochs is not None and epoch >= mixing.epochs):
            return draws, None
        generator = random_stream(seed, MIXING_STREAM, epoch)
        return draws, mixing.draw(generator, n // 2, self.framing.image_size)

    def train_batches(self, selections: Iterable[Selection]) -> Iterator[LoadedBatch]:
        return self._deliver(selections, self.pipeline)

    def eval_batches(self, selections: Iterable[Selection]) -> Iterator[LoadedBatch]:
        return self._deliver(selections, None)

    def _deliver(
        self, selections: Iterable[Selection], pipeline: Operation | None
    ) -> Iterator[LoadedBatch]:
        batches = self._batches(selections, pipeline)
        if self.device.type == "cuda":
            return prefetch(batches, self.device)
        return batches

    def _batches(
        self, selections: Iterable[Selection], pipeline: Operation | None
    ) -> Iterator[LoadedBatch]:
        """Yield batches whose pixels `finish` moves, or finds augmented by the pipeline."""
        for selection, batch in self._images(selections, pipeline):
            targets = {}
            for name, values in self.source.targets.items():
                targets[name] = torch.from_numpy(values[selection.positions])
            batch["targets"] = targets
            if self.inputs:
                batch["inputs"] = {
                    name: torch.from_numpy(values[selection.positions])
                    for name, values in self.inputs.items()
                }
            if pipeline is None:
                batch["draws"] = torch.from_numpy(selection.draws)
            if selection.mixing is not None:
                batch["mixing"] = torch.from_numpy(selection.mixing)
            yield batch

    def _images(
        self, selections: Iterable[Selection], pipeline: Operation | None
    ) -> Iterator[tuple[Selection, LoadedBatch]]:
        if self._arrays and pipeline is None:
            for selection in selections:
                yield selection, {"index": torch.from_numpy(selection.positions)}
            return
        workers = workers_of(self.num_workers, self.device)
        samples = Samples(self.source.open, self.framing, pipeline, workers)
        yield from stream(samples, selections, pin_memory=self.device.type == "cuda")

    def finish(self, batch: LoadedBatch) -> tuple[Any, Any]:
        """Return images and targets of a batch on the device, as ImageDataModule describes them."""
        images, targets = self._images_and_targets(batch)
        if "inputs" in batch:
            images = (images, batch["inputs"])
        return images, targets

    def _images_and_targets(self, batch: LoadedBatch) -> tuple[Any, Any]:
        names = self.source.mask_names
        if "index" in batch:
            pixels = [index_rows(array, batch["index"]) for array in self._arrays]
        else:
            pixels = batch["pixels"]
        if "draws" in batch:
            modes = [self.framing.interpolation, *("nearest" for _ in names)]
            transform = self._transforms.resize_crop_flip
            pixels = [transform(part, batch["draws"], mode) for part, mode in zip(pixels, modes)]

        images = self._transforms.normalise(pixels[0])
        by_name = dict(batch["targets"])
        for name, mask in zip(names, pixels[1:], strict=True):
            classes = mask[..., 0].long()
            by_name[name] = torch.where(classes == VOID, -1, classes)
        targets: Any = by_name[""] if list(by_name) == [""] else by_name
        if "mixing" in batch:
            num_classes = len(self.source.class_names)
            images, targets = mix(images, targets, batch["mixing"], num_classes)
        return images, targets
