"""Any torch Dataset that returns (image, target)."""

from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from lockstep.data.decoding import in_8_bits
from lockstep.data.listed_datamodule import ListedDataModule
from lockstep.data.listing import SPLITS, ImageList, Item
from lockstep.data.loading import OpenSample
from lockstep.data.targets import BINARY, VOID, as_masks, hash_of, mask_classes
from lockstep.runs.errors import UserError


class DatasetDataModule(ListedDataModule):
    """Images are Pillow images, arrays (height, width, channels) or tensors (channels, height, width), of bytes or 0–1.

    Labels come from the data set's `targets` or `labels`, as torchvision names them, else from a look at every item;
    class names from its `classes`. Masks are Pillow images, or arrays or tensors (height, width).
    """

    target_choices = ("class", "number", "mask", "any")

    def __init__(
        self, *, dataset: Any = None, val_dataset: Any = None, test_dataset: Any = None, **options: Any
    ) -> None:  # fmt: skip
        super().__init__(**options)
        if not hasattr(dataset, "__getitem__"):
            raise UserError(
                "data=dataset needs data.dataset._target_=package.Class: a torch Dataset with items (image, target)."
            )
        if self.group:
            raise UserError("data.group is of files and tables: give data.val_dataset and data.test_dataset.")
        self._datasets = (dataset, val_dataset, test_dataset)

    def list_images(self) -> ImageList:
        items: list[Item] = []
        self._items: list[tuple[Any, int]] = []
        for split, dataset in enumerate(self._datasets):
            labels, classes = ([], None) if dataset is None else self._labels_of(dataset)
            names = list(map(str, classes or ()))
            repeated = {name for name, count in Counter(names).items() if count > 1}  # as the two cranes of ImageNet
            for i, label in enumerate(labels):
                if classes is not None and not 0 <= label < len(classes):
                    where = f"item {i} of the {SPLITS[split]} dataset has the label {label}"
                    raise UserError(f"data.dataset: {where} and there are {len(classes)} classes: remove such items.")
                title = str(label) if classes is None else names[label]
                title += f" ({label})" if title in repeated else ""
                items.append(Item(f"item {i} of the {SPLITS[split]} dataset", title, split))
                self._items.append((dataset, i))
        return ImageList(Path(), items)

    def _labels_of(self, dataset: Any) -> tuple[list[int], Any]:
        """Return the label of each item, and the names of the classes or None."""
        if self.target != "class":
            return [0] * len(dataset), None
        known = getattr(dataset, "targets", getattr(dataset, "labels", None))
        change, classes = getattr(dataset, "target_transform", None), getattr(dataset, "classes", None)
        try:
            if known is None:
                return [_whole(dataset[i][1]) for i in range(len(dataset))], None if change else classes
            if not change:
                return [_whole(each) for each in known], classes
            plain = [each.item() if hasattr(each, "item") else each for each in known]
            labels = [_whole(change(each)) for each in plain]
            return labels, classes if labels == plain else None
        except (TypeError, ValueError) as error:
            what = f"a label of {type(dataset).__name__} is not an integer ({error})"
            raise UserError(f"data.dataset: {what}; data.target=any takes other targets.") from None

    def _load(self) -> None:
        super()._load()
        self.sample_opener()(0)  # whether images can be used is known before training
        if self.target != "class":
            self._read_targets()
        self.data_hash = self.list_hash = hash_of(np.zeros(0), self._targets, self.class_names, self._given)

    def _read_targets(self) -> None:
        items, targets = [_by_name(dataset[i][1]) for dataset, i in self._items], {}
        first, i = self._items[0]
        size = _as_pillow(first[i][0]).size[::-1]
        masks = [
            name for name, value in items[0].items()
            if isinstance(value, Image.Image) or np.shape(value) == size
            or (self.target == "mask" and np.ndim(value) == 2)
        ]  # fmt: skip
        for name in items[0].keys() - set(masks):
            try:
                values = np.stack([np.asarray(item[name]) for item in items])
                values = values if values.dtype.kind in "biu" else values.astype(np.float32)
            except (ValueError, TypeError, KeyError) as error:
                what = f"the targets{f' {name!r}' if name else ''} are not numbers or arrays of one shape"
                raise UserError(f"data.dataset: {what} ({error}).") from None
            whole = values.dtype.kind in "biu" and self.target != "number" and (name or values.ndim == 1)
            targets[name] = values.astype(np.int64 if whole else np.float32)
        self._set_targets(targets, masks)
        if self.target not in ("any", self.target_kind):
            raise UserError(f"data.target={self.target}: the items' targets are of the kind {self.target_kind}.")
        classes = getattr(self._datasets[0], "classes", None)
        if classes is None and self.target_kind == "labels":
            classes = range(targets[""].shape[1])
        elif classes is None and self.target_kind == "class":
            classes = range(1 + int(targets[""].max()))
        elif classes is None and self.target_kind == "mask":
            classes = mask_classes(len(items), lambda i: _mask_of(items[i][""]))
        self.class_names = [str(name) for name in classes or ()]

    def path_taken(self) -> tuple[str, str]:
        return "loader", "a Dataset is read item by item"

    def identical_images(self, limit: int | None = None) -> dict[str, list[str]]:
        return {}

    def sample_opener(self) -> OpenSample:
        return partial(_open_item, self._items, self.channels, self._mask_names, self.class_names == BINARY)


def _whole(label: Any) -> int:
    if (number := int(label)) != label and not isinstance(label, str):
        raise ValueError(label)
    return number


def _by_name(target: Any) -> dict[str, Any]:
    return target if isinstance(target, dict) else {"": target}


def _mask_of(value: Any) -> np.ndarray:
    pixels = np.asarray(value)
    if pixels.max() > VOID:
        raise UserError(f"data.dataset: a mask has the value {pixels.max()}: 0 to 254 are classes, 255 does not count.")
    return np.where(pixels < 0, VOID, pixels).astype(np.uint8)


def _open_item(
    items: list[tuple[Any, int]], channels: int, mask_names: list[str], is_binary: bool, position: int
) -> tuple[Any, ...]:  # fmt: skip
    dataset, i = items[position]
    image, target = dataset[i]
    masks = [_mask_of(_by_name(target)[name]) for name in mask_names]
    masks = [(mask == VOID).astype(np.uint8) if is_binary else mask for mask in masks]
    try:
        return in_8_bits(_as_pillow(image), channels), *as_masks(masks)
    except (ValueError, TypeError) as error:
        raise UserError(f"data.dataset: the image of item {i} of {type(dataset).__name__} has {error}.") from None


def _as_pillow(image: Any) -> Image.Image:
    if isinstance(image, Image.Image):
        return image
    pixels = np.asarray(image.movedim(0, -1) if hasattr(image, "movedim") and image.ndim == 3 else image)
    if pixels.dtype.kind == "f":
        low, high = pixels.min(), pixels.max()
        if not 0 <= low <= high <= 1:
            raise ValueError(f"values from {low:.3g} to {high:.3g}: remove its Normalize, as Lockstep normalises")
        pixels = np.round(255 * pixels).astype(np.uint8)
    if pixels.dtype != np.uint8:
        raise ValueError(f"the type {pixels.dtype}: give bytes, or floats from 0 to 1")
    return Image.fromarray(pixels[..., 0] if pixels.ndim == 3 and pixels.shape[-1] == 1 else pixels)
