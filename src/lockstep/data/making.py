"""Make the batches of one rank on its device, from arrays there or from worker processes."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lockstep.data.augmentation import Augmentation, Operation, mix
from lockstep.data.batches import AUGMENTATION_STREAM, MIXING_STREAM, Selection, random_stream
from lockstep.data.framing import BatchTransforms, Framing, index_rows
from lockstep.data.loading import Samples, choose_num_workers, load_pixels, prefetch
from lockstep.data.source import Source
from lockstep.data.targets import VOID


class LoadedBatch(NamedTuple):
    """A batch that is not cropped, normalised and mixed yet.

    Attributes:
        positions: (n,) int64 of the images in the source.
        pixels: (n, [views,] side, side, channels) of the images and of each mask; None: the device
            has the pixels of all images.
        draws: see Selection; None: workers have cropped the images.
        mixing: see Selection.
        targets: (n, …) by name, without the masks.
        inputs: (n,) float32 by name, the numbers beside each image; {}: there are none.
    """

    positions: Tensor
    pixels: list[Tensor] | None
    draws: Tensor | None
    mixing: Tensor | None
    targets: dict[str, Tensor]
    inputs: dict[str, Tensor]


@dataclass
class BatchMaker:
    """The maker of the batches of one rank.

    Args:
        framing: the resize and the crop of the images, and their mean.
        std: the deviation of each channel, for pixels from 0 to 1.
        pipeline: operations on single images, in training; None: the device crops whole batches.
        keep_on_device: keep all pixels of the source on the device; else workers read each image.
        num_workers: see `choose_num_workers`.
        views: how often each training image is augmented.
        inputs: (n,) float32 by name, the numbers beside each image; {}: there are none.
    """

    source: Source
    framing: Framing
    std: Sequence[float]
    augmentation: Augmentation
    pipeline: Operation | None
    device: torch.device
    keep_on_device: bool
    num_workers: int | str
    views: int
    inputs: Mapping[str, np.ndarray] = field(default_factory=dict)

    def __post_init__(self) -> None:
        flips = self.pipeline is None and self.augmentation.flips(self.framing)
        self._transforms = BatchTransforms(replace(self.framing, flip=flips), self.std, self.device)
        self._device_arrays: list[Tensor] = []
        if self.keep_on_device:
            self._device_arrays = [
                torch.from_numpy(array).to(self.device) for array in self.source.pixels
            ]

    @property
    def centre_crop(self) -> np.ndarray:
        """Return the crop of evaluation, (3,) int64, which is not flipped."""
        return self._transforms.centre_crop()

    def draw(self, seed: int, epoch: int, n: int) -> tuple[np.ndarray, np.ndarray | None]:
        """Draw the random numbers of an epoch that change pixels.

        Returns:
            The draws of a Selection: crop starts and flips, or a seed for each image.
            The mixing of a Selection; None: nothing is mixed.
        """
        generator = random_stream(seed, AUGMENTATION_STREAM, epoch)
        if self.pipeline is None:
            is_random = self.augmentation.random_crop
            views = [
                self._transforms.draw_crops(generator, n, is_random) for _ in range(self.views)
            ]
            draws = np.concatenate(views)
        else:
            draws = generator.integers(0, 2**63 - 1, (self.views, n))

        mixing = self.augmentation.mixing
        if mixing is None or (mixing.epochs is not None and epoch >= mixing.epochs):
            return draws, None
        generator = random_stream(seed, MIXING_STREAM, epoch)
        return draws, mixing.draw(generator, n // 2, self.framing.image_size)

    def make_train_batches(self, selections: Iterable[Selection]) -> Iterator[LoadedBatch]:
        return self._deliver(selections, self.pipeline)

    def make_eval_batches(self, selections: Iterable[Selection]) -> Iterator[LoadedBatch]:
        return self._deliver(selections, None)

    def _deliver(
        self, selections: Iterable[Selection], pipeline: Operation | None
    ) -> Iterator[LoadedBatch]:
        batches = self._make_batches(selections, pipeline)
        if self.device.type == "cuda":
            return prefetch(batches, self.device)
        return batches

    def _make_batches(
        self, selections: Iterable[Selection], pipeline: Operation | None
    ) -> Iterator[LoadedBatch]:
        for selection, pixels in self._load(selections, pipeline):
            positions = torch.from_numpy(selection.positions)
            draws = torch.from_numpy(selection.draws) if pipeline is None else None
            mixing = None if selection.mixing is None else torch.from_numpy(selection.mixing)
            targets = _select_rows(self.source.targets, selection.positions)
            inputs = _select_rows(self.inputs, selection.positions)
            yield LoadedBatch(positions, pixels, draws, mixing, targets, inputs)

    def _load(
        self, selections: Iterable[Selection], pipeline: Operation | None
    ) -> Iterator[tuple[Selection, list[Tensor] | None]]:
        """Yield each selection with its pixels; None where the device has those of all images."""
        if self._device_arrays and pipeline is None:
            for selection in selections:
                yield selection, None
            return
        workers = choose_num_workers(self.num_workers, self.device)
        samples = Samples(self.source.open, self.framing, pipeline, workers)
        yield from load_pixels(samples, selections, pin_memory=self.device.type == "cuda")

    def to_images_and_targets(self, batch: LoadedBatch) -> tuple[Any, Any]:
        """Return images and targets of a batch on the device, as ImageDataModule describes them."""
        pixels, *masks = self._crop(batch)
        images: Any = self._transforms.normalise(pixels)
        targets: Any = dict(batch.targets)
        for name, mask in zip(self.source.mask_names, masks, strict=True):
            classes = mask[..., 0].long()
            class_of_value = self.source.class_of_mask_value
            if class_of_value is not None:
                classes = torch.from_numpy(class_of_value).to(mask.device)[classes].long()
            targets[name] = torch.where(classes == VOID, -1, classes)
        if self.source.target_kind != "dict":
            targets = targets[""]

        if batch.mixing is not None:
            images, targets = mix(images, targets, batch.mixing, len(self.source.class_names))
        if batch.inputs:
            images = (images, batch.inputs)
        return images, targets

    def _crop(self, batch: LoadedBatch) -> list[Tensor]:
        """Return crops of image_size × image_size pixels, of the images and of each mask."""
        pixels = batch.pixels
        if pixels is None:
            pixels = [index_rows(array, batch.positions) for array in self._device_arrays]
        if batch.draws is None:
            return pixels
        modes = [self.framing.interpolation, *("nearest" for _ in self.source.mask_names)]
        crop = self._transforms.resize_crop_flip
        return [crop(part, batch.draws, mode) for part, mode in zip(pixels, modes)]


def _select_rows(arrays: Mapping[str, np.ndarray], positions: np.ndarray) -> dict[str, Tensor]:
    return {name: torch.from_numpy(values[positions]) for name, values in arrays.items()}
