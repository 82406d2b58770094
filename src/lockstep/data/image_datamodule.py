"""The base of all image data modules: settings, splits, loaders, and batches made on the device.

Images take one of two paths. `array`: all are decoded in one array, on the training device where they fit. `loader`:
worker processes read each image when it is needed. Which crop, flip and augmentation an image gets depends only on
(seed, epoch, position), on both paths. The images of an ImageSet are resized on the device on the array path: then they
may differ by one step of 255 between the paths.
"""

import inspect
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch import LightningDataModule
from PIL import Image
from torch import Tensor

from lockstep.data.augmentation import Augmentation, CropFlip
from lockstep.data.batch_transforms import BatchTransforms
from lockstep.data.batches import EvalBatches, TrainBatches
from lockstep.data.framing import Framing, resize_of, settle
from lockstep.data.listing import SPLITS, TEST, LeftOut, fingerprint
from lockstep.data.loading import BatchLoader, LoadedBatch, OpenSample
from lockstep.data.mixing import check_pairs, mix
from lockstep.data.node_cache import cached
from lockstep.data.report import identical_images, samples_of
from lockstep.data.split import VAL_FRACTION, Split, Splits
from lockstep.data.targets import Arrays, ImageSet, as_masks, kind_of
from lockstep.runs.batch import DEFAULT_EVAL_BATCH_SIZE, DEFAULT_GLOBAL_BATCH_SIZE, Batch
from lockstep.runs.errors import UserError
from lockstep.runs.provenance import REPOSITORY

CACHE_VERSION = 6


class ImageDataModule(LightningDataModule):
    """Square images in memory with their targets; a subclass returns them from `read`.

    Works in a bare Trainer: `setup` calls `prepare` and `place` if nobody has. Attributes after `prepare`: class_names,
    num_classes, num_train, num_val, num_test, data_hash, splits, left_out, notes (sentences for the log), and
    target_kind: class, labels, number, mask or dict.

    A batch is (images, targets). Images are (n, channels, image_size, image_size) float, in training with several views
    (n, views, channels, image_size, image_size). Targets are (n,) int64 classes, (n, C) float32 labels, (n,)
    float32 numbers, (n, image_size, image_size) int64 classes of pixels, −1 where none counts, or a dict of these.

    Args:
        name: of the cache folder, and shown in the logbook; None: from the class.
        image_size: side of the images that the model gets.
        global_batch_size: images in one optimizer step, over all devices and accumulation steps.
        eval_batch_size: per device, at most.
        resize: side that images are resized to before the crop to image_size; None: image_size / crop_pct.
        crop_pct: share of the resized side that evaluation shows; auto: the pretrained weights' value, else 1.
        interpolation: bilinear, bicubic, or auto: the pretrained weights' value, else bilinear.
        crop_padding: width of the black border that random training crops may reach into.
        flip: mirror half of the training images.
        mean, std: for pixels from 0 to 1, a number or one per channel; None: the data set's own; auto: the pretrained
            weights' value, else the data set's own.
        val_fraction, num_val, fold, num_folds, stratify: as of `split.Split`.
        cache_dir: folder for decoded images, shared by all ranks of a node.
        path: array, loader, or auto: array where the images fit.
        num_workers: processes per rank that load single images, at most one per core; "auto": by cores and device.
        views: how often each training image is augmented.
        seed: for split, order and augmentation.
    """

    channels = 3
    fit = "crop"
    own_mean: Sequence[float] = (0.5,)
    own_std: Sequence[float] = (0.5,)
    stage = "fit"  # test: for an evaluation, which needs no training images; set before `prepare`
    device_array_gib = 4.0  # the largest array that is kept on a GPU

    def __init__(
        self, *, image_size: int, name: str | None = None, global_batch_size: int = DEFAULT_GLOBAL_BATCH_SIZE,
        eval_batch_size: int = DEFAULT_EVAL_BATCH_SIZE, resize: int | None = None, crop_pct: float | str = "auto",
        interpolation: str = "auto", crop_padding: int = 0, flip: bool = False,
        mean: float | Sequence[float] | str | None = None, std: float | Sequence[float] | str | None = None,
        val_fraction: float = VAL_FRACTION, num_val: int | None = None, fold: int | None = None,
        num_folds: int | None = None, stratify: bool = True, cache_dir: str | Path = REPOSITORY / "data" / "cache",
        path: str = "auto", num_workers: int | str = "auto", views: int = 1, seed: int = 0,
    ) -> None:  # fmt: skip
        super().__init__()
        name = type(self).__name__.removesuffix("DataModule").lower() if name is None else name
        if Path(name).name != name or name.startswith("."):
            raise UserError(f"data.name={name!r} names a cache folder: give a name without slashes.")
        for key, value in (("seed", seed + 1), ("data.views", views), ("data.eval_batch_size", eval_batch_size)):
            if value < 1:
                raise UserError(f"{key}={value - (key == 'seed')} must be at least {1 - (key == 'seed')}.")
        if num_workers != "auto" and (isinstance(num_workers, str) or num_workers < 0):
            raise UserError(f"data.num_workers={num_workers} must be auto or at least 0.")
        if path not in ("auto", "array", "loader"):
            raise UserError(f"data.path={path} must be one of auto, array, loader.")
        self.name: str = name
        self.image_size, self.seed, self.cache_dir = image_size, seed, Path(cache_dir)
        self.global_batch_size, self.eval_batch_size = global_batch_size, eval_batch_size
        self.requested_path, self.num_workers, self.views = path, num_workers, views
        self.split = Split(seed, val_fraction, num_val, fold, num_folds, stratify=stratify)
        self.stated = {"mean": mean, "std": std, "crop_pct": crop_pct, "interpolation": interpolation}
        self.requested_resize, self.crop_padding, self.flip = resize, crop_padding, flip
        self.left_out: LeftOut = {}
        self.notes: list[str] = []
        self.class_names: list[str] = []
        self.target_kind, self.data_hash, self._is_prepared = "class", "", False
        self._array: np.ndarray | None = None  # (n, side, side, channels) uint8; None on the loader's path
        self._targets: Arrays = {}
        self._mask_arrays: Arrays = {}
        self._mask_names: list[str] = []
        self._groups: np.ndarray | None = None
        self._given = np.zeros(0, np.int8)  # (n,) the splits that the source names, −1 for images that are not used
        self._placed: dict[str, int] = {}  # rank and world_size; empty: not placed yet
        self.use()

    def use(self, augmentation: Augmentation | None = None, wanted: Mapping[str, Any] | None = None) -> None:
        """Set what is known besides the options; before `prepare`.

        Args:
            augmentation: what training does to the images; None: crop and flip.
            wanted: the pretrained weights' mean, std, crop_pct and interpolation, for options that are auto.
        Raises:
            UserError: values contradict each other.
        """
        own = {"mean": self.own_mean, "std": self.own_std}
        self.settings = settle(self.stated, own, wanted or {}, self.channels)
        self.mean, self.std = self.settings.mean, self.settings.std
        self.resize = resize_of(self.image_size, self.requested_resize, self.settings.crop_pct)
        self.framing = Framing(
            self.image_size, self.resize, self.fit, self.settings.interpolation, self.crop_padding, self.flip,
            self.channels, tuple(self.mean),
        )  # fmt: skip
        self.augmentation = augmentation or CropFlip()
        chosen = self.augmentation  # the device does it to whole batches, or a pipeline to single images
        self._crop_flip = chosen if isinstance(chosen, CropFlip) and chosen.on_whole_batches else None
        self._pipeline = None if self._crop_flip else chosen.pipeline(self.framing)

    def identity(self) -> Any:
        """Return what the images depend on, as JSON values; None: they are read anew by every process.

        With an identity the first process on a node keeps the images in `cache_dir`, and the others map them.
        """
        return None

    def read(self) -> ImageSet:
        """Return all images."""
        raise NotImplementedError

    # Facts

    def prepare(self) -> None:
        """Load or list the images and assign the splits. Every rank calls it.

        Raises:
            UserError: the source is missing or damaged, or does not fit the options.
        """
        if self._is_prepared:
            return
        self._load()
        self.num_classes, self._is_prepared = len(self.class_names) or 1, True
        self._set_splits(self.split.assign(self._classes(), self._given, self._groups, training=self.stage != "test"))
        if self.test_is_drawn:
            self.data_hash = fingerprint([self.data_hash, self.splits.test.tolist()])
        self.notes += self.splits.notes
        self._check()

    def _set_splits(self, splits: Splits) -> None:
        self.splits, self.test_is_drawn = splits, splits.drew_test
        self.num_train, self.num_val, self.num_test = len(splits.train), len(splits.val), len(splits.test)

    def _load(self) -> None:
        """Set class_names, data_hash, _given, _array and the targets."""
        identity = self.identity()
        if identity is None:
            images = self.read().check(self.name)
            self.data_hash = images.hash()
        else:
            code = ""  # after a change of the class it may read other images
            with suppress(OSError, TypeError):  # typed in a notebook
                code = inspect.getsource(type(self))
            folder = self.cache_folder([code, self.resize, self.image_size, identity])
            facts = cached(folder, lambda part: self.read().check(self.name).save(part))
            images, self.data_hash = ImageSet.load(folder, facts["set"]), facts["data_hash"]
        self._array, self.class_names, self._given = images.images, images.class_names, images.splits
        arrays = images.arrays()
        self._mask_arrays = {name: array for name, array in arrays.items() if array.dtype == np.uint8}
        targets = {name: array for name, array in arrays.items() if name not in self._mask_arrays}
        self._set_targets(targets, list(self._mask_arrays))

    def _set_targets(self, targets: Arrays, mask_names: list[str]) -> None:
        self._targets, self._mask_names = targets, mask_names
        self.target_kind = kind_of(targets, mask_names)

    def _classes(self) -> np.ndarray:
        """Return (n,) int64, the class of each image; zeros for other targets."""
        return self._targets[""] if self.target_kind == "class" else np.zeros(len(self._given), np.int64)

    def cache_folder(self, identity: Any) -> Path:
        return self.cache_dir / f"{self.name}-{fingerprint([CACHE_VERSION, type(self).__name__, identity])[:16]}"

    def match_classes(self, class_names: Sequence[str]) -> None:
        """Number the labels as a checkpoint does; call it between `prepare` and `place`.

        Args:
            class_names: those of the checkpoint; the images may lack some of them.
        Raises:
            UserError: the images have a class that the checkpoint does not know.
        """
        unknown = [name for name in self.class_names if name not in class_names]
        if unknown:
            raise UserError(
                f"{self.name} has the class {unknown[0]}, which the checkpoint does not know; it knows "
                f"{', '.join(class_names[:20])}. Rename the class or remove its images."
            )
        number_of = np.array([class_names.index(name) for name in self.class_names], np.int64)
        if self.target_kind == "labels":  # a label that these images lack is 0
            found = np.zeros((len(self._given), len(class_names)), np.float32)
            found[:, number_of] = self._targets[""]
            self._targets = {"": found}
        elif self.target_kind == "class":
            self._targets = {"": number_of[self._targets[""]]}
        self.class_names, self.num_classes = list(class_names), len(class_names) or 1

    def test_on_all(self) -> None:
        """Test on all images; call it between `prepare` and `place`."""
        self._set_splits(Splits(np.where(self._given >= 0, TEST, -1)))

    def _check(self) -> None:
        if self.stage == "test":
            return
        if not self.num_train:
            raise UserError(f"{self.name} has no images to train on: all are for validation or test.")
        if not 1 <= self.global_batch_size <= self.num_train:
            raise UserError(
                f"data.global_batch_size={self.global_batch_size}, but {self.name} has {self.num_train} training "
                f"images: give a size from 1 to {self.num_train}."
            )

    @property
    def left_out_per_epoch(self) -> int:
        """Training images that no complete global batch holds; other ones in each epoch."""
        return self.num_train % self.global_batch_size

    @property
    def counts_per_split(self) -> dict[str, list[int]]:
        """Return the number of images of each class or label in train, val and test; empty for other targets."""
        counts: dict[str, list[int]] = {name: [] for name in SPLITS}
        for name in counts if self.target_kind in ("class", "labels") else ():
            of_split = self._targets[""][getattr(self.splits, name)]
            is_class = self.target_kind == "class"
            found = np.bincount(of_split, minlength=self.num_classes) if is_class else (of_split > 0).sum(0)
            counts[name] = found.tolist()
        return counts

    @property
    def class_counts(self) -> list[int]:
        """Training images of each class, before augmentation."""
        return self.counts_per_split["train"]

    def path_taken(self) -> tuple[str, str]:
        """Return array or loader, and why; after `prepare`."""
        if self.requested_path == "auto":
            return "array", "they fit in memory"
        return self.requested_path, f"data.path={self.requested_path}"

    def image_name(self, position: int) -> str:
        return f"image {position}"

    def target_name(self, position: int) -> str:
        """Return the class, labels or number of an image; images of one name have equal targets."""
        if self.target_kind not in ("class", "labels", "number"):
            return ""
        target = np.atleast_1d(self._targets[""][position])
        if self.target_kind == "number":
            return f"{target[0]:g}"
        places = target if self.target_kind == "class" else np.flatnonzero(target > 0)
        return ", ".join(self.class_names[place] for place in places)

    def image_sizes(self) -> list[tuple[int, int]]:
        """Return (width, height) of some images in pixels."""
        return [] if self._array is None else [(self._array.shape[2], self._array.shape[1])]

    def identical_images(self, compare_all: bool = False) -> dict[str, list[str]]:
        """Return sentences on images that are in two splits or under two labels, each with the pairs it counts.

        Args:
            compare_all: of files, however many there are.
        """
        images, index = self._array, np.flatnonzero(self.splits.of_each >= 0)
        if images is None:
            return {}
        return identical_images(self, samples_of(images, index), index, lambda i: images[i].tobytes())

    # Placement and loaders

    def place(
        self, *, rank: int = 0, world_size: int = 1, accumulate_grad_batches: int = 1,
        device: torch.device | str = "cpu",
    ) -> None:  # fmt: skip
        """Set which rank this is and where batches are made; may be called again.

        Raises:
            UserError: the global batch does not divide evenly.
        """
        self.prepare()
        self._check()
        self.per_device_batch_size = Batch.cut(self.global_batch_size, world_size, accumulate_grad_batches).per_device
        self._placed, self._accumulate = {"rank": rank, "world_size": world_size}, accumulate_grad_batches
        chosen = self._crop_flip  # none of this for an augmentation of single images
        padding = self.crop_padding if chosen and chosen.random_crop else 0
        framing = replace(self.framing, crop_padding=padding, flip=bool(chosen and chosen.flips(self.framing)))
        self._transforms = BatchTransforms(framing, self.std)
        self._check_augmentation()
        self._loader = BatchLoader(
            self._transforms, self.framing, self._targets, torch.device(device), mask_names=self._mask_names,
            array=self._array if self.path_taken()[0] == "array" else None, mask_arrays=self._mask_arrays,
            open_sample=self.sample_opener(), device_array_gib=self.device_array_gib, num_workers=self.num_workers,
        )  # fmt: skip

    def _check_augmentation(self) -> None:
        """
        Raises:
            UserError: the augmentation does not fit the targets or the views.
        """
        if self.augmentation.mixing and (self.views > 1 or self.target_kind not in ("class", "labels")):
            what = f"data.views={self.views}" if self.views > 1 else f"targets of the kind {self.target_kind}"
            raise UserError(f"augmentation.mixup_alpha and cutmix_alpha cannot mix {what}: give both 0.")
        if self._pipeline is not None and self._mask_names:
            blank = Image.new("L" if self.channels == 1 else "RGB", (self.resize, self.resize))
            try:
                self._pipeline((blank, *as_masks([np.zeros((self.resize, self.resize))])))
            except TypeError as error:
                hint = "take augmentation=crop_flip or resized_crop"
                raise UserError(f"This augmentation cannot move masks ({error}): {hint}.") from None

    def setup(self, stage: str | None = None) -> None:
        if self._placed:
            return
        if (trainer := self.trainer) is None:  # in a notebook
            return self.place()
        accumulate, device = trainer.accumulate_grad_batches, trainer.strategy.root_device
        self.place(
            rank=trainer.global_rank, world_size=trainer.world_size, accumulate_grad_batches=accumulate, device=device
        )

    def train_dataloader(self) -> TrainBatches:
        """
        Raises:
            UserError: images are to be mixed in pairs, and a device gets an odd number at a time.
        """
        self.setup()
        if self.augmentation.mixing:
            check_pairs(self.per_device_batch_size, self.global_batch_size)
        deliver = partial(self._loader.augmented, self._pipeline) if self._pipeline else self._loader.whole
        return TrainBatches(
            deliver, self.splits.train, self._draw, draw_mixing=self._draw_mixing if self.augmentation.mixing else None,
            global_batch_size=self.global_batch_size, accumulate_grad_batches=self._accumulate, seed=self.seed,
            fixed=bool(getattr(self.trainer, "overfit_batches", 0)), **self._placed,
        )  # fmt: skip

    def _draw(self, generator: np.random.Generator, n: int) -> np.ndarray:
        """Draw what decides the pixels of n training images: crop starts and flips, or a seed for each."""
        if self._crop_flip is None:
            return generator.integers(0, 2**63 - 1, (self.views, n))
        views = [self._transforms.draw(generator, n) for _ in range(self.views)]
        for draws in views if not self._crop_flip.random_crop else ():
            draws[:2] = self._transforms.centre()[:2, None]
        return np.concatenate(views)

    def _draw_mixing(self, generator: np.random.Generator, epoch: int, num_pairs: int) -> np.ndarray | None:
        mixing = self.augmentation.mixing
        if mixing is None or not mixing.is_on(epoch):
            return None
        return mixing.draw(generator, num_pairs, self.image_size)

    def val_dataloader(self) -> EvalBatches:
        self.setup()
        return self._eval_batches(self.splits.val, **self._placed)

    def test_dataloader(self) -> EvalBatches:
        self.setup()
        return self._eval_batches(self.splits.test, **self._placed)

    def _eval_batches(self, index: np.ndarray, **placed: int) -> EvalBatches:
        centre = self._transforms.centre()
        return EvalBatches(self._loader.whole, index, centre, batch_size=self.eval_batch_size, **placed)

    def sample_images(self, count: int) -> Tensor:
        """Return the first training images, not augmented: (count, channels, image_size, image_size) on the CPU."""
        self.setup()
        batches, loader = self._eval_batches(self.splits.train[:count]), self._loader
        return torch.cat([loader.pixels(move_data_to_device(batch, loader.device)).cpu() for batch in batches])

    def on_after_batch_transfer(self, batch: LoadedBatch, dataloader_idx: int) -> tuple[Tensor, Any]:
        """Return images and targets; mixed images have shares of classes, (n, num_classes) float."""
        images, by_name = self._loader.pixels(batch), {**batch["targets"], **self._loader.masks(batch)}
        targets: Any = by_name[""] if list(by_name) == [""] else by_name
        if "mixing" in batch:
            images, targets = mix(images, targets, batch["mixing"], self.num_classes)
        if self.trainer is not None:  # float64 and half of the "true" precisions; whole numbers stay
            images, targets = self.trainer.precision_plugin.convert_input((images, targets))
        return images, targets

    def sample_opener(self) -> OpenSample:
        """Return what opens a single image and its masks in a worker process."""
        assert self._array is not None
        return partial(_sample_of_arrays, self._array, list(self._mask_arrays.values()))


def _sample_of_arrays(array: np.ndarray, masks: list[np.ndarray], position: int) -> tuple[Any, ...]:
    pixels = array[position]
    image = Image.fromarray(pixels.squeeze(2) if pixels.shape[2] == 1 else pixels)
    return image, *as_masks([mask[position] for mask in masks])
