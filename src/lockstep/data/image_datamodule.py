"""The base of all data modules: facts, split, a per-node image array, loaders, and batches made on the device.

Images take one of two paths. `array`: all lie decoded in one array on the training device. `loader`: workers fetch each
when it is needed. Evaluation, and an augmentation of whole batches, then work on the device; an augmentation of single
images works in the workers, which read from the files or from the array. The path never changes a pixel.
"""

import inspect
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch import LightningDataModule
from torch import Tensor

from lockstep.data.augmentation import Augmentation, CropFlip, Operation
from lockstep.data.batch_transforms import BatchTransforms
from lockstep.data.batches import EvalBatches, TrainBatches
from lockstep.data.delivery import Delivery, Loaded
from lockstep.data.framing import Framing, resize_of
from lockstep.data.image_array import ImageArray, Layout
from lockstep.data.image_set import IMAGES, LABELS, ImageSet, fingerprint
from lockstep.data.image_source import InArray, Source
from lockstep.data.mixing import check_pairs, mix
from lockstep.data.node_cache import Content, cached
from lockstep.data.settings import settle
from lockstep.data.split import VAL_FRACTION, Split
from lockstep.runs.batch import DEFAULT_EVAL_BATCH_SIZE, DEFAULT_GLOBAL_BATCH_SIZE, Batch
from lockstep.runs.errors import UserError
from lockstep.runs.files import sha256_of
from lockstep.runs.provenance import REPOSITORY

CACHE_VERSION = 3
PATHS = ("auto", "array", "loader")


class ImageDataModule(LightningDataModule):
    """Labelled square images; a subclass says where they come from (`identity`, `read`).

    Order of calls: prepare() on every rank, place(...), then Lightning's hooks; `setup` makes up for what was left out.

    Args:
        name: display name, and the name of its cache folder.
        image_size: side of the images that the model gets.
        global_batch_size: images in one optimizer step, over all devices and accumulation steps.
        eval_batch_size: per device, at most.
        resize: side that images are resized to before the crop to image_size; None: image_size / crop_pct.
        crop_pct: share of the resized side that evaluation shows; auto: of the pretrained weights, else 1.
        interpolation: bilinear, bicubic, or auto: of the pretrained weights, else bilinear.
        crop_padding: black border in pixels that random training crops may reach into.
        flip: mirror half of the training images.
        mean: of pixels from 0 to 1, a number or one per channel; None: the data set's own; auto: of the pretrained
            weights, else the data set's own.
        std: likewise.
        path: array, loader, or auto: array where the images fit and its pixels are the same.
        num_workers: processes per rank that make images ready one by one, at most one per core.
        val_fraction: part of the training set that becomes the validation set, drawn from the seed; 0: no validation.
        num_val: the same as a count; goes before val_fraction.
        fold: in place of the two, the part of the training set that becomes the validation set, of `num_folds` parts.
        cache_dir: where the image arrays lie, one folder per source and size.
        device_cache_gib: on a GPU: the largest array that is kept on it.
        seed: of split, order and augmentation.
    """

    name: str
    channels = 3
    fit = "crop"  # of images that are no squares: framing.py
    own_mean: Sequence[float] = (0.5,)
    own_std: Sequence[float] = (0.5,)
    own_options: Mapping[
        str, Any
    ] = {}  # of the config, those that this class does not know: what `read` gives may change
    stage = "fit"  # test: for an evaluation, which needs no training images; set before `prepare`
    test_is_drawn = False  # the test images are a random part of the images

    def __init__(
        self,
        *,
        name: str,
        image_size: int,
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
        num_workers: int = 4,
        device_cache_gib: float = 4.0,
        seed: int = 0,
    ) -> None:
        super().__init__()
        if not isinstance(name, str) or Path(name).name != name or name.startswith("."):
            raise UserError(f"data.name={name!r} names a cache folder: give a plain name.")
        if seed < 0:
            raise UserError(f"seed={seed} must not be negative.")
        self.name, self.image_size, self.seed = name, image_size, seed
        self.global_batch_size, self.eval_batch_size = global_batch_size, eval_batch_size
        self.split = Split(seed, val_fraction, num_val, fold, num_folds)
        self.cache_dir = Path(cache_dir)
        self.device_cache_gib = device_cache_gib
        if path not in PATHS:
            raise UserError(f"data.path={path} must be one of {', '.join(PATHS)}.")
        if num_workers < 0:
            raise UserError(f"data.num_workers={num_workers} must not be negative.")
        self.requested_path, self.num_workers = path, num_workers
        self.stated = {"mean": mean, "std": std, "crop_pct": crop_pct, "interpolation": interpolation}
        self.requested_resize, self.crop_padding, self.flip = resize, crop_padding, flip
        self.use()
        self._meta: Content = {}  # empty: not prepared yet
        self._placed: dict[str, int] = {}  # empty: not placed yet

    def use(self, augmentation: Augmentation | None = None, wanted: Mapping[str, Any] | None = None) -> None:
        """Before `prepare`: what training does to the images, and what pretrained weights want of them.

        Args:
            augmentation: None: crop and flip.
            wanted: mean, std, crop_pct and interpolation, for what is stated as auto.
        Raises:
            UserError: values contradict each other.
        """
        own = {"mean": self.own_mean, "std": self.own_std}
        self.settings = settle(self.stated, own, wanted or {}, self.channels)
        self.mean, self.std = self.settings.mean, self.settings.std
        self.resize = resize_of(self.image_size, self.requested_resize, self.settings.crop_pct)
        self.framing = Framing(
            image_size=self.image_size,
            resize=self.resize,
            fit=self.fit,
            interpolation=self.settings.interpolation,
            crop_padding=self.crop_padding,
            flip=self.flip,
            channels=self.channels,
            mean=tuple(self.mean),
        )
        self.augmentation = augmentation or CropFlip()
        self._crop_flip: CropFlip | None = None  # where the device does it all; else the pipeline of one image
        self._pipeline: Operation | None = None
        if isinstance(self.augmentation, CropFlip) and self.augmentation.on_whole_batches:
            self._crop_flip = self.augmentation
        else:
            self._pipeline = self.augmentation.pipeline(self.framing)

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
        options = [CACHE_VERSION, type(self).__name__, self.resize, self.image_size, *self._cut_from_array()]
        own = [code_of(type(self)), self.own_options]
        self._cache = self.cache_dir / f"{self.name}-{fingerprint([*options, *own, self.identity()])[:16]}"
        self._meta = cached(self._cache, self._build)
        self._labels = np.load(self._cache / LABELS)
        self._read_facts(self._meta)

    def _read_facts(self, meta: Content, fit: np.ndarray | None = None) -> None:
        """
        Args:
            fit: (num_fit,) positions of the images to train and validate on; None: the first ones.
        """
        self.class_names: list[str] = meta["class_names"]
        self.num_classes = len(self.class_names)
        self.data_hash: str = meta["data_hash"]
        self.skipped: list[str] = meta["skipped"]
        num_fit, num_val, num_test = meta["num_fit"], meta["num_val"], meta["num_test"]
        fit = np.arange(num_fit) if fit is None else fit
        if not num_fit:
            self._train_index, self._val_index = fit, num_fit + np.arange(num_val)
        elif num_val:
            self.split.refuse_folds(self.name)
            own = num_fit + np.arange(num_val)
            self._train_index, self._val_index = fit, own[:0] if self.split.never_validates else own
        else:
            self._train_index, self._val_index = (fit[part] for part in self.split.of(self._labels[fit]))
        self._test_index = num_fit + num_val + np.arange(num_test)
        self.num_train, self.num_val, self.num_test = len(self._train_index), len(self._val_index), num_test
        self._check_batch_sizes()

    def _check_batch_sizes(self) -> None:
        if self.stage != "test" and not 1 <= self.global_batch_size <= self.num_train:
            raise UserError(
                f"data.global_batch_size={self.global_batch_size}, but {self.name} has {self.num_train} training "
                f"images: take a size from 1 to {self.num_train}."
            )
        if self.eval_batch_size < 1:
            raise UserError(f"data.eval_batch_size={self.eval_batch_size} must be at least 1.")

    def match_classes(self, class_names: Sequence[str]) -> None:
        """Number the labels as a checkpoint does; call it before `place`.

        Args:
            class_names: those of the checkpoint; the data may lack some of them.
        Raises:
            UserError: the data have a class that the checkpoint does not know.
        """
        unknown = [name for name in self.class_names if name not in class_names]
        if unknown:
            raise UserError(
                f"{self.name} has the class {unknown[0]}, which the checkpoint does not know; it knows "
                f"{', '.join(class_names[:20])}. Rename the class or remove its images."
            )
        numbers = np.array([class_names.index(name) for name in self.class_names], np.int64)
        self._labels = numbers[self._labels]
        self.class_names, self.num_classes = list(class_names), len(class_names)

    def test_on_all(self) -> None:
        """Test on all images; call it before `place`."""
        self._test_index, self._train_index, self._val_index = np.arange(len(self._labels)), *np.zeros((2, 0), int)
        self.num_train, self.num_val, self.num_test = 0, 0, len(self._test_index)

    @property
    def num_images(self) -> int:
        """All images, whatever their split."""
        return len(self._labels)

    @property
    def left_out_per_epoch(self) -> int:
        """Training images that no complete global batch holds, another part of them in each epoch."""
        return self.num_train % self.global_batch_size

    @property
    def class_counts(self) -> list[int]:
        """Training images of each class, before augmentation."""
        return np.bincount(self._labels[self._train_index], minlength=self.num_classes).tolist()

    def _build(self, part: Path) -> Content:
        images = self.read(part)
        images.check(self.name, needs_training=self.stage != "test")
        transforms = self._transforms(images.images.shape[1])
        layout = images.layout(transforms.array_padding, mirrored=transforms.flip)
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

    def _cut_from_array(self) -> tuple[int, bool]:
        """The border and the flips that whole batches need; none where images are augmented one by one."""
        if self._crop_flip is None:
            return 0, False
        return self.crop_padding if self._crop_flip.random_crop else 0, self._crop_flip.flips(self.framing)

    def _transforms(self, stored_size: int) -> BatchTransforms:
        crop_padding, flip = self._cut_from_array()
        return BatchTransforms(
            stored_size=stored_size,
            image_size=self.image_size,
            resize=self.resize,
            crop_padding=crop_padding,
            flip=flip,
            mean=self.mean,
            std=self.std,
            interpolation=self.framing.interpolation,
        )

    def path_taken(self) -> tuple[str, str]:
        """array or loader, and why; after `prepare`."""
        if self.requested_path != "auto":
            return self.requested_path, f"data.path={self.requested_path}"
        return "array", "they fit in memory"

    def _layout(self) -> Layout:
        return Layout(**self._meta["layout"])

    def _image_source(self) -> Source:
        """Where loader workers find images."""
        return InArray(self._cache / IMAGES, self._layout())

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
        layout = self._layout()
        self._batch_transforms = self._transforms(layout.size).to(self._device)
        array, resident = self._open_array(layout)
        self._delivery = Delivery(
            self._batch_transforms,
            self.framing,
            self._labels,
            self._device,
            array=array,
            resident=resident,
            open_source=self._image_source,
            pipeline=self._pipeline,
            num_workers=self.num_workers,
        )

    def _open_array(self, layout: Layout) -> tuple[ImageArray | None, bool]:
        """All images, and whether they lie on the device; None on the loader's path."""
        if self.path_taken()[0] == "loader":
            return None, False
        array = ImageArray.open(self._cache / IMAGES, layout, self._batch_transforms.window_in(layout))
        resident = self._device.type == "cpu" or layout.num_bytes <= self.device_cache_gib * 2**30
        return (array.to(self._device) if resident else array), resident

    def setup(self, stage: str | None = None) -> None:
        if not self._placed and self.trainer is None:  # in a notebook, where nobody has called it
            self.place()
        elif not self._placed:
            trainer = self.trainer
            self.place(
                rank=trainer.global_rank,
                world_size=trainer.world_size,
                accumulate_grad_batches=trainer.accumulate_grad_batches,
                device=trainer.strategy.root_device,
            )

    # Loaders

    def train_dataloader(self) -> TrainBatches:
        """
        Raises:
            UserError: images are to be mixed in pairs, and the batch of a device is not even.
        """
        self.setup()
        if self.augmentation.mixing:
            check_pairs(self.per_device_batch_size, self.global_batch_size)
        return TrainBatches(
            self._delivery.one_by_one if self._pipeline else self._delivery.whole,
            self._train_index,
            self._draw,
            draw_mixing=self._draw_mixing if self.augmentation.mixing else None,
            global_batch_size=self.global_batch_size,
            accumulate_grad_batches=self._accumulate,
            seed=self.seed,
            fixed=bool(getattr(self.trainer, "overfit_batches", 0)),
            **self._placed,
        )

    def _draw(self, generator: np.random.Generator, n: int) -> np.ndarray:
        """What decides the pixels of n training images: crop starts and flips, or a seed for each."""
        if self._crop_flip is None:
            return generator.integers(0, 2**63 - 1, (1, n))
        draws = self._batch_transforms.draw(generator, n)
        if not self._crop_flip.random_crop:
            draws[:2] = self._batch_transforms.centre()[:2, None]
        return draws

    def _draw_mixing(self, generator: np.random.Generator, epoch: int, num_pairs: int) -> np.ndarray | None:
        mixing = self.augmentation.mixing
        if mixing is None or not mixing.is_on(epoch):
            return None
        return mixing.draw(generator, num_pairs, self.image_size)

    def val_dataloader(self) -> EvalBatches:
        self.setup()
        return self._eval_batches(self._val_index)

    def test_dataloader(self) -> EvalBatches:
        self.setup()
        return self._eval_batches(self._test_index)

    def _eval_batches(self, index: np.ndarray) -> EvalBatches:
        centre = self._batch_transforms.centre()
        return EvalBatches(self._delivery.whole, index, centre, batch_size=self.eval_batch_size, **self._placed)

    def sample_images(self, count: int) -> Tensor:
        """(count, channels, image_size, image_size) float, normalised, on the CPU: the first training images.

        Not augmented, and the same on every rank: for nets that look at data before they train.
        """
        centre, index = self._batch_transforms.centre(), self._train_index[:count]
        batches = EvalBatches(
            self._delivery.whole, index, centre, batch_size=self.eval_batch_size, rank=0, world_size=1
        )
        images = [self._delivery.images(move_data_to_device(batch, self._device)) for batch in batches]
        return torch.cat(images)[: len(index)].cpu()

    # Batches

    def on_after_batch_transfer(self, batch: Loaded, dataloader_idx: int) -> tuple[Tensor, Tensor]:
        """Images (n, channels, image_size, image_size) float, normalised, and labels (n,), −1 where not counted.

        Of mixed images the labels are soft: (n, num_classes) float.
        """
        images, labels = self._delivery.images(batch), batch["labels"]
        if "mixing" in batch:
            images, labels = mix(images, labels, batch["mixing"], self.num_classes)
        if self.trainer is not None:  # float64 and half of "true" precisions; whole numbers stay
            images, labels = self.trainer.precision_plugin.convert_input((images, labels))
        return images, labels


def code_of(module: type) -> list[str]:
    """Hashes of the files in which a data module of one's own is written: other code may read other images."""
    files = {}
    for owner in module.__mro__:
        if owner.__module__.partition(".")[0] not in ("lockstep", "lightning", "torch", "builtins"):
            with suppress(OSError, TypeError):  # typed in a notebook
                files[owner] = sha256_of(Path(inspect.getfile(owner)))
    return [*files.values()]
