"""Any torch Dataset that returns (image, target)."""

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from lockstep.data.content_hash import hash_of_arrays
from lockstep.data.decoding import in_8_bits
from lockstep.data.listed_datamodule import ListedDataModule
from lockstep.data.listing import SPLITS, ImageList, Item
from lockstep.data.loading import OpenSample
from lockstep.data.targets import (
    VOID,
    as_masks,
    classes_of_pixels,
    grey_levels_of,
    levels_in,
    mask_classes,
    note_on_levels,
)
from lockstep.process.errors import UserError

SAMPLED_ITEMS = 32  # whose images count in the hash of the data
Place = tuple[Any, int]  # a data set and the number of an item


class DatasetDataModule(ListedDataModule):
    """Images are Pillow images, arrays (height, width, channels) or tensors (channels, …).

    They are of bytes, or of floats from 0 to 1. Labels come from the data set's `targets` or
    `labels`, as torchvision names them, else from a look at every item; class names from its
    `classes`. Masks are Pillow images, or arrays or tensors (height, width).
    """

    target_choices = ("class", "number", "mask", "any")

    def __init__(
        self,
        *,
        dataset: Any = None,
        val_dataset: Any = None,
        test_dataset: Any = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        if not hasattr(dataset, "__getitem__"):
            raise UserError(
                "data=dataset needs data.dataset._target_=package.Class: a torch Dataset with "
                "items (image, target)."
            )
        if self.group:
            raise UserError(
                "data.group is of files and tables: give data.val_dataset and data.test_dataset."
            )
        self._datasets = (dataset, val_dataset, test_dataset)
        self._items: list[Place] = []
        self._has_grey_levels = False  # of masks whose classes have no names

    def list_images(self) -> ImageList:
        items: list[Item] = []
        for split, dataset in enumerate(self._datasets):
            if dataset is None:
                continue
            labels, classes = self._labels_of(dataset)
            titles = _titles(labels, classes, SPLITS[split])
            for i, title in enumerate(titles):
                items.append(Item(f"item {i} of the {SPLITS[split]} dataset", title, split))
                self._items.append((dataset, i))
        return ImageList(Path(), items)

    def _labels_of(self, dataset: Any) -> tuple[list[int], Any]:
        """Return the label of each item, and the names of the classes or None."""
        if self.target != "class":
            return [0] * len(dataset), None
        change = getattr(dataset, "target_transform", None)
        classes = getattr(dataset, "classes", None)
        labels = getattr(dataset, "targets", getattr(dataset, "labels", None))
        try:
            if labels is None:
                items = [_whole(dataset[i][1]) for i in range(len(dataset))]
                return items, None if change else classes
            if not change:
                return [_whole(label) for label in labels], classes
            plain = [_plain(label) for label in labels]
            changed = [_whole(change(label)) for label in plain]
            return changed, classes if changed == plain else None
        except (TypeError, ValueError) as error:
            raise UserError(
                f"data.dataset: a label of {type(dataset).__name__} is not an integer ({error}); "
                "data.target=any takes other targets."
            ) from None

    def _load(self) -> None:
        super()._load()
        self.list_hash = self.data_hash

    def _load_list(self) -> None:
        super()._load_list()
        # Whether images can be used is known before training.
        self.sample_opener()(0)
        if self.target != "class":
            self._read_targets()

    def _read_targets(self) -> None:
        """Read the targets of all items but their masks, which are read with their images."""
        mask_names = self._mask_names_of(*self._items[0])
        names = [name for name in _by_name(self._target(0)) if name not in mask_names]
        arrays = {}
        if names:
            columns = self._columns(names)
            arrays = {name: self._array(name, values) for name, values in columns.items()}
        self._set_targets(arrays, mask_names)
        if self.target not in ("any", self.target_kind):
            raise UserError(
                f"data.target={self.target}: the items' targets are of the kind {self.target_kind}."
            )
        self._name_classes()

    def _columns(self, names: list[str]) -> dict[str, list[Any]]:
        columns: dict[str, list[Any]] = {name: [] for name in names}
        for i in range(len(self._items)):
            target = _by_name(self._target(i))
            for name in names:
                columns[name].append(_value(target, name))
        return columns

    def _target(self, position: int) -> Any:
        dataset, i = self._items[position]
        return dataset[i][1]

    def _mask_names_of(self, dataset: Any, i: int) -> list[str]:
        """Return the names of the masks: pictures, or arrays of the image's size."""
        image, target = dataset[i]
        size = _as_pillow(image).size[::-1]
        return [
            name
            for name, value in _by_name(target).items()
            if _is_mask(value, size, any_size=self.target == "mask")
        ]

    def _array(self, name: str, items: list[Any]) -> np.ndarray:
        """Return the targets of one name, (n, …) int64 or float32."""
        try:
            values = np.stack([np.asarray(item) for item in items])
            if values.dtype.kind not in "biu":
                values = values.astype(np.float32)
        except (ValueError, TypeError) as error:
            raise UserError(
                f"data.dataset: the targets{f' {name!r}' if name else ''} are not numbers or "
                f"arrays of one shape ({error})."
            ) from None
        are_classes = values.dtype.kind in "biu" and self.target != "number"
        if are_classes and (name or values.ndim == 1):
            return values.astype(np.int64)
        numbers = values.astype(np.float32)
        if self.unknown is not None and numbers.ndim == 2:
            numbers[numbers == self.unknown] = np.nan
        return numbers

    def _name_classes(self) -> None:
        classes = getattr(self._datasets[0], "classes", None)
        self.class_names = []
        if classes is not None:
            self.class_names = [str(name) for name in classes]
        elif self.target_kind == "labels":
            self.class_names = [str(i) for i in range(self._targets[""].shape[1])]
        elif self.target_kind == "class":
            self.class_names = [str(i) for i in range(1 + int(self._targets[""].max()))]
        elif self.target_kind == "mask":
            masks = (_mask_of(self._target(i)) for i in range(len(self._items)))
            self.class_names = mask_classes(levels_in(masks))
            self.warnings += note_on_levels(self.class_names)
            self._has_grey_levels = True

    def _hash(self) -> str:
        """Return a hash of the targets and of the images of 32 evenly spaced items.

        The images do not count where an item is another one each time it is read, although random
        transforms start from the same seeds.
        """
        places = np.linspace(0, len(self._items) - 1, min(len(self._items), SAMPLED_ITEMS))
        opener = self.sample_opener()
        pixels = []
        for position in places.astype(int).tolist():
            first = _read_from_seed(opener, position)
            if all(map(np.array_equal, first, _read_from_seed(opener, position))):
                pixels += first
        return hash_of_arrays(pixels, self._targets, self.class_names, self._given)

    def path_taken(self) -> tuple[str, str]:
        return "loader", "a Dataset is read item by item"

    def identical_images(self, limit: int | None = None) -> dict[str, list[str]]:
        return {}

    def sample_opener(self) -> OpenSample:
        levels = grey_levels_of(self.class_names) if self._has_grey_levels else None
        return ItemOpener(self._items, self.channels, self._mask_names, levels)


@dataclass(frozen=True)
class ItemOpener:
    """Open an image and its masks by their position among the items of all data sets."""

    items: list[Place]
    channels: int
    mask_names: list[str]
    grey_levels: list[int] | None  # of each class in masks; None: masks have the classes' numbers

    def __call__(self, position: int) -> tuple[Any, ...]:
        dataset, i = self.items[position]
        image, target = dataset[i]
        masks = [_mask_of(_by_name(target)[name]) for name in self.mask_names]
        masks = [classes_of_pixels(mask, self.grey_levels) for mask in masks]
        try:
            return in_8_bits(_as_pillow(image), self.channels), *as_masks(masks)
        except (ValueError, TypeError) as error:
            raise UserError(
                f"data.dataset: the image of item {i} of {type(dataset).__name__} has {error}."
            ) from None


def _titles(labels: Sequence[int], classes: Any, split: str) -> list[str]:
    """Return the class name of each label; a name that two classes have gets its number.

    Raises:
        UserError: a label is no class.
    """
    if classes is None:
        return [str(label) for label in labels]
    names = [str(name) for name in classes]
    counts = Counter(names)  # two classes of ImageNet are named crane
    titles = [f"{name} ({i})" if counts[name] > 1 else name for i, name in enumerate(names)]
    for i, label in enumerate(labels):
        if not 0 <= label < len(names):
            raise UserError(
                f"data.dataset: item {i} of the {split} dataset has the label {label} and there "
                f"are {len(names)} classes: remove such items."
            )
    return [titles[label] for label in labels]


def _whole(label: Any) -> int:
    number = int(label)
    if number != label and not isinstance(label, str):
        raise ValueError(label)
    return number


def _plain(label: Any) -> Any:
    return label.item() if hasattr(label, "item") else label


def _by_name(target: Any) -> dict[str, Any]:
    return target if isinstance(target, dict) else {"": target}


def _value(target: dict[str, Any], name: str) -> Any:
    if name not in target:
        raise UserError(f"data.dataset: an item has no target {name!r}, which the first item has.")
    return target[name]


def _is_mask(value: Any, size: tuple[int, ...], *, any_size: bool) -> bool:
    if isinstance(value, Image.Image) or np.shape(value) == size:
        return True
    return any_size and np.ndim(value) == 2


def _mask_of(value: Any) -> np.ndarray:
    pixels = np.asarray(value)
    if pixels.max() > VOID:
        raise UserError(
            f"data.dataset: a mask has the value {pixels.max()}: 0 to 254 are classes, 255 does "
            "not count."
        )
    return np.where(pixels < 0, VOID, pixels).astype(np.uint8)


@contextmanager
def _same_random_numbers() -> Iterator[None]:
    """Let random transforms draw the same numbers in every process, and restore their streams."""
    python_state = random.getstate()
    numpy_state = np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        try:
            yield
        finally:
            random.setstate(python_state)
            np.random.set_state(numpy_state)


def _read_from_seed(opener: OpenSample, position: int) -> list[np.ndarray]:
    """Return the pixels of an item and its masks, [] where the loader will refuse it."""
    with suppress(UserError), _same_random_numbers():
        return [np.asarray(picture) for picture in opener(position)]
    return []


def _as_pillow(image: Any) -> Image.Image:
    if isinstance(image, Image.Image):
        return image
    if hasattr(image, "movedim") and image.ndim == 3:
        image = image.movedim(0, -1)
    pixels = np.asarray(image)
    if pixels.dtype.kind == "f":
        low = pixels.min()
        high = pixels.max()
        if not 0 <= low <= high <= 1:
            raise ValueError(
                f"values from {low:.3g} to {high:.3g}: remove its Normalize, as Lockstep normalises"
            )
        pixels = np.round(255 * pixels).astype(np.uint8)
    if pixels.dtype != np.uint8:
        raise ValueError(f"the type {pixels.dtype}: give bytes, or floats from 0 to 1")
    is_grey = pixels.ndim == 3 and pixels.shape[-1] == 1
    return Image.fromarray(pixels[..., 0] if is_grey else pixels)
