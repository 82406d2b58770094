"""Any torch Dataset that returns (image, label)."""

from functools import partial
from pathlib import Path
from typing import Any

from PIL import Image

from lockstep.data.listed_datamodule import ListedDataModule
from lockstep.data.listing import SPLITS, ImageList, make_list
from lockstep.data.streaming import OpenImage
from lockstep.runs.errors import UserError


class DatasetDataModule(ListedDataModule):
    """Images are Pillow images, arrays (height, width, channels) of bytes, or tensors (channels, height, width).

    Labels come from the data set's `targets` or `labels`, as torchvision names them, else from a look at every item;
    class names from its `classes`.

    Args:
        dataset: to train on.
        val_dataset: to validate on; None: a part of `dataset`.
        test_dataset: to test on; None: a part of `dataset`.
        options: as of ListedDataModule.
    """

    def __init__(
        self, *, dataset: Any = None, val_dataset: Any = None, test_dataset: Any = None, name: str = "dataset",
        **options: Any,
    ) -> None:  # fmt: skip
        super().__init__(name=name, **options)
        if dataset is None or not hasattr(dataset, "__getitem__"):
            raise UserError(
                "data=dataset needs data.dataset._target_=package.Class: a torch Dataset with items (image, label)."
            )
        self._datasets = {
            split: each for split, each in enumerate((dataset, val_dataset, test_dataset)) if each is not None
        }

    def list_images(self) -> ImageList:
        labels, splits, names = [], [], []
        self._items: list[tuple[Any, int]] = []
        for split, dataset in self._datasets.items():
            found = _labels_of(dataset)
            classes = getattr(dataset, "classes", None)
            labels += [str(classes[label]) if classes is not None else str(label) for label in found]
            splits += [split] * len(found)
            names += [f"item {i} of the {SPLITS[split]} dataset" for i in range(len(found))]
            self._items += [(dataset, i) for i in range(len(found))]
        none = [0] * len(names)
        return make_list(Path(), names, labels, splits, none, none)

    def _choose_path(self, side: int | None) -> tuple[str, str]:
        return "loader", "a Dataset is read item by item"

    def identical_images(self, compare_all: bool = False) -> dict[str, list[str]]:
        return {}

    def source_opener(self) -> OpenImage:
        return partial(_open_item, self._items, self.channels)


def _labels_of(dataset: Any) -> list[int]:
    found = next((getattr(dataset, name) for name in ("targets", "labels") if hasattr(dataset, name)), None)
    labels = [dataset[i][1] for i in range(len(dataset))] if found is None else found
    try:
        return [int(label) for label in labels]
    except (TypeError, ValueError) as error:
        raise UserError(f"data.dataset: a label of {type(dataset).__name__} is no whole number ({error}).") from None


def _open_item(items: list[tuple[Any, int]], channels: int, position: int) -> Image.Image:
    dataset, i = items[position]
    image = dataset[i][0]
    if not isinstance(image, Image.Image):
        from torchvision.transforms.v2.functional import to_pil_image

        image = to_pil_image(image)
    return image.convert("L" if channels == 1 else "RGB")
