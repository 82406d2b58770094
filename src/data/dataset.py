"""Any torch Dataset that returns (image, target)."""

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch.utilities.seed import isolate_rng
from PIL import Image, ImageOps

from lockstep.data.content_hash import hash_arrays
from lockstep.data.decoding import to_8_bits
from lockstep.data.depth import measure_colours
from lockstep.data.file_values import Header, add_band_axis
from lockstep.data.image_list import ImageList
from lockstep.data.listed_datamodule import ListedDataModule
from lockstep.data.listing import SPLITS, Item
from lockstep.data.loading import OpenSample
from lockstep.data.reading import AUTO, BY_WINDOW, FileValues, Reading
from lockstep.data.targets import (
    describe_grey_levels,
    find_levels,
    name_mask_classes,
    number_pixels,
    to_mask_pixels,
    to_masks,
)
from lockstep.process.errors import UserError

# The number of items whose images are hashed, and of those whose mean and deviation are measured.
SAMPLED_ITEMS = 32
MEASURED_ITEMS = 256
# With so many seeds a random flip is seen.
SEEDS_TRIED = 8
EIGHT_BITS = "8 bits"
MAX_BANDS = 4  # red, green, blue and alpha
GIVE_RANGE = "give data.range=[BLACK,WHITE], as [0,4095], or data.range=image"
# A data set and the number of an item in it.
DatasetItem = tuple[Any, int]


class DatasetDataModule(ListedDataModule):
    """The data module of up to three torch Datasets.

    Images are Pillow images, arrays (height, width, channels) or tensors (channels, …). Values are
    bytes, or floats from 0 to 1. With `range` they may be any numbers, which are read in full
    depth. Masks are Pillow images, or arrays or tensors (height, width).

    The labels are the data set's `targets` or `labels`, as torchvision names them. If it has
    neither, every item is read. The class names are its `classes`.
    """

    target_choices = ("class", "number", "mask", "any")
    source: "DatasetImages"

    def __init__(
        self,
        *,
        dataset: Any = None,
        val_dataset: Any = None,
        test_dataset: Any = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        if self.reading.page or self.range_option == BY_WINDOW:
            raise UserError(
                "data.page and data.range=window are of files: leave them out, and choose pages "
                "and values in the Dataset."
            )
        if self.range_option != AUTO:
            self.reading = replace(self.reading, value_range=self.range_option)
            self.has_float_pixels = self.reading.has_float_pixels
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

    def list_images(self) -> ImageList:
        return DatasetImages(self._datasets, self.target, self.reading, self.unknown)

    def decode_source(self) -> None:
        """Measure some images if they are deep. Workers decode the images later."""
        depth = self.source.depth
        if self.has_float_pixels:
            self.depth_note = self._describe_depth(depth)
            self._measure_colours()
        elif self.range_option == AUTO and depth != EIGHT_BITS:
            self.source.warnings.append(
                f"The images have {depth} and are read in 8. Give data.range=[BLACK,WHITE], as "
                "[0,4095], or data.range=null if 8 are enough."
            )

    def _measure_colours(self) -> None:
        """Measure and set mean and deviation of deep images.

        Each rank measures the same images from the same seeds. The values are not cached, because
        nothing tells whether a cached value is still right.
        """
        positions = self._pick_measured_positions(MEASURED_ITEMS)
        with fixed_seeds():
            colours = measure_colours(self.source, positions, self.framing, threads=1)
        self._set_colours(colours)

    def choose_path(self) -> tuple[str, str]:
        return "loader", "a Dataset is read item by item"


class DatasetImages(ImageList):
    """The items of up to three data sets, which train, validate and test.

    Args:
        target: class, number, mask, or any, which takes the targets as they are.
        reading: how images become pixels. Only its channels and its range count.
        unknown: the number in several labels that means "not known"; None: there is none.
    """

    reads_files = False
    is_comparable = False

    def __init__(
        self, datasets: Sequence[Any], target: str, reading: Reading, unknown: float | None
    ) -> None:
        self.reading = reading
        self._target = target
        self._unknown = unknown
        self._dataset_items: list[DatasetItem] = []
        items: list[Item] = []
        for split, dataset in enumerate(datasets):
            if dataset is None:
                continue
            labels, classes = self._read_labels(dataset)
            for i, title in enumerate(_name_labels(labels, classes, SPLITS[split])):
                items.append(Item(f"item {i} of the {SPLITS[split]} dataset", title, split))
                self._dataset_items.append((dataset, i))
        super().__init__(Path(), items)

        # An image that cannot be used is refused before training.
        self.open(0)
        self.depth = self._find_depth()
        if target != "class":
            self._read_targets(getattr(datasets[0], "classes", None))
        self.list_hash = self._hash_items()
        self._warn_of_random_evaluation(datasets)
        first = self.class_names[0] if target == "class" else ""
        if first.startswith("-") and first[1:].isdigit():
            self.warnings.append(
                f"data.dataset: the label {first} counts as a class of its own. If it means "
                "unknown, remove such items."
            )

    def _find_depth(self) -> str:
        """Return the depth of the first image, as "16 bits".

        Without `range` floats from 0 to 1 count as 8 bits.
        """
        dataset, i = self._dataset_items[0]
        with fixed_seeds():
            dtype = _to_array(dataset[i][0]).dtype
        is_picture = dtype.kind == "b" or (dtype.kind == "f" and not self.reading.has_float_pixels)
        if is_picture:
            return EIGHT_BITS
        return Header(dtype).depth

    def _read_labels(self, dataset: Any) -> tuple[list[int], Any]:
        """Return the label of each item, and the names of the classes, or None for the names."""
        if self._target != "class":
            return [0] * len(dataset), None
        transform = getattr(dataset, "target_transform", None)
        classes = getattr(dataset, "classes", None)
        labels = _get_labels(dataset)
        try:
            if labels is None:
                items = [_to_whole_number(dataset[i][1]) for i in range(len(dataset))]
                return items, None if transform else classes
            # A target_transform may number the classes anew. Then their names are not known.
            if not transform:
                return [_to_whole_number(label) for label in labels], classes
            python_labels = [_to_python(label) for label in labels]
            transformed = [_to_whole_number(transform(label)) for label in python_labels]
            return transformed, classes if transformed == python_labels else None
        except (TypeError, ValueError) as error:
            raise UserError(
                f"data.dataset: a label of {type(dataset).__name__} is not an integer ({error}); "
                "data.target=any takes other targets."
            ) from None

    def _read_targets(self, classes: Sequence[Any] | None) -> None:
        """Read the targets of all items, except masks, which are read with their images."""
        self.mask_names = self._find_mask_names()
        names = [name for name in self._read_target(0) if name not in self.mask_names]
        columns: dict[str, list[Any]] = {name: [] for name in names}
        # An item may be slow to make. If all targets are masks, no item is read here.
        for i in range(len(self) if names else 0):
            target = self._read_target(i)
            for name in names:
                columns[name].append(_get_target(target, name))
        self.targets = {
            name: self._convert_targets(name, values) for name, values in columns.items()
        }
        if self._target not in ("any", self.target_kind):
            raise UserError(
                f"data.target={self._target}: the items' targets are of the kind "
                f"{self.target_kind}."
            )
        self.class_names = self._name_classes(classes)

    def _read_target(self, position: int) -> dict[str, Any]:
        """Return the targets of an item by name."""
        dataset, i = self._dataset_items[position]
        return _name_targets(dataset[i][1])

    def _find_mask_names(self) -> list[str]:
        """Return the names of the masks: they are pictures, or arrays of the image's size."""
        dataset, i = self._dataset_items[0]
        image, target = dataset[i]
        size = _to_array(image).shape[:2]
        any_size = self._target == "mask"
        by_name = _name_targets(target)
        return [name for name in by_name if _is_mask(by_name[name], size, any_size=any_size)]

    def _convert_targets(self, name: str, items: list[Any]) -> np.ndarray:
        """Return the targets of one name, (n, …) int64 for classes, else float32."""
        values = _stack_targets(name, items)
        are_whole = values.dtype.kind in "biu" and self._target != "number"
        if are_whole and (name or values.ndim == 1):
            return values.astype(np.int64)
        numbers = values.astype(np.float32)
        if self._unknown is not None and numbers.ndim == 2:
            numbers[numbers == self._unknown] = np.nan
        if numbers.ndim == 1 or self._target == "number":
            self._refuse_not_finite(name, numbers)
        return numbers

    def _refuse_not_finite(self, name: str, numbers: np.ndarray) -> None:
        """Refuse a target that is nan or infinite, because every loss would be nan."""
        wrong = np.flatnonzero(~np.isfinite(numbers.reshape(len(numbers), -1)).all(1))
        if not len(wrong):
            return
        dataset, i = self._dataset_items[wrong[0]]
        prefix = f"{name}=" if name else ""
        raise UserError(
            f"data.dataset: item {i} of {type(dataset).__name__} has the target "
            f"{prefix}{numbers[wrong[0]]}, as {len(wrong)} of {len(numbers)} items "
            "that are not finite: remove them."
        )

    def _name_classes(self, classes: Sequence[Any] | None) -> list[str]:
        kind = self.target_kind
        if classes is not None:
            return [str(name) for name in classes]
        if kind == "labels":
            return [str(i) for i in range(self.targets[""].shape[1])]
        if kind == "class":
            return [str(i) for i in range(1 + int(self.targets[""].max()))]
        if kind != "mask":
            return []
        self.has_grey_levels = True
        names = name_mask_classes(
            find_levels(_to_mask(self._read_target(i)[""]) for i in range(len(self)))
        )
        self.warnings += describe_grey_levels(names)
        return names

    def _warn_of_random_evaluation(self, datasets: Sequence[Any]) -> None:
        """Warn if images of the validation or test change each time, as random crops do."""
        for dataset in datasets[1:]:
            evaluated = datasets[0] if dataset is None else dataset
            positions = [i for i, item in enumerate(self._dataset_items) if item[0] is evaluated]
            if positions and self._changes(positions[0]):
                self.warnings.append(
                    f"Images of {type(evaluated).__name__} change each time they are read, also in "
                    "validation and test: give data.val_dataset= and data.test_dataset= without "
                    "random transforms."
                )
                return

    def _changes(self, position: int) -> bool:
        """Return whether an item depends on random numbers."""
        first = _read_from_seed(self.open, position)
        others = [_read_from_seed(self.open, position, seed) for seed in range(1, SEEDS_TRIED)]
        return not all(all(map(np.array_equal, first, other)) for other in others)

    def _hash_items(self) -> str:
        """Return a hash of the targets and of the images of 32 evenly spaced items.

        The image of an item does not count if it differs each time, although random transforms
        start from the same seeds.
        """
        positions = np.linspace(0, len(self) - 1, min(len(self), SAMPLED_ITEMS))
        pixels = []
        for position in positions.astype(int).tolist():
            first = _read_from_seed(self.open, position)
            if all(map(np.array_equal, first, _read_from_seed(self.open, position))):
                pixels += first
        return hash_arrays(pixels, self.targets, self.class_names, self.split_ids)

    def hash(self) -> str:
        return self.list_hash

    def open(self, position: int) -> tuple[Any, ...]:
        dataset, i = self._dataset_items[position]
        image, target = dataset[i]
        masks = [_to_mask(_name_targets(target)[name]) for name in self.mask_names]
        levels = self.grey_levels
        try:
            masks = [number_pixels(mask, levels) for mask in masks]
            return self._convert_image(image), *to_masks(masks)
        except (ValueError, TypeError) as error:
            raise UserError(
                f"data.dataset: item {i} of {type(dataset).__name__}: {error}."
            ) from None

    def _convert_image(self, image: Any) -> Any:
        reading = self.reading
        if isinstance(image, Image.Image) and not self.mask_names:
            # Files are rotated by their EXIF data, too. A mask would not turn with its image.
            image = ImageOps.exif_transpose(image)
        if not reading.has_float_pixels:
            return to_8_bits(_to_pillow(image), reading.channels)
        if isinstance(image, Image.Image):
            return reading.to_image(FileValues(reading.to_bands(image)))
        array = add_band_axis(_to_array(image))
        if array.dtype == bool:
            array = array.astype(np.uint8) * 255
        if reading.value_range is None and array.dtype.kind == "f":
            _refuse_other_floats(array)
            reading = replace(reading, value_range=(0.0, 1.0))
        elif reading.value_range is None and array.dtype != np.uint8:
            raise ValueError(f"the image has the type {array.dtype}: {GIVE_RANGE}")
        return reading.to_image(FileValues(array))


def _name_labels(labels: Sequence[int], classes: Any, split: str) -> list[str]:
    """Return the class name of each label. If two classes share a name, it gets their number.

    Raises:
        UserError: a label is no class.
    """
    if classes is None:
        return [str(label) for label in labels]
    names = [str(name) for name in classes]
    # Two classes of ImageNet are named crane.
    counts = Counter(names)
    titles = [f"{name} ({i})" if counts[name] > 1 else name for i, name in enumerate(names)]
    for i, label in enumerate(labels):
        if not 0 <= label < len(names):
            raise UserError(
                f"data.dataset: item {i} of the {split} dataset has the label {label} and there "
                f"are {len(names)} classes: remove such items."
            )
    return [titles[label] for label in labels]


def _to_whole_number(label: Any) -> int:
    number = int(label)
    if number != label and not isinstance(label, str):
        raise ValueError(label)
    return number


def _to_python(label: Any) -> Any:
    return label.item() if hasattr(label, "item") else label


def _name_targets(target: Any) -> dict[str, Any]:
    return target if isinstance(target, dict) else {"": target}


def _get_target(target: dict[str, Any], name: str) -> Any:
    if name not in target:
        raise UserError(f"data.dataset: an item has no target {name!r}, which the first item has.")
    return target[name]


def _stack_targets(name: str, items: list[Any]) -> np.ndarray:
    """Return the targets of one name in an array, whole numbers as they are, else float32."""
    try:
        values = np.stack([np.asarray(item) for item in items])
        return values if values.dtype.kind in "biu" else values.astype(np.float32)
    except (ValueError, TypeError) as error:
        raise UserError(
            f"data.dataset: the targets{f' {name!r}' if name else ''} are not numbers or "
            f"arrays of one shape ({error})."
        ) from None


def _is_mask(value: Any, size: tuple[int, ...], *, any_size: bool) -> bool:
    if isinstance(value, Image.Image) or np.shape(value) == size:
        return True
    return any_size and np.ndim(value) == 2


def _to_mask(value: Any) -> np.ndarray:
    return to_mask_pixels(np.asarray(value), "data.dataset")


@contextmanager
def fixed_seeds(seed: int = 0) -> Iterator[None]:
    """Seed all random generators alike in every process, and restore them at the end."""
    with isolate_rng(include_cuda=False):
        torch.default_generator.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        yield


def _read_from_seed(open_sample: OpenSample, position: int, seed: int = 0) -> list[np.ndarray]:
    """Return the pixels of an item and its masks; [] if the loader will refuse the item."""
    with fixed_seeds(seed), suppress(UserError):
        return [np.asarray(picture) for picture in open_sample(position)]
    return []


def _to_array(image: Any) -> np.ndarray:
    """Return (height, width) or (height, width, channels) of an image of any kind."""
    if hasattr(image, "movedim") and image.ndim == 3:
        image = image.movedim(0, -1)
    return np.asarray(image)


def _refuse_other_floats(pixels: np.ndarray) -> None:
    """Refuse floats that are not from 0 to 1.

    Raises:
        ValueError: with the range of the values.
    """
    low = pixels.min()
    high = pixels.max()
    if not 0 <= low <= high <= 1:
        raise ValueError(
            f"the image has values from {low:.3g} to {high:.3g}: remove its Normalize, as Lockstep "
            f"normalises, or {GIVE_RANGE}"
        )


def _to_pillow(image: Any) -> Image.Image:
    if isinstance(image, Image.Image):
        return image
    pixels = _to_array(image)
    if pixels.dtype.kind == "f":
        _refuse_other_floats(pixels)
        pixels = np.round(255 * pixels).astype(np.uint8)
    if pixels.dtype != np.uint8:
        raise ValueError(f"the image has the type {pixels.dtype}: {GIVE_RANGE}")
    if pixels.ndim == 3 and pixels.shape[2] > MAX_BANDS:
        count = pixels.shape[2]
        raise ValueError(f"the image has {count} channels: give data.channels={count}")
    is_grey = pixels.ndim == 3 and pixels.shape[-1] == 1
    return Image.fromarray(pixels[..., 0] if is_grey else pixels)


def _get_labels(dataset: Any) -> Any:
    """Return the labels that a data set has as an attribute, or None."""
    labels: Any = getattr(dataset, "targets", getattr(dataset, "labels", None))
    # An attribute with this name may mean something else, such as the list of classes.
    if not hasattr(labels, "__len__") or len(labels) != len(dataset):
        return None
    return labels
