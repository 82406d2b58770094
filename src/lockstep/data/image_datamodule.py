"""The base of all data modules: facts, split, a per-node image array, loaders, and batches made on the device."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch import LightningDataModule
from torch import Tensor

from lockstep.data.batch_transforms import BatchTransforms, check_sizes
from lockstep.data.batches import SPLIT, EvalBatches, Selection, TrainBatches, random_stream
from lockstep.data.image_array import ImageArray, Layout
from lockstep.data.image_set import IMAGES, LABELS, ImageSet, fingerprint
from lockstep.data.node_cache import Content, cached
from lockstep.runs.batch import Batch
from lockstep.runs.errors import UserError

CACHE_VERSION = 2
Loaded = dict[str, Any]  # labels, draws, and index (into the array on the device) or windows (cut from it)


class ImageDataModule(LightningDataModule):
    """Labelled square images; a subclass says where they come from (`identity`, `read`).

    Order of calls: prepare() on every rank, place(...), then Lightning's hooks; `setup` makes up for what was left out.

    Args:
        name: display name, and the name of its cache folder.
        image_size: side of the images that the model gets.
        global_batch_size: images in one optimizer step, over all devices and accumulation steps.
        eval_batch_size: per device, at most.
        resize: side that images are resized to before the crop to image_size; None: image_size.
        crop_padding: black border in pixels that random training crops may reach into.
        flip: mirror half of the training images.
        mean: of pixels from 0 to 1, a number or one per channel; None: the data set's own.
        std: likewise.
        val_fraction: part of the training set that becomes the validation set, drawn from the seed.
        num_val: the same as a count; goes before val_fraction.
        cache_dir: where the image arrays lie, one folder per source and size.
        device_cache_gib: on a GPU: the largest array that is kept on it.
        seed: of split, order and augmentation.
    """

    name: str
    channels = 3
    own_mean: Sequence[float] = (0.5,)
    own_std: Sequence[float] = (0.5,)

    def __init__(
        self,
        *,
        name: str,
        image_size: int,
        global_batch_size: int = 128,
        eval_batch_size: int = 512,
        resize: int | None = None,
        crop_padding: int = 0,
        flip: bool = False,
        mean: float | Sequence[float] | None = None,
        std: float | Sequence[float] | None = None,
        val_fraction: float = 0.1,
        num_val: int | None = None,
        cache_dir: str | Path = "data/cache",
        device_cache_gib: float = 4.0,
        seed: int = 0,
    ) -> None:
        super().__init__()
        check_sizes(image_size, resize or image_size, crop_padding)
        if not isinstance(name, str) or Path(name).name != name or name.startswith("."):
            raise UserError(f"data.name={name!r} names a cache folder: give a plain name.")
        if seed < 0:
            raise UserError(f"seed={seed} must not be negative.")
        self.name, self.image_size, self.seed = name, image_size, seed
        self.global_batch_size, self.eval_batch_size = global_batch_size, eval_batch_size
        self.resize, self.crop_padding, self.flip = resize or image_size, crop_padding, flip
        self.val_fraction, self.requested_num_val = val_fraction, num_val
        self.cache_dir = Path(cache_dir)
        self.device_cache_gib = device_cache_gib
        self.mean = _per_channel("mean", self.own_mean if mean is None else mean, self.channels)
        self.std = _per_channel("std", self.own_std if std is None else std, self.channels)
        if min(self.std) <= 0:
            raise UserError(f"data.std={self.std} must be positive.")
        self._meta: Content = {}  # empty: not prepared yet
        self._placed: dict[str, int] = {}  # empty: not placed yet

    # What a subclass says

    def identity(self) -> Any:
        """What the images depend on, as JSON values, found cheaply; downloads what is missing."""
        raise NotImplementedError

    def read(self, scratch: Path) -> ImageSet:
        """All images; called once per node. `scratch` is a folder for arrays too large for the memory."""
        raise NotImplementedError

    # prepare: facts

    def prepare(self) -> None:
        """Open the node's image array, making it where it is missing; sets the facts. Every rank calls it.

        Raises:
            UserError: the source is missing, broken, or does not fit the options.
        """
        if self._meta:
            return
        options = [CACHE_VERSION, type(self).__name__, self.resize, self.image_size, self.crop_padding, self.flip]
        self._cache = self.cache_dir / f"{self.name}-{fingerprint([*options, self.identity()])[:16]}"
        self._meta = cached(self._cache, self._build)
        self._labels = np.load(self._cache / LABELS)
        self._read_facts(self._meta)

    def _read_facts(self, meta: Content) -> None:
        self.class_names: list[str] = meta["class_names"]
        self.num_classes = len(self.class_names)
        self.data_hash: str = meta["data_hash"]
        self.skipped: list[str] = meta["skipped"]
        num_fit, num_val, num_test = meta["num_fit"], meta["num_val"], meta["num_test"]
        if num_val:
            self._train_index, self._val_index = np.arange(num_fit), num_fit + np.arange(num_val)
        else:
            self._train_index, self._val_index = self._split(num_fit)
        self._test_index = num_fit + num_val + np.arange(num_test)
        self.num_train, self.num_val, self.num_test = len(self._train_index), len(self._val_index), num_test
        self._check_batch_sizes()

    def _check_batch_sizes(self) -> None:
        if not 1 <= self.global_batch_size <= self.num_train:
            raise UserError(
                f"data.global_batch_size={self.global_batch_size}, but {self.name} has {self.num_train} training "
                f"images: take a size from 1 to {self.num_train}."
            )
        if self.eval_batch_size < 1:
            raise UserError(f"data.eval_batch_size={self.eval_batch_size} must be at least 1.")

    @property
    def left_out_per_epoch(self) -> int:
        """Training images that no complete global batch holds, another part of them in each epoch."""
        return self.num_train % self.global_batch_size

    @property
    def class_counts(self) -> list[int]:
        """Training images of each class, before augmentation."""
        return np.bincount(self._labels[self._train_index], minlength=self.num_classes).tolist()

    def _split(self, num_fit: int) -> tuple[np.ndarray, np.ndarray]:
        """Training and validation positions, ascending; the same on every rank."""
        num_val = round(self.val_fraction * num_fit) if self.requested_num_val is None else self.requested_num_val
        if not 1 <= num_val < num_fit:
            key = "val_fraction" if self.requested_num_val is None else "num_val"
            value = self.val_fraction if self.requested_num_val is None else self.requested_num_val
            raise UserError(
                f"data.{key}={value} leaves {num_fit - num_val} of {num_fit} images to train on and {num_val} to "
                "validate on: both need one at least."
            )
        order = random_stream(self.seed, SPLIT).permutation(num_fit)
        return np.sort(order[num_val:]), np.sort(order[:num_val])

    def _build(self, part: Path) -> Content:
        images = self.read(part)
        images.check(self.name)
        layout = images.layout(self._transforms(images.images.shape[1]).array_padding, mirrored=self.flip)
        content = self._content(images, layout, images.content_hash())
        images.write(part, layout)
        return content

    def _content(self, images: ImageSet, layout: Layout, data_hash: str) -> Content:
        return {
            "class_names": images.class_names,
            "num_fit": images.num_fit,
            "num_val": images.num_val,
            "num_test": images.num_test,
            "skipped": images.skipped,
            "data_hash": data_hash,
            "layout": vars(layout),
        }

    def _transforms(self, stored_size: int) -> BatchTransforms:
        return BatchTransforms(
            stored_size=stored_size,
            image_size=self.image_size,
            resize=self.resize,
            crop_padding=self.crop_padding,
            flip=self.flip,
            mean=self.mean,
            std=self.std,
        )

    # place: which part of the world this rank is

    def place(
        self,
        *,
        rank: int = 0,
        world_size: int = 1,
        accumulate_grad_batches: int = 1,
        device: torch.device | str = "cpu",
    ) -> None:
        """Say which rank this is and where batches are made; may be called again.

        Raises:
            UserError: the batch sizes do not fit.
        """
        self.prepare()
        self._check_batch_sizes()
        self.per_device_batch_size = Batch.cut(self.global_batch_size, world_size, accumulate_grad_batches).per_device
        self._placed = {"rank": rank, "world_size": world_size}
        self._accumulate, self._device = accumulate_grad_batches, torch.device(device)
        self._open_array()

    def _open_array(self) -> None:
        layout = Layout(**self._meta["layout"])
        self._batch_transforms = self._transforms(layout.size).to(self._device)
        array = ImageArray.open(self._cache / IMAGES, layout, self._batch_transforms.window_in(layout))
        self._resident = self._device.type == "cpu" or layout.num_bytes <= self.device_cache_gib * 2**30
        self._array = array.to(self._device) if self._resident else array

    def setup(self, stage: str | None = None) -> None:
        if not self._placed:
            trainer = self.trainer
            self.place(
                rank=trainer.global_rank,
                world_size=trainer.world_size,
                accumulate_grad_batches=trainer.accumulate_grad_batches,
                device=trainer.strategy.root_device,
            )

    # Loaders

    def train_dataloader(self) -> TrainBatches:
        return TrainBatches(
            self._deliver,
            self._train_index,
            self._batch_transforms.draw,
            global_batch_size=self.global_batch_size,
            accumulate_grad_batches=self._accumulate,
            seed=self.seed,
            fixed=bool(getattr(self.trainer, "overfit_batches", 0)),
            **self._placed,
        )

    def val_dataloader(self) -> EvalBatches:
        return self._eval_batches(self._val_index)

    def test_dataloader(self) -> EvalBatches:
        return self._eval_batches(self._test_index)

    def _eval_batches(self, index: np.ndarray) -> EvalBatches:
        centre = self._batch_transforms.centre()
        return EvalBatches(self._deliver, index, centre, batch_size=self.eval_batch_size, **self._placed)

    def _deliver(self, selections: Iterable[Selection]) -> Iterator[Loaded]:
        on_cpu = self._device.type == "cpu"  # where arrays stay arrays: see image_array.Places
        for selection in selections:
            batch = self._common(selection)
            if self._resident:
                batch["index"] = selection.positions if on_cpu else torch.from_numpy(selection.positions)
            else:
                windows = self._batch_transforms.cut(self._array, selection.positions, selection.draws)
                batch["windows"] = windows.pin_memory()
            yield batch

    def _common(self, selection: Selection) -> Loaded:
        """What every batch holds, however its images come."""
        labels = self._labels[selection.positions]
        if selection.counted is not None:
            labels = np.where(selection.counted, labels, -1)
        draws = selection.draws if self._device.type == "cpu" else torch.from_numpy(selection.draws)
        return {"draws": draws, "labels": torch.from_numpy(labels)}

    def sample_images(self, count: int) -> Tensor:
        """(count, channels, image_size, image_size) float, normalised, on the CPU: the first training images.

        Not augmented, and the same on every rank: for nets that look at data before they train.
        """
        centre, index = self._batch_transforms.centre(), self._train_index[:count]
        batches = EvalBatches(self._deliver, index, centre, batch_size=self.eval_batch_size, rank=0, world_size=1)
        images = [self._images_of(move_data_to_device(batch, self._device)) for batch in batches]
        return torch.cat(images)[: len(index)].cpu()

    # Batches

    def on_after_batch_transfer(self, batch: Loaded, dataloader_idx: int) -> tuple[Tensor, Tensor]:
        """Images (n, channels, image_size, image_size) float, normalised, and labels (n,), −1 where not counted."""
        images = self._images_of(batch)
        if self.trainer is not None:
            images = self.trainer.precision_plugin.convert_input(images)  # float64 and half of "true" precisions
        return images, batch["labels"]

    def _images_of(self, batch: Loaded) -> Tensor:
        if "index" in batch:
            return self._batch_transforms.images(self._array, batch["index"], batch["draws"])
        return self._batch_transforms(batch["windows"], batch["draws"])


def _per_channel(key: str, value: float | Sequence[float], channels: int) -> list[float]:
    values = [float(value)] if isinstance(value, int | float) else [float(v) for v in value]
    if len(values) not in (1, channels):
        raise UserError(f"data.{key}={values} has {len(values)} values for {channels} channels: give 1 or {channels}.")
    return values * channels if len(values) == 1 else values
