"""The base of all image data modules: settings, splits, loaders, and batches made on the device.

Images take one of two paths. `array`: all are decoded in one array, on the training device where they fit. `loader`:
worker processes read each image when it is needed. Which crop, flip and augmentation an image gets depends only on
(seed, epoch, position), on both paths. The images of an ImageSet are resized on the device on the array path: then they
may differ by one step of 255 between the paths.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningDataModule
from PIL import Image
from torch import Tensor

from lockstep.data.augmentation import Augmentation, CropFlip, Operation, mix
from lockstep.data.batches import AUGMENTATION, MIXING, EvalBatches, Selection, TrainBatches, random_stream
from lockstep.data.content_hash import METHOD, hash_of_arrays, with_drawn_test
from lockstep.data.framing import BatchTransforms, Framing, resize_of, settle, take
from lockstep.data.listing import SPLITS, TEST, LeftOut
from lockstep.data.loading import LoadedBatch, OpenSample, Samples, prefetched, stream, workers_of
from lockstep.data.report import identical_images
from lockstep.data.split import VAL_FRACTION, Split, Splits
from lockstep.data.targets import VOID, Arrays, ImageSet, as_masks, kind_of, scale_of
from lockstep.process.errors import UserError
from lockstep.process.project import REPOSITORY
from lockstep.records.batch import DEFAULT_EVAL_BATCH_SIZE, DEFAULT_GLOBAL_BATCH_SIZE, Batch

CHECK = "check"  # the stage of check_data.py, which lists all images that cannot be used


class ImageDataModule(LightningDataModule):
    """Square images in memory with their targets; a subclass returns them from `read`.

    It works in a plain Trainer. Attributes after `prepare`: class_names, num_classes, num_train, num_val, num_test,
    data_hash, splits, left_out, and target_kind: class, labels, number, mask or dict.

    A batch is (images, targets). Images are (n, channels, image_size, image_size) float, in training with several views
    (n, views, channels, image_size, image_size). Targets are (n,) int64 classes, (n, C) float32 labels, (n,)
    float32 numbers, (n, image_size, image_size) int64 classes of pixels, −1 where none counts, or a dict of these.

    Args:
        name: of the cache folder, and shown in the logbook; None: from the class.
        global_batch_size: images in one optimizer step, over all devices and accumulation steps.
        eval_batch_size: per device, at most.
        image_size, resize, crop_padding, flip: as of Framing; resize=None: image_size / crop_pct.
        crop_pct, interpolation, mean, std: as of `settle`.
        val_fraction, num_val, fold, num_folds: as of Split.
        cache_dir: folder of decoded images and downloads, one per node.
        path: array, loader, or auto: array where the images fit.
        num_workers: processes per rank that load single images; "auto": by cores and device.
        views: how often each training image is augmented.
    """

    channels = 3
    fit = "crop"
    hash_method = METHOD  # how data_hash is made; data of one hash and method are the same
    own_mean: Sequence[float] = (0.5,)
    own_std: Sequence[float] = (0.5,)
    # fit, test for an evaluation, which needs no training images, or CHECK. Set it before `prepare`.
    stage = "fit"
    device_array_gib = 4.0  # the largest arrays that are kept on a GPU; workers read larger ones image by image

    def __init__(
        self,
        *,
        image_size: int,
        name: str | None = None,
        global_batch_size: int = DEFAULT_GLOBAL_BATCH_SIZE,
        eval_batch_size: int = DEFAULT_EVAL_BATCH_SIZE,
        resize: int | None = None,
        crop_pct: float | str = "auto",
        interpolation: str = "auto",
        crop_padding: int = 0,
        flip: bool = False,
        mean: float | Sequence[float] | str | None = None,
        std: float | Sequence[float] | str | None = None,
        val_fraction: float = VAL_FRACTION,
        num_val: int | None = None,
        fold: int | None = None,
        num_folds: int | None = None,
        cache_dir: str | Path = REPOSITORY / "data" / "cache",
        path: str = "auto",
        num_workers: int | str = "auto",
        views: int = 1,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.name: str = type(self).__name__.removesuffix("DataModule").lower()
        if name is not None:
            self.name = name
        self.image_size = image_size
        self.seed = seed
        self.cache_dir = Path(cache_dir)
        self.global_batch_size = global_batch_size
        self.eval_batch_size = eval_batch_size
        self.requested_path = path
        self.num_workers = num_workers
        self.views = views
        self._check_options()

        self.split = Split(seed, val_fraction, num_val, fold, num_folds)
        self.stated = {
            "mean": mean,
            "std": std,
            "crop_pct": crop_pct,
            "interpolation": interpolation,
        }
        self.requested_resize = resize
        self.crop_padding = crop_padding
        self.flip = flip

        self.left_out: LeftOut = {}
        self.warnings: list[str] = []  # sentences for the log
        self.faults: list[str] = []  # of a check: what is listed and cannot be used
        self.groups_note = ""  # what keeps images together, for the log and the page
        self.class_names: list[str] = []
        self.data_hash = ""
        self.list_hash = ""  # of names and sizes, which runs of version 2.0.0 are compared by
        # Images and each mask, (n, side, side, channels) uint8, if they are in memory.
        self._pixels: list[np.ndarray] = []
        self._groups: np.ndarray | None = None
        # (n,) the splits that the source names, −1 for images that are not used.
        self._given = np.zeros(0, np.int8)
        self._placed: dict[str, int] = {}  # rank and world_size; empty: not placed yet
        self._set_targets({}, [])
        self.use()

    def _check_options(self) -> None:
        if Path(self.name).name != self.name or self.name.startswith("."):
            raise UserError(
                f"data.name={self.name!r} names a cache folder: give a name without slashes."
            )
        for key in ("views", "eval_batch_size"):
            if getattr(self, key) < 1:
                raise UserError(f"data.{key}={getattr(self, key)} must be at least 1.")
        if self.seed < 0:
            raise UserError(f"seed={self.seed} must be at least 0.")
        workers = self.num_workers
        if workers != "auto" and (isinstance(workers, str) or workers < 0):
            raise UserError(f"data.num_workers={workers} must be auto or at least 0.")
        if self.requested_path not in ("auto", "array", "loader"):
            raise UserError(
                f"data.path={self.requested_path} must be one of auto, array, loader."
            )

    def use(self, augmentation: Augmentation | None = None, wanted: Mapping[str, Any] | None = None) -> None:
        """Set the augmentation and the values of pretrained weights; call it before `prepare`.

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
        self.augmentation = chosen = augmentation or CropFlip()
        is_plain = not (chosen.color_jitter or chosen.erasing_prob)  # the device augments whole batches
        self._crop_flip = chosen if isinstance(chosen, CropFlip) and is_plain else None
        self._pipeline = None if self._crop_flip else chosen.pipeline(self.framing)  # of single images

    def read(self) -> ImageSet:
        """Return all images; every process calls it."""
        raise NotImplementedError

    def prepare(self) -> None:
        """Load or list the images and assign the splits. Every rank calls it.

        Raises:
            UserError: the source is missing or damaged, or does not fit the options.
        """
        if hasattr(self, "splits"):
            return
        self._load()
        self.num_classes = len(self.class_names) or 1
        self._set_splits(self._assigned())
        if self.splits.drew_test:
            self.data_hash = with_drawn_test(self.data_hash, self.splits.test)
        if self._groups is not None:
            self.groups_note = self._note_on_groups(self._groups)
        if self.stage != "test":
            self._check()

    def _assigned(self) -> Splits:
        """Return the splits. An evaluation that cannot draw any tests on all images."""
        try:
            return self.split.assign(self._classes(), self._given, self._groups)
        except UserError:
            if self.stage != "test":
                raise
            return Splits(np.full_like(self._given, TEST), drew_test=True)

    def _note_on_groups(self, groups: np.ndarray) -> str:
        """Return "patient_id: 30 groups, 24 to train, 3 to validate, 3 to test"."""
        counts = [len(np.unique(groups[getattr(self.splits, name)])) for name in SPLITS]
        return (
            f"{getattr(self, 'group', None) or 'groups'}: {len(np.unique(groups))} groups, "
            f"{counts[0]} to train, {counts[1]} to validate, {counts[2]} to test"
        )

    def _set_splits(self, splits: Splits) -> None:
        self.splits = splits
        self.num_train, self.num_val, self.num_test = len(splits.train), len(splits.val), len(splits.test)

    def _load(self) -> None:
        """Set class_names, data_hash, _given, _pixels and the targets."""
        images = self.read()
        arrays = images.arrays()
        self.class_names = images.class_names
        self._given = images.splits
        self.data_hash = hash_of_arrays([images.images], arrays, self.class_names, self._given)
        masks = [name for name, array in arrays.items() if array.dtype == np.uint8]
        pixels = [images.images, *(arrays.pop(name)[..., None] for name in masks)]
        # torchvision's CIFAR10 has the channels outermost.
        self._pixels = [np.ascontiguousarray(array) for array in pixels]
        self._set_targets(arrays, masks)

    def _set_targets(self, targets: Arrays, mask_names: list[str]) -> None:
        self._targets, self._mask_names = targets, mask_names
        self.target_kind = kind_of(targets, mask_names)

    def _classes(self) -> np.ndarray:
        """Return (n,) int64, the class of each image; zeros for other targets."""
        return self._targets[""] if self.target_kind == "class" else np.zeros(len(self._given), np.int64)

    def match_classes(self, class_names: Sequence[str]) -> None:
        """Number the labels as a checkpoint does; call it between `prepare` and `place`.

        Args:
            class_names: those of the checkpoint; the images may lack some of them.
        Raises:
            UserError: the images have a class that the checkpoint does not know.
        """
        void = {str(VOID)} if self._mask_names else set()  # of masks that show one class and pixels that do not count
        if unknown := [name for name in self.class_names if name not in {*class_names, *void}]:
            raise UserError(
                f"{self.name} has the class {unknown[0]}, which the checkpoint does not know; it knows "
                f"{', '.join(class_names[:20])}. Rename the class or remove its images."
            )
        number_of = np.array([class_names.index(name) for name in self.class_names if name not in void], np.int64)
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
        if not self.num_train:
            raise UserError(
                f"{self.name} has no images to train on: all are for validation or test."
            )
        if not 1 <= self.global_batch_size <= self.num_train:
            raise UserError(
                f"data.global_batch_size={self.global_batch_size}, but {self.name} has "
                f"{self.num_train} training images: give a size from 1 to {self.num_train}."
            )
        untrained = [
            name for name, count in zip(self.class_names, self.class_counts) if not count
        ]
        if untrained and self.target_kind == "class":
            raise UserError(
                f"{self.name}: the class {untrained[0]} has no image to train on; all of its "
                "images are for validation or test. Add some, or remove the class."
            )
        self.warnings += [
            f"No training image has the label {name}, which occurs in validation or test. Move "
            f"images of {name} to train, or leave it out of data.label_columns."
            for name in untrained
            if self._occurs(name)
        ]

    def _occurs(self, class_name: str) -> bool:
        number = self.class_names.index(class_name)
        return any(counts[number] for counts in self.counts_per_split.values())

    @property
    def counts_per_split(self) -> dict[str, list[int]]:
        """Return the number of images of each class or label in train, val and test; empty for other targets."""
        if self.target_kind not in ("class", "labels"):
            return {name: [] for name in SPLITS}
        found = {name: self._targets[""][getattr(self.splits, name)] for name in SPLITS}
        classes = {name: each if each.ndim == 1 else np.nonzero(each > 0)[1] for name, each in found.items()}
        return {name: np.bincount(each, minlength=self.num_classes).tolist() for name, each in classes.items()}

    @property
    def class_counts(self) -> list[int]:
        """Training images of each class, before augmentation."""
        return self.counts_per_split["train"]

    @property
    def target_scale(self) -> dict[str, float]:
        """Return target_mean and target_std of the training images; empty if targets are no numbers."""
        if self.target_kind != "number":
            return {}
        return scale_of(self._targets[""][self.splits.train])

    def path_taken(self) -> tuple[str, str]:
        """Return array or loader, and why; after `prepare`."""
        if self.requested_path == "auto":
            return "array", "they fit in memory"
        return self.requested_path, f"data.path={self.requested_path}"

    def image_name(self, position: int) -> str:
        return f"image {position}"

    def where(self, position: int) -> str:
        """Return what errors call an image, with its line in a table."""
        return self.image_name(position)

    def refuse_labels_outside(self, low: float, high: float) -> None:
        """
        Raises:
            UserError: one of several labels is not from `low` to `high`; it names the image.
        """
        if self.target_kind != "labels":
            return
        labels = self._targets[""]
        images, columns = np.nonzero((labels < low) | (labels > high))
        if not len(images):
            return
        value = labels[images[0], columns[0]]
        name = self.class_names[columns[0]] if self.class_names else columns[0]
        raise UserError(
            f"{self.where(int(images[0]))}: the label {name} is {value:g}, and labels are from "
            f"{low:g} to {high:g}. If {value:g} means that it is not known, give "
            f"data.unknown={value:g}."
        )

    def target_name(self, position: int) -> str:
        """Return the class, labels or number of an image; images of one name have equal targets."""
        if self.target_kind in ("mask", "dict"):
            return ""
        target = self._targets[""][position]
        if self.target_kind == "number":
            return f"{target:g}"
        places = [target] if self.target_kind == "class" else np.flatnonzero(target > 0)
        return ", ".join(self.class_names[place] for place in places)

    def identical_images(self, limit: int | None = None) -> dict[str, list[str]]:
        """Return sentences on images that are in two splits or under two labels, each with the pairs it counts.

        Args:
            limit: the most files of equal size that are compared; None: all.
        """
        images, index = self._pixels[0], np.flatnonzero(self.splits.of_each >= 0)
        return identical_images(self, np.zeros(len(index)), index, lambda i: images[i].tobytes(), None)

    def place(
        self, *, rank: int = 0, world_size: int = 1, accumulate_grad_batches: int = 1,
        device: torch.device | str = "cpu",
    ) -> None:  # fmt: skip
        """Set which rank this is and where batches are made; may be called again.

        Raises:
            UserError: the global batch does not divide evenly, or the augmentation does not fit targets or views.
        """
        self.prepare()
        self.per_device_batch_size = Batch.cut(self.global_batch_size, world_size, accumulate_grad_batches).per_device
        self._placed, self._accumulate = {"rank": rank, "world_size": world_size}, accumulate_grad_batches
        if self.augmentation.mixing and (self.views > 1 or self.target_kind not in ("class", "labels")):
            what = f"data.views={self.views}" if self.views > 1 else f"targets of the kind {self.target_kind}"
            raise UserError(f"augmentation.mixup_alpha and cutmix_alpha cannot mix {what}: give both 0.")
        if self._pipeline is not None and self._mask_names:
            blank = np.zeros((self.resize, self.resize), np.uint8)
            try:
                self._pipeline((Image.fromarray(blank), *as_masks([blank])))
            except TypeError as error:
                hint = "take augmentation=crop_flip or resized_crop"
                raise UserError(f"This augmentation cannot move masks ({error}): {hint}.") from None
        self._device = torch.device(device)
        flips = self._crop_flip is not None and self._crop_flip.flips(self.framing)
        self._transforms = BatchTransforms(replace(self.framing, flip=flips), self.std, self._device)
        is_small = sum(each.nbytes for each in self._pixels) <= self.device_array_gib * 2**30
        self._arrays: list[Tensor] | None = None
        if self.path_taken()[0] == "array" and (is_small or self._device.type == "cpu"):
            self._arrays = [torch.from_numpy(each).to(self._device) for each in self._pixels]

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
        if self.augmentation.mixing and self.per_device_batch_size % 2:
            sizes = f"data.global_batch_size={self.global_batch_size} gives each device {self.per_device_batch_size}"
            pairs = "augmentation.mixup_alpha and cutmix_alpha mix images in pairs"
            raise UserError(f"{pairs}, and {sizes} at a time: choose one that makes this number even.")
        return TrainBatches(
            partial(self._batches, pipeline=self._pipeline), self.splits.train, self._draw,
            global_batch_size=self.global_batch_size, accumulate_grad_batches=self._accumulate, seed=self.seed,
            fixed=bool(getattr(self.trainer, "overfit_batches", 0)), **self._placed,
        )  # fmt: skip

    def _draw(self, seed: int, epoch: int, n: int) -> tuple[np.ndarray, np.ndarray | None]:
        """Draw what decides the pixels of an epoch: crop starts and flips, or a seed for each image; and mixing."""
        stream, mixing = random_stream(seed, AUGMENTATION, epoch), self.augmentation.mixing
        if self._crop_flip is None:
            draws = stream.integers(0, 2**63 - 1, (self.views, n))
        else:
            views = [self._transforms.draw(stream, n, self._crop_flip.random_crop) for _ in range(self.views)]
            draws = np.concatenate(views)
        if mixing is None or (mixing.epochs is not None and epoch >= mixing.epochs):
            return draws, None
        return draws, mixing.draw(random_stream(seed, MIXING, epoch), n // 2, self.image_size)

    def val_dataloader(self) -> EvalBatches:
        self.setup()
        return self._eval_batches(self.splits.val, **self._placed)

    def test_dataloader(self) -> EvalBatches:
        self.setup()
        return self._eval_batches(self.splits.test, **self._placed)

    def _eval_batches(self, index: np.ndarray, **placed: int) -> EvalBatches:
        return EvalBatches(self._batches, index, self._transforms.centre(), batch_size=self.eval_batch_size, **placed)

    def sample_images(self, count: int) -> Tensor:
        """Return the first training images, not augmented: (count, channels, image_size, image_size) on the CPU."""
        self.setup()
        batches = self._eval_batches(self.splits.train[:count])
        return torch.cat([self.on_after_batch_transfer(batch, 0)[0].cpu() for batch in batches])

    def _batches(self, selections: Iterable[Selection], pipeline: Operation | None = None) -> Iterator[LoadedBatch]:
        """Yield batches on the device; with a pipeline workers augment single images, else the device crops them."""
        batches = self._made(selections, pipeline)
        return prefetched(batches, self._device) if self._device.type == "cuda" else batches

    def _made(self, selections: Iterable[Selection], pipeline: Operation | None) -> Iterator[LoadedBatch]:
        if self._arrays is None or pipeline is not None:
            samples = Samples(self.sample_opener(), self.framing, pipeline, workers_of(self.num_workers, self._device))
            found = stream(samples, selections, pin_memory=self._device.type == "cuda")
        else:
            found = ((each, {"index": torch.from_numpy(each.positions)}) for each in selections)
        for selection, batch in found:
            targets = {name: values[selection.positions] for name, values in self._targets.items()}
            batch["targets"] = {name: torch.from_numpy(values) for name, values in targets.items()}
            if pipeline is None:
                batch["draws"] = torch.from_numpy(selection.draws)
            if selection.mixing is not None:
                batch["mixing"] = torch.from_numpy(selection.mixing)
            yield batch

    def on_after_batch_transfer(self, batch: LoadedBatch, dataloader_idx: int) -> tuple[Tensor, Any]:
        """Return images and targets; mixed images have shares of classes, (n, num_classes) float."""
        pixels = batch["pixels"] if "pixels" in batch else [take(each, batch["index"]) for each in self._arrays or ()]
        if "draws" in batch:
            modes = [self.framing.interpolation, *("nearest" for _ in self._mask_names)]
            pixels = [self._transforms.moved(each, batch["draws"], mode) for each, mode in zip(pixels, modes)]
        images, masks = self._transforms.normalise(pixels[0]), [each[..., 0].long() for each in pixels[1:]]
        masks = [torch.where(mask == VOID, -1, mask) for mask in masks]
        by_name = {**batch["targets"], **dict(zip(self._mask_names, masks, strict=True))}
        targets: Any = by_name[""] if list(by_name) == [""] else by_name
        if "mixing" in batch:
            images, targets = mix(images, targets, batch["mixing"], self.num_classes)
        if self.trainer is not None:  # float64 and half of the "true" precisions; whole numbers stay
            images, targets = self.trainer.precision_plugin.convert_input((images, targets))
        return images, targets

    def sample_opener(self) -> OpenSample:
        """Return what opens a single image and its masks in a worker process."""
        return partial(_sample_of_arrays, *self._pixels)


def _sample_of_arrays(images: np.ndarray, *rest: Any) -> tuple[Any, ...]:
    *masks, position = rest
    pixels = images[position]
    image = Image.fromarray(pixels.squeeze(2) if pixels.shape[2] == 1 else pixels)
    return image, *as_masks([mask[position, ..., 0] for mask in masks])
