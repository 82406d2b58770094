"""The base of all image data modules. It is composed of a source, splits, framing and batches.

Images take one of two paths. `array`: all images are decoded into one array, which lies on the
training device if it fits. `loader`: worker processes read each image when it is needed.

On both paths the crop, the flip and the augmentation of an image depend only on (seed, epoch,
position). On the array path the device resizes the images of an ImageSet. Then a pixel may differ
by one step of 255 between the paths.
"""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningDataModule
from PIL import Image
from torch import Tensor

from lockstep.data.augmentation import Augmentation, CropFlip
from lockstep.data.batches import EvalBatches, TrainBatches
from lockstep.data.content_hash import HASH_METHOD, add_drawn_test
from lockstep.data.framing import Framing, resolve_resize
from lockstep.data.listing import SPLITS, TEST, LeftOut
from lockstep.data.making import BatchMaker, LoadedBatch
from lockstep.data.normalisation import resolve_normalisation
from lockstep.data.sampling import Sampling, check_sampling, describe_sampling, make_sampling
from lockstep.data.source import ImageSet, Source
from lockstep.data.split import VAL_FRACTION, SplitRule, Splits
from lockstep.data.targets import compute_scale, to_masks
from lockstep.process.errors import UserError
from lockstep.process.project import REPOSITORY
from lockstep.records.batch import DEFAULT_EVAL_BATCH_SIZE, DEFAULT_GLOBAL_BATCH_SIZE, Batch

# The stage of check_data.py, which lists all images that cannot be used.
CHECK = "check"


@dataclass(kw_only=True)
class ImageOptions:
    """The options of every data module of images.

    Args:
        name: the name of the cache folder, shown in the logbook; None: from the class.
        global_batch_size: images in one optimizer step, over all devices and accumulation steps.
        eval_batch_size: per device, at most.
        image_size, resize, crop_padding, flip: see Framing. resize=None is image_size / crop_pct.
        crop_pct, interpolation, mean, std: see `resolve_normalisation`.
        val_fraction, num_val, fold, num_folds: see SplitRule.
        cache_dir: the folder of decoded images and downloads, one per node.
        path: array, loader, or auto, which is array if the images fit.
        num_workers: processes per rank that load single images; "auto": by cores and device.
        views: how often each training image is augmented.
        inputs: the columns of numbers that a batch has beside each image.
        sampling: with balanced each class is drawn equally often, with sqrt in proportion to the
            root of its number of images. Any other name is a column of weights. None: each
            training image once.
        epoch_size: images of an epoch; None: all training images.

    Raises:
        UserError: a value is out of its range.
    """

    image_size: int
    name: str | None = None
    global_batch_size: int = DEFAULT_GLOBAL_BATCH_SIZE
    eval_batch_size: int = DEFAULT_EVAL_BATCH_SIZE
    resize: int | None = None
    crop_pct: float | str = "auto"
    interpolation: str = "auto"
    crop_padding: int = 0
    flip: bool = False
    mean: float | Sequence[float] | str | None = None
    std: float | Sequence[float] | str | None = None
    val_fraction: float = VAL_FRACTION
    num_val: int | None = None
    fold: int | None = None
    num_folds: int | None = None
    cache_dir: str | Path = REPOSITORY / "data" / "cache"
    path: str = "auto"
    num_workers: int | str = "auto"
    views: int = 1
    seed: int = 0
    inputs: Sequence[str] = ()
    sampling: str | None = None
    epoch_size: int | None = None

    def __post_init__(self) -> None:
        self._check_name()
        self._check_numbers()
        self._check_loading()
        if isinstance(self.inputs, str):
            raise UserError(f"data.inputs={self.inputs}: give a list, data.inputs=[{self.inputs}].")
        self.inputs = [str(name) for name in self.inputs or ()]

    def _check_name(self) -> None:
        name = self.name or "images"
        if Path(name).name != name or name.startswith("."):
            raise UserError(
                f"data.name={name!r} names a cache folder: give a name without slashes."
            )

    def _check_numbers(self) -> None:
        for key in ("views", "eval_batch_size"):
            if getattr(self, key) < 1:
                raise UserError(f"data.{key}={getattr(self, key)} must be at least 1.")
        if self.epoch_size is not None and self.epoch_size < 1:
            raise UserError(f"data.epoch_size={self.epoch_size} must be at least 1, or null.")
        if self.seed < 0:
            raise UserError(f"seed={self.seed} must be at least 0.")

    def _check_loading(self) -> None:
        workers = self.num_workers
        if workers != "auto" and (isinstance(workers, str) or workers < 0):
            raise UserError(f"data.num_workers={workers} must be auto or at least 0.")
        if self.path not in ("auto", "array", "loader"):
            raise UserError(f"data.path={self.path} must be one of auto, array, loader.")


class ImageDataModule(LightningDataModule):
    """Square images with their targets. A subclass returns them from `read`.

    It works in a plain Trainer. `prepare` sets the attributes source, splits, class_names,
    num_classes, num_train, num_val, num_test, data_hash, left_out, and target_kind: class, labels,
    number, mask or dict.

    A batch is (images, targets).

    - Images are (n, channels, image_size, image_size) floats. In a training with several views they
      are (n, views, channels, image_size, image_size).
    - Targets are (n,) int64 classes, (n, C) float32 labels, (n,) float32 numbers, masks, or a dict
      of these. Masks are (n, image_size, image_size) int64, −1 where a pixel does not count.
    - With data.inputs a batch is ((images, inputs), targets). Inputs are standardised numbers by
      name, (n,) float32.

    Args:
        options: see ImageOptions.
    """

    channels = 3
    fit = "crop"
    # The method of data_hash. Data with the same hash by the same method are equal.
    hash_method = HASH_METHOD
    own_mean: Sequence[float] = (0.5,)
    own_std: Sequence[float] = (0.5,)
    # fit, CHECK, or test for an evaluation, which needs no training images. It is set before
    # `prepare`.
    stage = "fit"
    # Single images are floats, because they have more than 8 bits or other channels than pictures.
    has_float_pixels = False
    # A phrase for the log and the page on the bits of the images, their black and their white.
    depth_note = ""
    # Arrays up to this size are kept on a GPU. From larger ones workers read single images.
    device_array_gib = 4.0
    source: Source

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = values = ImageOptions(**options)
        class_name = type(self).__name__.removesuffix("DataModule")
        self.name: str = values.name or class_name.lower()
        self.image_size = values.image_size
        self.global_batch_size = values.global_batch_size
        self.cache_dir = Path(values.cache_dir)
        self.split_rule = SplitRule(
            values.seed, values.val_fraction, values.num_val, values.fold, values.num_folds
        )
        self.data_hash = ""
        # Sentences of check_data.py on images that are listed and cannot be used.
        self.faults: list[str] = []
        # A phrase for the log and the page on the groups that stay in one split.
        self.groups_note = ""
        # A phrase on how the images of an epoch are drawn; "": each image is taken once.
        self.sampling_note = ""
        self.sampling: Sampling | None = None
        # Mean and deviation of each number beside the images, over the training images.
        self.inputs: dict[str, list[float]] = {}
        # The arguments rank and world_size of the loaders; {} before attach_to_ranks.
        self._ranks: dict[str, int] = {}
        self._is_prepared = False
        self.set_augmentation()

    def set_augmentation(
        self,
        augmentation: Augmentation | None = None,
        weight_settings: Mapping[str, Any] | None = None,
    ) -> None:
        """Set the augmentation and the values of pretrained weights; call it before `prepare`.

        Args:
            augmentation: what training does to the images; None: crop and flip.
            weight_settings: mean, std, crop_pct and interpolation of the pretrained weights, for
                options that are auto.

        Raises:
            UserError: values contradict each other.
        """
        self.augmentation = augmentation or CropFlip()
        self._weight_settings = dict(weight_settings or {})
        self._set_framing()

    def _set_framing(self) -> None:
        """Resolve normalisation and framing, and make the operations on single images."""
        options = self.options
        names = ("mean", "std", "crop_pct", "interpolation")
        weight_settings = self._weight_settings
        if self.has_float_pixels:
            # Mean and deviation of the weights are those of photographs.
            weight_settings = {
                key: weight_settings[key] for key in weight_settings if key not in ("mean", "std")
            }
        self.normalisation = resolve_normalisation(
            {name: getattr(options, name) for name in names},
            {"mean": self.own_mean, "std": self.own_std},
            weight_settings,
            self.channels,
        )
        self.mean = self.normalisation.mean
        self.std = self.normalisation.std
        self.framing = Framing(
            image_size=self.image_size,
            resize=resolve_resize(self.image_size, options.resize, self.normalisation.crop_pct),
            fit=self.fit,
            interpolation=self.normalisation.interpolation,
            crop_padding=options.crop_padding,
            flip=options.flip,
            channels=self.channels,
            mean=tuple(self.mean),
            has_float_pixels=self.has_float_pixels,
        )
        # Operations on single images; None: the device augments whole batches.
        self._pipeline = None
        if not self.augmentation.is_of_batches:
            self._pipeline = self.augmentation.pipeline(self.framing)

    def read(self) -> ImageSet:
        """Return all images; every process calls it."""
        raise NotImplementedError

    def open_source(self) -> Source:
        """Return the source of the images, before any is decoded. Every process calls it."""
        return self.read()

    def decode_source(self) -> None:
        """Read all images, if that is needed before the first batch."""

    def prepare(self) -> None:
        """Load or list the images and assign the splits. Every rank calls it.

        Raises:
            UserError: the source is missing or damaged, or does not fit the options.
        """
        if self._is_prepared:
            return
        self.source = self.open_source()
        if self.stage != "test":
            check_sampling(self.options.sampling, self.source)
        self.data_hash = self.source.hash()
        self._check_inputs()
        self._set_splits(self._assign_splits())
        self.decode_source()
        self._set_inputs()
        if self.splits.drew_test:
            self.data_hash = add_drawn_test(self.data_hash, self.splits.test)
        if self.source.groups is not None:
            self.groups_note = self._describe_groups(self.source.groups)
        if self.stage != "test":
            self._set_sampling()
            self._check_training_images()
        # A notebook may call this again after an error.
        self._is_prepared = True

    def _assign_splits(self) -> Splits:
        """Return the splits.

        If they cannot be drawn, an evaluation tests the images that the source has for it, or all.
        """
        source = self.source
        try:
            return self.split_rule.assign(source.classes, source.split_ids, source.groups)
        except UserError:
            if self.stage != "test":
                raise
            if (source.split_ids == TEST).any():
                return Splits(source.split_ids)
            return Splits(np.full_like(source.split_ids, TEST), drew_test=True)

    def _describe_groups(self, groups: np.ndarray) -> str:
        """Return "patient_id: 30 groups, 24 to train, 3 to validate, 3 to test"."""
        counts = [len(np.unique(groups[getattr(self.splits, name)])) for name in SPLITS]
        return (
            f"{getattr(self, 'group', None) or 'groups'}: {len(np.unique(groups))} groups, "
            f"{counts[0]} to train, {counts[1]} to validate, {counts[2]} to test"
        )

    def _set_splits(self, splits: Splits) -> None:
        self.splits = splits
        self.num_train = len(splits.train)
        self.num_val = len(splits.val)
        self.num_test = len(splits.test)

    def _check_inputs(self) -> None:
        for name in self.options.inputs:
            if name not in self.source.columns:
                raise UserError(
                    f"data.inputs: {self.name} has no column {name}. Numbers beside images are of "
                    "data=csv and data=parquet; leave data.inputs out."
                )

    def _set_inputs(self) -> None:
        """Set mean and deviation of the numbers beside the images, over the training images."""
        for name in self.options.inputs:
            numbers = self.source.columns[name][self.splits.train]
            self.inputs[name] = list(compute_scale(numbers).values()) or [0.0, 1.0]

    def _standardise_inputs(self) -> dict[str, np.ndarray]:
        """Return the standardised numbers beside the images, (n,) float32 by name."""
        inputs = {}
        for name, (mean, std) in self.inputs.items():
            inputs[name] = ((self.source.columns[name] - mean) / std).astype(np.float32)
        return inputs

    def _set_sampling(self) -> None:
        """Set how the images of an epoch are drawn."""
        if not self.num_train:
            raise UserError(
                f"{self.name} has no images to train on: all are for validation or test."
            )
        options = self.options
        self.sampling = make_sampling(
            options.sampling, options.epoch_size, self.source, self.splits.train
        )
        if not 1 <= self.global_batch_size <= self.epoch_size:
            images = f"{self.name} has {self.num_train} training images"
            if options.epoch_size is not None:
                images = f"an epoch has {self.epoch_size} images"
            raise UserError(
                f"data.global_batch_size={self.global_batch_size}, but {images}: give a size from "
                f"1 to {self.epoch_size}."
            )
        if self.sampling is not None:
            count = self.steps_per_epoch * self.global_batch_size
            self.sampling_note = describe_sampling(
                options.sampling, self.sampling, count, self.source
            )

    def _check_training_images(self) -> None:
        for name, *counts in zip(self.class_names, *self.counts_per_split.values()):
            if counts[0]:
                continue
            if self.target_kind == "class":
                raise UserError(
                    f"{self.name}: the class {name} has no image to train on; all of its "
                    "images are for validation or test. Add some, or remove the class."
                )
            if any(counts):
                self.warnings.append(
                    f"No training image has the label {name}, which occurs in validation or test. "
                    f"Move images of {name} to train, or leave it out of data.label_columns."
                )

    @property
    def class_names(self) -> list[str]:
        return self.source.class_names

    @property
    def num_classes(self) -> int:
        return len(self.class_names) or 1

    @property
    def epoch_size(self) -> int:
        """The number of images of an epoch. The last incomplete batch is dropped."""
        return self.options.epoch_size or self.num_train

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps of an epoch."""
        return self.epoch_size // self.global_batch_size

    @property
    def target_kind(self) -> str:
        return self.source.target_kind

    @property
    def left_out(self) -> LeftOut:
        return self.source.left_out

    @property
    def warnings(self) -> list[str]:
        """Sentences for the log."""
        return self.source.warnings

    @property
    def list_hash(self) -> str:
        return self.source.list_hash

    @property
    def counts_per_split(self) -> dict[str, list[int]]:
        """Return the number of images of each class or label in each split.

        The lists are empty for other targets.
        """
        counts: dict[str, list[int]] = {name: [] for name in SPLITS}
        if self.target_kind not in ("class", "labels"):
            return counts
        for name in SPLITS:
            classes = self.source.targets[""][getattr(self.splits, name)]
            if classes.ndim > 1:
                classes = np.nonzero(classes > 0)[1]
            counts[name] = np.bincount(classes, minlength=self.num_classes).tolist()
        return counts

    @property
    def class_counts(self) -> list[int]:
        """Training images of each class, before augmentation."""
        return self.counts_per_split["train"]

    @property
    def target_scale(self) -> dict[str, float]:
        """Mean and deviation of the training targets; empty if they are no numbers."""
        if self.target_kind != "number":
            return {}
        return compute_scale(self.source.targets[""][self.splits.train])

    def match_classes(self, class_names: Sequence[str]) -> None:
        """Number the labels as a checkpoint does; call it between `prepare` and `attach_to_ranks`.

        Args:
            class_names: the checkpoint's classes, of which the images may lack some.

        Raises:
            UserError: the images have a class that the checkpoint does not know.
        """
        self.source.match_classes(class_names, self.name)

    def test_on_all(self) -> None:
        """Test on all images; call it between `prepare` and `attach_to_ranks`."""
        self._set_splits(Splits(np.full_like(self.source.split_ids, TEST)))

    def choose_path(self) -> tuple[str, str]:
        """Return array or loader, and why; after `prepare`."""
        path = self.options.path
        if path == "auto":
            return "array", "they fit in memory"
        return path, f"data.path={path}"

    def refuse_labels_outside(self, low: float, high: float) -> None:
        """Refuse labels that are not from `low` to `high`, if an image has several labels.

        Raises:
            UserError: a label lies outside. The error names the image.
        """
        if self.target_kind != "labels":
            return
        labels = self.source.targets[""]
        images, columns = np.nonzero((labels < low) | (labels > high))
        if not len(images):
            return
        value = labels[images[0], columns[0]]
        name = self.class_names[columns[0]] if self.class_names else columns[0]
        raise UserError(
            f"{self.source.location(int(images[0]))}: the label {name} is {value:g}, and labels "
            f"are from {low:g} to {high:g}. If {value:g} means that it is not known, give "
            f"data.unknown={value:g}."
        )

    def attach_to_ranks(
        self,
        *,
        rank: int = 0,
        world_size: int = 1,
        accumulate_grad_batches: int = 1,
        device: torch.device | str = "cpu",
    ) -> None:
        """Set the rank of this process and the device of its batches. It may be called again.

        Raises:
            UserError: the global batch does not divide evenly, or the augmentation does not fit
                the targets or the views.
        """
        self.prepare()
        batch = Batch.cut(self.global_batch_size, world_size, accumulate_grad_batches)
        self.per_device_batch_size = batch.per_device
        self._ranks = {"rank": rank, "world_size": world_size}
        self._accumulate = accumulate_grad_batches
        self._check_mixing()
        self._check_that_masks_move()

        device = torch.device(device)
        gib = sum(array.nbytes for array in self.source.pixels) / 2**30
        fits = device.type == "cpu" or gib <= self.device_array_gib
        self._maker = BatchMaker(
            self.source,
            self.framing,
            self.std,
            self.augmentation,
            self._pipeline,
            device,
            keep_on_device=fits and self.choose_path()[0] == "array",
            num_workers=self.options.num_workers,
            views=self.options.views,
            inputs=self._standardise_inputs(),
        )

    def _check_mixing(self) -> None:
        views = self.options.views
        if not self.augmentation.mixing:
            return
        if self.inputs:
            raise UserError(
                "augmentation.mixup_alpha and cutmix_alpha cannot mix the numbers of data.inputs: "
                "give both 0."
            )
        if views > 1 or self.target_kind not in ("class", "labels"):
            refused = f"targets of the kind {self.target_kind}"
            if views > 1:
                refused = f"data.views={views}"
            raise UserError(
                f"augmentation.mixup_alpha and cutmix_alpha cannot mix {refused}: give both 0."
            )

    def _check_that_masks_move(self) -> None:
        if self._pipeline is None or not self.source.mask_names:
            return
        blank = np.zeros((self.framing.resize, self.framing.resize), np.uint8)
        try:
            self._pipeline((Image.fromarray(blank), *to_masks([blank])))
        except TypeError as error:
            hint = "take augmentation=crop_flip or resized_crop"
            raise UserError(f"This augmentation cannot move masks ({error}): {hint}.") from None

    def setup(self, stage: str | None = None) -> None:
        trainer = self.trainer
        if self._ranks:
            return
        if trainer is None:
            # In a notebook this is the only process.
            self.attach_to_ranks()
            return
        self.attach_to_ranks(
            rank=trainer.global_rank,
            world_size=trainer.world_size,
            accumulate_grad_batches=trainer.accumulate_grad_batches,
            device=trainer.strategy.root_device,
        )

    def train_dataloader(self) -> TrainBatches:
        """Return the loader of this rank's training batches.

        Raises:
            UserError: images are mixed in pairs, and a device gets an odd number at a time.
        """
        self.setup()
        if self.augmentation.mixing and self.per_device_batch_size % 2:
            raise UserError(
                "augmentation.mixup_alpha and cutmix_alpha mix images in pairs, and "
                f"data.global_batch_size={self.global_batch_size} gives each device "
                f"{self.per_device_batch_size} at a time: choose one that makes this number even."
            )
        return TrainBatches(
            self._maker.make_train_batches,
            self.splits.train,
            self._maker.draw,
            global_batch_size=self.global_batch_size,
            accumulate_grad_batches=self._accumulate,
            seed=self.options.seed,
            sampling=self.sampling,
            repeats_first_epoch=bool(getattr(self.trainer, "overfit_batches", 0)),
            **self._ranks,
        )

    def val_dataloader(self) -> EvalBatches:
        self.setup()
        return self._make_eval_batches(self.splits.val, **self._ranks)

    def test_dataloader(self) -> EvalBatches:
        self.setup()
        return self._make_eval_batches(self.splits.test, **self._ranks)

    def _make_eval_batches(self, index: np.ndarray, **ranks: int) -> EvalBatches:
        maker = self._maker
        size = self.options.eval_batch_size
        return EvalBatches(
            maker.make_eval_batches, index, maker.centre_crop, batch_size=size, **ranks
        )

    def sample_images(self, count: int) -> Tensor:
        """Return the first training images, not augmented, on the CPU.

        Returns:
            (count, channels, image_size, image_size)
        """
        self.setup()
        images = []
        for batch in self._make_eval_batches(self.splits.train[:count]):
            inputs = self.on_after_batch_transfer(batch, 0)[0]
            images.append((inputs[0] if self.inputs else inputs).cpu())
        return torch.cat(images)

    def on_after_batch_transfer(self, batch: LoadedBatch, dataloader_idx: int) -> tuple[Any, Any]:
        """Return images and targets. The targets of mixed images are shares of the classes."""
        images_and_targets = self._maker.to_images_and_targets(batch)
        if self.trainer is None:
            return images_and_targets
        # The precisions with "true" convert floats to float64 or half. Whole numbers stay.
        return self.trainer.precision_plugin.convert_input(images_and_targets)


# help() and the check of configs read the names of the options from this signature.
ImageDataModule.__init__.__signature__ = inspect.signature(ImageOptions.__init__)  # type: ignore
